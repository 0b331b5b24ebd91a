"""Rank 0's side of an engine of several ranks: it starts the others' processes and leads them.

Every replay is announced to all ranks and then run here; what they say to each other inside it, they
say through their exchange blocks. A rank that errs ends, and one that ends hangs up: inside a replay
the native wait sees that and gives up, between replays sending does. This side then fails with an error
that names the first one, and hangs up, which ends the others, as its own end does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, TypeVar

import msgspec
from torch import Tensor

from inkling_engine.runtime.errors import FailedError, UserError
from inkling_engine.runtime.mirror import Mirror
from inkling_engine.runtime.rank_messages import (
    REMEDY,
    Answer,
    Command,
    Digest,
    Digests,
    Failure,
    Left,
    Measure,
    Measured,
    Proceed,
    Ready,
    Replay,
    Start,
)
from inkling_engine.runtime.replay import Replayer
from inkling_engine.runtime.seat import POOL, Blocks, open_memory

MODULE = "inkling_engine.runtime.rank"
_GRACE = 2.0  # seconds in which ranks say what happened, or end by themselves
_Kind = TypeVar("_Kind", bound=Answer)


class Ranks:
    """The processes of ranks 1 and up, and rank 0's `Seat`."""

    rank = 0

    def __init__(
        self,
        world: int,
        words: int,
        folder: str = "",
        steps: int = 1,
        drawn: int | None = None,
        module: str = MODULE,
    ) -> None:
        """Start a process `python -m module` for each other rank, to load `folder`, with weights of
        the seed `drawn` if there is one. Exchange blocks have `words` words."""
        memory = open_memory(words, world)
        self.blocks = Blocks(memory, words, world, 0)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._sockets: dict[int, Connection] = {}
        self._end = weakref.finalize(self, _end, self.processes, self._sockets)
        self._failure: UserError | None = None
        try:
            for rank in range(1, world):
                self.processes[rank], self._sockets[rank] = _spawn(module, memory)
            for rank, connection in self._sockets.items():
                connection.send_bytes(_encode(Start(rank, world, words, folder, steps, drawn)))
        except OSError:
            raise self._fail() from None
        finally:
            os.close(memory)

    def pools(self) -> Mapping[str, Tensor]:
        """Rank 0's exchange block."""
        return {POOL: self.blocks.own}

    def take(self, pools: Mapping[str, Tensor]) -> None:
        """Write who this is, and where the others are, into the pools."""
        self.blocks.take(pools, {rank: one.fileno() for rank, one in self._sockets.items()})

    def proceed(self) -> None:
        """Let the ranks open native code."""
        self.send(Proceed())

    def replayer(self, local: Replayer, mirrors: Mapping[str, Mirror]) -> Replayer:
        """What replays on all ranks."""
        return Together(self, local, mirrors)

    def require_ready(self) -> None:
        """Wait until all ranks have loaded."""
        self._answers(Ready)

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
        data = _encode(command)
        for connection in self._sockets.values():
            try:
                connection.send_bytes(data)
            except OSError:
                raise self._fail() from None
        if self._failure:
            raise self._failure

    def check(self) -> None:
        """Raise a UserError if a replay did not have the parts of all ranks."""
        if self.blocks.missing() is not None:
            raise self._fail()

    def close(self) -> None:
        """End all ranks, whatever they do. Twice does no harm."""
        self._end()

    def _answers(self, kind: type[_Kind]) -> list[_Kind]:
        """The next answer of every rank, each a `kind`."""
        found: dict[int, _Kind] = {}
        waiting = {connection: rank for rank, connection in self._sockets.items()}
        while waiting:
            for connection in wait(list(waiting)):
                assert isinstance(connection, Connection)
                answer = _read(connection)
                if not isinstance(answer, kind):
                    raise self._fail({waiting[connection]: answer})
                found[waiting.pop(connection)] = answer
        return [found[rank] for rank in sorted(found)]

    def _fail(self, said: Mapping[int, Answer | None] | None = None) -> UserError:
        """End all ranks; what names the first failed one. `said` are last answers that were read
        already, None of a rank that is gone."""
        if self._failure is None:
            self._failure = self._cause(dict(said or {}))
            self.close()
        return self._failure

    def _cause(self, said: dict[int, Answer | None]) -> UserError:
        """Ask around for a while which rank erred or died; else it is the one that was waited for."""
        until = time.monotonic() + _GRACE
        while not any(answer is None or isinstance(answer, Failure) for answer in said.values()):
            silent = {one: rank for rank, one in self._sockets.items() if rank not in said}
            ready = wait(list(silent), max(0.0, until - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                answer = _read(connection)
                if not isinstance(answer, Ready | Digests | Measured):
                    said[silent[connection]] = answer
        failures = [answer.error() for answer in said.values() if isinstance(answer, Failure)]
        dead = [rank for rank, answer in said.items() if answer is None]
        left = [answer.missing for answer in said.values() if isinstance(answer, Left)]
        if failures:
            return failures[0]
        if dead:
            found = _exit_status(self.processes[dead[0]])
            return FailedError(f"rank {dead[0]}", found, "a rank that goes on", REMEDY)
        missing = self.blocks.missing()
        blamed = left[0] if missing is None and left else missing
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
        mirror = self._mirrors[name]
        self._ranks.send(Replay(name, steps, self._step, mirror.news(), mirror.digest))
        self._step += steps
        ended = self._local.replay(name, steps)

        def end() -> None:
            ended()
            self._ranks.check()

        return end


def _spawn(module: str, memory: int) -> tuple[subprocess.Popen[bytes], Connection]:
    """A rank's process and the socket to it. A process group of its own keeps the terminal's
    interrupts away: rank 0 decides what they mean."""
    ours, theirs = Pipe()
    with theirs:
        handles = theirs.fileno(), memory
        command = [sys.executable, "-m", module, *map(str, handles)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=2,  # what rank 0 prints is the answer
            pass_fds=handles,
            process_group=0,
        )
    return process, ours


def _encode(command: Command) -> bytes:
    return msgspec.msgpack.encode(command)


def _read(connection: Connection) -> Answer | None:
    """What a rank says next; None if it is gone."""
    try:
        return msgspec.msgpack.decode(connection.recv_bytes(), type=Answer)
    except (EOFError, OSError):
        return None


def _exit_status(process: subprocess.Popen[bytes]) -> str:
    """How a process ended whose socket is closed."""
    try:
        code = process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        return "no word from it"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _end(
    processes: Mapping[int, subprocess.Popen[bytes]], sockets: Mapping[int, Connection]
) -> None:
    """Hang up, which ends a rank wherever it waits; kill who does not end soon."""
    for connection in sockets.values():
        connection.close()
    until = time.monotonic() + _GRACE
    for process in processes.values():
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
