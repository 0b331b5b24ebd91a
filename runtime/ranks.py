"""Rank 0's side of an engine of several ranks: it starts the others' processes and leads them.

Every replay is announced to all ranks and then run here; what they say to each other inside it, they
say through their exchange blocks. A rank that errs ends, and one that ends hangs up: between replays
sending sees that, inside one the native wait on the CPU, and on a GPU the host, which ends the waits of
its kernels. This side then fails with an error that names the first one, and hangs up, which ends the
others, as its own end does.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import time
import weakref
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Self, TypeVar

import msgspec
from torch import Tensor

from inkling_engine.artifacts.child import how_it_ended, module_command
from inkling_engine.artifacts.manifest import Manifest
from inkling_engine.runtime.capture import CapturedGraphs
from inkling_engine.runtime.errors import FailedError, UserError
from inkling_engine.runtime.mirror import Mirror
from inkling_engine.runtime.rank_messages import (
    REMEDY,
    Answer,
    Block,
    Command,
    Confirm,
    Digest,
    Digests,
    Failure,
    Left,
    Measure,
    Measured,
    Peers,
    Proceed,
    Ready,
    Replay,
    Start,
    receive_handles,
    send_handles,
    socket_of,
)
from inkling_engine.runtime.replay import Replayer
from inkling_engine.runtime.seat import POOL, Blocks, open_blocks

MODULE = "inkling_engine.runtime.rank"
_WORD, _GRACE = 1.0, 2.0  # seconds in which ranks say what happened, and end by themselves
_LATE = 1.0  # seconds of a replay after which another rank may have given up waiting for this one
_PATIENCE = 5  # seconds in which a rank must read its commands, and answer those that wait for it
_Kind = TypeVar("_Kind", bound=Answer)


class Ranks:
    """The processes of ranks 1 and up, and rank 0's `Seat`."""

    rank = 0

    def __init__(
        self,
        sockets: Mapping[int, Connection],
        processes: Mapping[int, subprocess.Popen[bytes]] | None = None,
    ) -> None:
        """Lead the ranks behind `sockets`, each a Unix socket to a `Member` that waits for its start;
        `processes`, by rank, end with this."""
        self.processes, self._sockets = processes or {}, sockets
        self._blocks: list[Blocks] = []
        self._end = weakref.finalize(self, _end, self.processes, sockets, self._blocks)
        self._failure: UserError | None = None
        self._lives = select.poll()
        self._ranks = {connection.fileno(): rank for rank, connection in sockets.items()}
        for connection in sockets.values():
            self._lives.register(connection, 0)  # tells hang-ups only
            with socket_of(connection) as one:
                patience = struct.pack("ll", _PATIENCE, 0)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)

    @classmethod
    def spawn(cls, world: int, module: str = MODULE) -> Self:
        """Start a process `python -m module` for each other rank."""
        processes: dict[int, subprocess.Popen[bytes]] = {}
        sockets: dict[int, Connection] = {}
        try:
            for rank in range(1, world):
                processes[rank], sockets[rank] = _spawn(module)
        except BaseException:
            _end(processes, sockets, [])
            raise
        return cls(sockets, processes)

    @property
    def blocks(self) -> Blocks:
        """The exchange blocks, once there are pools."""
        return self._blocks[0]

    def start(
        self,
        folder: str,
        *,
        steps: int = 1,
        device: int | tuple[int, ...] = 0,
        memory: float | None = None,
        drawn: int | None = None,
    ) -> None:
        """Let all ranks load `folder`; see `LoadOptions` for the rest."""
        world = 1 + len(self._sockets)
        for rank in self._sockets:
            self._send(rank, Start(rank, world, folder, steps, device, memory, drawn))

    def pools(self, manifest: Manifest, device: str) -> Mapping[str, Tensor]:
        """Rank 0's exchange block."""
        self._blocks.append(open_blocks(manifest, device, 0))
        return {POOL: self.blocks.own}

    def proceed(self) -> None:
        """Let the ranks open native code."""
        self.send(Proceed())

    def meet(self, pools: Mapping[str, Tensor]) -> None:
        """Exchange the blocks with all ranks, and wait until they have loaded."""
        handles = {0: self.blocks.share(pools)}
        try:
            self._swap(handles)
            lives = {rank: connection.fileno() for rank, connection in self._sockets.items()}
            self.blocks.meet({r: one for r, one in handles.items() if r}, lives, pools)
        except (EOFError, OSError):
            raise self._fail() from None
        finally:
            for handle in handles.values():
                os.close(handle)
        self._answers(Ready)

    def replayer(self, local: Replayer, mirrors: Mapping[str, Mirror]) -> Replayer:
        """What replays on all ranks."""
        if isinstance(local, CapturedGraphs):
            local.seat = self
        return Together(self, local, mirrors)

    def mark(self) -> None:
        """Behind a replay, on its stream: let the host see the error word."""
        self.blocks.mark()

    def watch(self) -> None:
        """While a replay is waited for: end the waits in it if a rank is gone."""
        if self._end.alive and (gone := self._lives.poll(0)):
            handle = gone[0][0]
            self.blocks.give_up(self._ranks[handle])
            self._lives.unregister(handle)

    def digests(self) -> list[dict[str, str]]:
        """`StatePool.replicated` of ranks 1 and up, after all replays so far."""
        self.send(Digest())
        return [answer.digests for answer in self._answers(Digests)]

    def usage(self) -> list[dict[str, Any]]:
        """`usage.describe` of ranks 1 and up."""
        self.send(Measure())
        return [answer.usage for answer in self._answers(Measured)]

    def send(self, command: Command) -> None:
        """Send `command` to all other ranks. Raises a UserError that names the first failed one."""
        for rank in self._sockets:
            self._send(rank, command)
        if self._failure:
            raise self._failure

    def check(self, seconds: float) -> None:
        """Raise a UserError if a replay, which took so long, did not have the parts of all ranks."""
        if self.blocks.missing() is not None:
            raise self._fail()
        if seconds > _LATE:
            self.send(Confirm())
            self._answers(Ready, _PATIENCE)

    def close(self) -> None:
        """End all ranks, whatever they do. Twice does no harm."""
        self._end()

    def _swap(self, handles: dict[int, int]) -> None:
        """Add the other ranks' descriptors, by rank, and give to each those of the others."""
        self._answers(Block)
        for rank, connection in self._sockets.items():
            handles[rank] = receive_handles(connection, 1)[0]
        for rank, connection in self._sockets.items():
            self._send(rank, Peers())
            send_handles(connection, [handles[r] for r in sorted(handles) if r != rank])

    def _answers(self, kind: type[_Kind], patience: float | None = None) -> list[_Kind]:
        """The next answer of every rank, each a `kind`, and the next one within `patience` seconds."""
        found: dict[int, _Kind] = {}
        waiting = {connection: rank for rank, connection in self._sockets.items()}
        while waiting:
            ready = wait(list(waiting), patience)
            if not ready:
                raise self._fail(stuck=min(waiting.values()))
            for connection in ready:
                assert isinstance(connection, Connection)
                answer = _read(connection)
                if not isinstance(answer, kind):
                    raise self._fail({waiting[connection]: answer})
                found[waiting.pop(connection)] = answer
        return [found[rank] for rank in sorted(found)]

    def _send(self, rank: int, command: Command) -> None:
        try:
            self._sockets[rank].send_bytes(msgspec.msgpack.encode(command))
        except BlockingIOError:
            raise self._fail(stuck=rank) from None
        except OSError:
            raise self._fail() from None

    def _fail(
        self, said: Mapping[int, Answer | None] | None = None, stuck: int | None = None
    ) -> UserError:
        """End all ranks; what names the first failed one. `said` are last answers that were read
        already, None of a rank that is gone; `stuck` is one that does nothing, if none is."""
        if self._failure is None:
            self._failure = self._cause(dict(said or {}), stuck)
            self.close()
        return self._failure

    def _cause(self, said: dict[int, Answer | None], stuck: int | None) -> UserError:
        """Ask around for a while which rank erred or died; else it is the one that was waited for."""
        until = time.monotonic() + _WORD
        while not any(answer is None or isinstance(answer, Failure) for answer in said.values()):
            silent = {one: rank for rank, one in self._sockets.items() if rank not in said}
            ready = wait(list(silent), max(0.0, until - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                answer = _read(connection)
                if not isinstance(answer, Block | Ready | Digests | Measured):
                    said[silent[connection]] = answer
        failures = [answer.error() for answer in said.values() if isinstance(answer, Failure)]
        dead = [rank for rank, answer in said.items() if answer is None]
        left = [answer.missing for answer in said.values() if isinstance(answer, Left)]
        if failures:
            return failures[0]
        if dead:
            found = _exit_status(self.processes.get(dead[0]))
            return FailedError(f"rank {dead[0]}", found, "a rank that goes on", REMEDY)
        missing = self.blocks.missing() if self._blocks else None
        blamed = next(rank for rank in (missing, *left, stuck) if rank is not None)
        if blamed in self.processes:
            self.processes[blamed].kill()  # it would not end by itself
        return FailedError(f"rank {blamed}", "waited for in vain", "its part of a sum", REMEDY)


class Together:
    """A replayer that has all ranks replay, and fails when one of them does."""

    def __init__(self, ranks: Ranks, local: Replayer, mirrors: Mapping[str, Mirror]) -> None:
        """Rank 0 replays by `local`, over row buffers that `mirrors` send, by program."""
        self._ranks, self._local, self._mirrors = ranks, local, mirrors
        self.overlaps = local.overlaps
        self._step = 0

    def replay(self, name: str, steps: int) -> Callable[[], None]:
        """Begin a replay on all ranks; what is returned waits for rank 0's results."""
        mirror, began = self._mirrors[name], time.monotonic()
        self._ranks.send(Replay(name, steps, self._step, mirror.news(), mirror.digest))
        self._step += steps
        ended = self._local.replay(name, steps)

        def end() -> None:
            ended()
            self._ranks.check(time.monotonic() - began)

        return end


def _spawn(module: str) -> tuple[subprocess.Popen[bytes], Connection]:
    """A rank's process and the socket to it. A process group of its own keeps the terminal's
    interrupts away: rank 0 decides what they mean."""
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            module_command(module, str(theirs.fileno())),
            stdin=subprocess.DEVNULL,
            stdout=2,  # what rank 0 prints is the answer
            pass_fds=[theirs.fileno()],
            process_group=0,
        )
    return process, ours


def _read(connection: Connection) -> Answer | None:
    """What a rank says next; None if it is gone."""
    try:
        return msgspec.msgpack.decode(connection.recv_bytes(), type=Answer)
    except (EOFError, OSError):
        return None


def _exit_status(process: subprocess.Popen[bytes] | None) -> str:
    """How a process ended whose socket is closed, if this one started it."""
    if process is None:
        return "hung up"
    try:
        code = process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        return "no word from it"
    return how_it_ended(code)


def _end(
    processes: Mapping[int, subprocess.Popen[bytes]],
    sockets: Mapping[int, Connection],
    blocks: list[Blocks],
) -> None:
    """Hang up, which ends a rank wherever it waits; kill who does not end soon. Then nobody waits
    here either, and memory is let go of."""
    for connection in sockets.values():
        connection.close()
    for one in blocks:
        one.give_up(one.rank)
    until = time.monotonic() + _GRACE
    for process in processes.values():
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for one in blocks:
        one.close()
