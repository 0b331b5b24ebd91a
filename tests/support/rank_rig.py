"""Ranks over the fake step, which waits for the others as a native one does, and can get into trouble.

`python -m support.rank_rig` is a rank's process in place of the package's own. What goes wrong is
said in a file of the folder that all ranks are told: `RANK RUN HOW`, such as `1 3 kill`.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from support.fake_spec import build_manifest, build_spec
from support.fake_step import FakeStep
from torch import Tensor

from inkling_engine.artifacts.errors import DoesNotFitError
from inkling_engine.artifacts.manifest import Manifest
from inkling_engine.kernels import table
from inkling_engine.kernels._exchange import CONTROL, ERROR, LIFE, LIMIT, LIMIT_MS
from inkling_engine.runtime.binding import Loaded, assemble
from inkling_engine.runtime.engine import Engine
from inkling_engine.runtime.rank import Member, run
from inkling_engine.runtime.rank_messages import Start
from inkling_engine.runtime.ranks import Ranks
from inkling_engine.runtime.seat import Blocks
from inkling_engine.runtime.weights import random_weights

MODULE = "support.rank_rig"
TROUBLE = "trouble"


def manifest_of(world: int) -> Manifest:
    """The fake engine for `world` ranks."""
    return build_manifest(build_spec(tp=world))


class RankStep(FakeStep):
    """The fake step, all ranks of which meet at its end."""

    def __init__(
        self, manifest: Manifest, inputs: Mapping[str, list[Tensor]], blocks: Blocks, trouble: str
    ) -> None:
        super().__init__(manifest, inputs)
        self._blocks = blocks
        rank, count, self._how = trouble.split() if trouble else ("-1", "0", "")
        self._at = int(count) if int(rank) == blocks.rank else 0

    def run(self, name: str) -> None:
        super().run(name)
        if len(self.runs) == self._at:
            self._stumble(name)
        peers = self.bound[name]["pools.peers"]
        assert int(peers[self._blocks.rank]) == self._blocks.own.data_ptr()
        assert int(self.bound[name]["pools.rank"][0]) == self._blocks.rank
        self._blocks.own[CONTROL] = len(self.runs)
        until = time.monotonic() + (int(self._blocks.own[LIMIT]) or LIMIT_MS) / 1000
        for rank, block in self._blocks.all.items():
            while int(block[CONTROL]) < len(self.runs) and self._blocks.missing() is None:
                time.sleep(0.0005)
                if time.monotonic() > until:
                    self._blocks.own[ERROR] = 1 + rank
                self._note_dead()

    def _note_dead(self) -> None:
        for rank in range(self._blocks.world):
            if handle := int(self._blocks.own[LIFE + rank]):
                poll = select.poll()
                poll.register(handle - 1, 0)
                if poll.poll(0):
                    self._blocks.own[ERROR] = 1 + rank

    def _stumble(self, name: str) -> None:
        if self._how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self._how == "raise":
            raise ValueError("the seventh seal")
        elif self._how == "late":
            time.sleep(1.5)
        elif self._how == "differ":
            self.bound[name]["pools.request_state"][1, table.GENERATED] += 1
        else:
            assert self._how == "interrupt"
            raise KeyboardInterrupt


def load(start: Start, member: Member) -> Loaded:
    """A rank's part, with the weights that all have."""
    if _trouble(start.folder) == f"{start.rank} 0 load":
        raise DoesNotFitError("memory", "much", "less", "buy more")
    if _trouble(start.folder) == f"{start.rank} 0 die":
        os._exit(3)
    member.proceed()
    return _assemble(start.world, start.folder, member)


def open_engine(
    world: int, folder: Path, trouble: str = "", limit: int = 0
) -> tuple[Engine, Ranks]:
    """Rank 0's engine and the ranks that it leads; waiting ends after `limit` ms."""
    if trouble:
        (folder / TROUBLE).write_text(trouble)
    ranks = Ranks.spawn(world, MODULE)
    ranks.start(str(folder))
    ranks.proceed()
    loaded = _assemble(world, str(folder), ranks)
    for block in ranks.blocks.all.values():
        block[LIMIT] = limit
    return Engine(loaded), ranks


def _assemble(world: int, folder: str, seat: Ranks | Member) -> Loaded:
    manifest = manifest_of(world)

    def step(manifest: Manifest, inputs: Mapping[str, list[Tensor]]) -> RankStep:
        return RankStep(manifest, inputs, seat.blocks, _trouble(folder))

    return assemble(manifest, random_weights(manifest, 0), step, seat=seat)


def _trouble(folder: str) -> str:
    path = Path(folder) / TROUBLE
    return path.read_text() if path.exists() else ""


def main() -> None:
    """As a rank; with `lead` beside the folder, as rank 0 that runs until it is killed."""
    if sys.argv[1] != "lead":
        run(load)
        return
    engine, ranks = open_engine(2, Path(sys.argv[2]))
    print(*(process.pid for process in ranks.processes.values()), flush=True)
    while True:
        engine.generate([30, 31])


if __name__ == "__main__":
    main()
