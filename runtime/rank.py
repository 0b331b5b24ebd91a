"""A rank other than 0 as a process: loads its part of an engine and replays what rank 0 says.

`python -m inkling_engine.runtime.rank SOCKET` gets an open descriptor. Each command is held to what
this rank has done so far: the same step, a program that it has, the same row buffer. It ends when the
socket hangs up; interrupts are rank 0's business.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from inkling_engine.runtime.capture import CapturedGraphs
from inkling_engine.runtime.errors import FailedError, UserError
from inkling_engine.runtime.mirror import Mirror
from inkling_engine.runtime.rank_messages import (
    REMEDY,
    Block,
    Commands,
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
)
from inkling_engine.runtime.seat import POOL, Blocks, open_blocks
from inkling_engine.runtime.usage import describe

if TYPE_CHECKING:
    from torch import Tensor

    from inkling_engine.artifacts.manifest import Manifest
    from inkling_engine.runtime.binding import Loaded
    from inkling_engine.runtime.replay import Replayer

log = logging.getLogger("inkling_engine.rank")


class Member:
    """The `Seat` of a rank other than 0, and what it does there."""

    def __init__(self, commands: Commands, start: Start) -> None:
        """Take `commands`, of which the first was `start`."""
        self._commands, self.start = commands, start
        self.rank, self._step = start.rank, 0
        self._mirrors: Mapping[str, Mirror] = {}
        self._blocks: Blocks | None = None

    @property
    def blocks(self) -> Blocks:
        """The exchange blocks, once there are pools."""
        assert self._blocks
        return self._blocks

    def pools(self, manifest: Manifest, device: str) -> Mapping[str, Tensor]:
        """The own exchange block."""
        self._blocks = open_blocks(manifest, device, self.rank)
        return {POOL: self.blocks.own}

    def proceed(self) -> None:
        """Wait until native code may be opened."""
        command = self._commands.next()
        assert isinstance(command, Proceed), f"{command} before the load"

    def meet(self, pools: Mapping[str, Tensor]) -> None:
        """Exchange the blocks with all ranks, by way of rank 0."""
        handle = self.blocks.share(pools)
        try:
            self._commands.answer(Block(), [handle])
        finally:
            os.close(handle)
        command = self._commands.next()
        assert isinstance(command, Peers), f"{command} before the first replay"
        others = [rank for rank in range(self.start.world) if rank != self.rank]
        handles = dict(zip(others, self._commands.handles(len(others)), strict=True))
        try:
            self.blocks.meet(handles, {0: self._commands.fileno()}, pools)
        finally:
            for handle in handles.values():
                os.close(handle)

    def replayer(self, local: Replayer, mirrors: Mapping[str, Mirror]) -> Replayer:
        """This rank leads nobody."""
        self._mirrors = mirrors
        if isinstance(local, CapturedGraphs):
            local.seat = self
        return local

    def mark(self) -> None:
        """Behind a replay, on its stream: let the host see the error word."""
        self.blocks.mark()

    def watch(self) -> None:
        """Nobody but rank 0 is watched, where its commands come from."""

    def digests(self) -> list[dict[str, str]]:
        """This rank leads nobody."""
        return []

    def usage(self) -> list[dict[str, Any]]:
        """This rank leads nobody."""
        return []

    def close(self) -> None:
        """End the waits of a replay that is on the way."""
        if self._blocks:
            self._blocks.give_up(self.rank)

    def serve(self, loaded: Loaded) -> None:
        """Replay until the socket hangs up (EOFError), or a rank is missing. A replay that overlaps need
        not have ended when the next command comes."""
        self._commands.answer(Ready())
        ended: Callable[[], None] | None = None
        while (missing := self.blocks.missing()) is None:
            command = self._commands.next()
            if ended and isinstance(command, Digest | Confirm):
                ended()
            if isinstance(command, Digest):
                self._commands.answer(Digests(loaded.pool.replicated()))
            elif isinstance(command, Measure):
                device = loaded.pool.tensors["results_int"].device
                self._commands.answer(Measured(describe(loaded.manifest, device)))
            elif isinstance(command, Confirm):
                if self.blocks.missing() is None:
                    self._commands.answer(Ready())
            elif isinstance(command, Replay):
                self._require_same(command)
                ended = loaded.replayer.replay(command.program, command.steps)
                self._step += command.steps
        self._commands.answer(Left(missing))

    def _require_same(self, command: Replay) -> None:
        """Take over the row buffer; raise FailedError unless both ranks then agree."""
        self._require("step", self._step, str(command.step))
        if command.program not in self._mirrors:
            self._require("bucket", sorted(self._mirrors), command.program)
        mirror = self._mirrors[command.program]
        mirror.receive(command.rows)
        self._require("row inputs", f"{mirror.digest:08x}", f"{command.digest:08x}")

    def _require(self, field: str, found: object, expected: str) -> None:
        if str(found) != expected:
            where = f"rank {self.rank}: {field}"
            raise FailedError(where, found, f"rank 0's, {expected}", REMEDY)


def run(load: Callable[[Start, Member], Loaded]) -> NoReturn:
    """Be the rank that rank 0 says; `load` gives what runs."""
    run_over(load, Commands(int(sys.argv[1])))


def run_over(
    load: Callable[[Start, Member], Loaded], commands: Commands, code: int = 1
) -> NoReturn:
    """The same for a rank that takes `commands`; the process ends with `code` if something goes wrong."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    try:
        serve(load, commands)
        code = 0
    except UserError:
        pass  # rank 0 says it
    except BaseException:
        log.exception("this rank ends")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking torch down takes a second, and rank 0 waits


def serve(load: Callable[[Start, Member], Loaded], commands: Commands) -> None:
    """Load and serve; rank 0 is told what this rank ends of, unless it has hung up."""
    start = commands.next()
    assert isinstance(start, Start)
    member = Member(commands, start)
    with suppress(EOFError), closing(member):
        try:
            member.serve(load(start, member))
        except EOFError:
            raise
        except BaseException as error:
            with suppress(EOFError):
                commands.answer(Failure.of(error, start.rank))
            raise


def load_start(start: Start, member: Member) -> Loaded:
    """Load what rank 0 says."""
    from inkling_engine.runtime.loader import LoadOptions, load_rank

    options = LoadOptions(
        random_weights=start.random_weights,
        memory=start.memory,
        steps_per_replay=start.steps_per_replay,
        device_index=start.device_index,
    )
    return load_rank(Path(start.folder), options, member)


if __name__ == "__main__":
    run(load_start)
