"""A rank other than 0 as a process: loads its part of an engine and replays what rank 0 says.

`python -m inkling_engine.runtime.rank SOCKET MEMORY` gets two open descriptors. Each command is held
to what this rank has done so far: the same step, a program that it has, the same row buffer. It ends
when the socket hangs up; interrupts are rank 0's business.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from inkling_engine.runtime.errors import FailedError, UserError
from inkling_engine.runtime.mirror import Mirror
from inkling_engine.runtime.rank_messages import (
    REMEDY,
    Commands,
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
from inkling_engine.runtime.seat import POOL, Blocks
from inkling_engine.runtime.usage import describe

if TYPE_CHECKING:
    from torch import Tensor

    from inkling_engine.runtime.binding import Loaded
    from inkling_engine.runtime.replay import Replayer

log = logging.getLogger("inkling_engine.rank")


class Member:
    """The `Seat` of a rank other than 0, and what it does there."""

    def __init__(self, commands: Commands, start: Start, blocks: Blocks) -> None:
        """Take `commands`, of which the first was `start`."""
        self._commands, self.start, self.blocks = commands, start, blocks
        self.rank, self._step = start.rank, 0
        self._mirrors: Mapping[str, Mirror] = {}

    def pools(self) -> Mapping[str, Tensor]:
        """The own exchange block."""
        return {POOL: self.blocks.own}

    def take(self, pools: Mapping[str, Tensor]) -> None:
        """Write who this is, and where the others are, into the pools."""
        self.blocks.take(pools, {0: self._commands.fileno()})

    def proceed(self) -> None:
        """Wait until native code may be opened."""
        command = self._commands.next()
        assert isinstance(command, Proceed), f"{command} before the load"

    def replayer(self, local: Replayer, mirrors: Mapping[str, Mirror]) -> Replayer:
        """This rank leads nobody."""
        self._mirrors = mirrors
        return local

    def digests(self) -> list[dict[str, str]]:
        """This rank leads nobody."""
        return []

    def usage(self) -> list[dict[str, Any]]:
        """This rank leads nobody."""
        return []

    def close(self) -> None:
        """This rank leads nobody."""

    def serve(self, loaded: Loaded) -> None:
        """Replay until the socket hangs up (EOFError), or a rank is missing."""
        self._commands.answer(Ready())
        while (missing := self.blocks.missing()) is None:
            command = self._commands.next()
            if isinstance(command, Digest):
                self._commands.answer(Digests(loaded.pool.replicated()))
            elif isinstance(command, Measure):
                device = loaded.pool.tensors["results_int"].device
                self._commands.answer(Measured(describe(loaded.manifest, device)))
            elif isinstance(command, Replay):
                self._require_same(command)
                loaded.replayer.replay(command.program, command.steps)()
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
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    code = 1
    try:
        _run(load, Commands(int(sys.argv[1])), int(sys.argv[2]))
        code = 0
    except UserError:
        pass  # rank 0 says it
    except BaseException:
        log.exception("this rank ends")
    sys.stderr.flush()
    os._exit(code)  # taking torch down takes a second, and rank 0 waits


def _run(load: Callable[[Start, Member], Loaded], commands: Commands, memory: int) -> None:
    """Load and serve; rank 0 is told what this rank ends of, unless it has hung up."""
    start = commands.next()
    assert isinstance(start, Start)
    blocks = Blocks(memory, start.words, start.world, start.rank)
    os.close(memory)
    member = Member(commands, start, blocks)
    with suppress(EOFError):
        try:
            member.serve(load(start, member))
        except EOFError:
            raise
        except BaseException as error:
            with suppress(EOFError):
                commands.answer(Failure.of(error, start.rank))
            raise


def _load(start: Start, member: Member) -> Loaded:
    from inkling_engine.runtime.loader import LoadOptions, load_rank

    options = LoadOptions(
        steps_per_replay=start.steps_per_replay, random_weights=start.random_weights
    )
    return load_rank(Path(start.folder), options, member)


if __name__ == "__main__":
    run(_load)
