"""All ranks of a CUDA engine in one process, each on a stream of one GPU: kernels of the ranks run beside
one another, while those of processes that share a GPU take turns of milliseconds.

For long runs under the real scheduler where there is one GPU. What is between processes is left out, and
launches do not begin early: those that wait for the launch before them would fill the GPU, while that one
waits for a rank that finds no room.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inkling_engine.artifacts.manifest import Manifest
from inkling_engine.artifacts.store import open_manifest
from inkling_engine.kernels._exchange import ERROR
from inkling_engine.runtime import capture, loader
from inkling_engine.runtime.engine import Engine
from inkling_engine.runtime.loader import LoadOptions
from inkling_engine.runtime.mirror import Mirror
from inkling_engine.runtime.replay import Replayer
from inkling_engine.runtime.timing import Timings


class Place:
    """The `Seat` of a rank; rank 0's leads the `others`."""

    def __init__(self, rank: int, others: list[Place]) -> None:
        self.rank, self.others = rank, others
        self.tensors: Mapping[str, Tensor] = {}
        self.mirrors: Mapping[str, Mirror] = {}
        self.local: Replayer | None = None
        self._blocks: list[Tensor] = []

    def pools(self, manifest: Manifest, device: str) -> Mapping[str, Tensor]:
        """The exchange block is memory like any other."""
        return {}

    def proceed(self) -> None:
        """Native code may always be opened."""

    def meet(self, pools: Mapping[str, Tensor]) -> None:
        """With rank 0, the last one, all are there: as before the first step, each shows its block."""
        self.tensors = pools
        places = [self, *self.others]
        self._blocks = [place.tensors["exchange"] for place in places]
        for place in places if self.rank == 0 else ():
            for name, pool in place.tensors.items():
                if name not in ("rank", "peers"):
                    pool.zero_()
            for other in places:
                place.tensors["peers"][other.rank] = other.tensors["exchange"].data_ptr()
        torch.cuda.synchronize()

    def replayer(self, local: Replayer, mirrors: Mapping[str, Mirror]) -> Replayer:
        """What replays here; rank 0's replays on all."""
        self.local, self.mirrors = local, mirrors
        if self.rank:
            return local
        return _Together(self, local)

    def mark(self) -> None:
        """Nothing to see between replays."""

    def watch(self) -> None:
        """Nobody can be gone."""

    def digests(self) -> list[dict[str, str]]:
        """None."""
        return []

    def usage(self) -> list[dict[str, Any]]:
        """None."""
        return []

    def close(self) -> None:
        """Nobody may have waited in vain."""
        torch.cuda.synchronize()
        errors = [int(block[ERROR]) for block in self._blocks]
        assert not any(errors), f"error words {errors}"


class _Together:
    """Replays on all ranks, rank 0 last."""

    def __init__(self, place: Place, local: Replayer) -> None:
        self._place, self._local, self.overlaps = place, local, local.overlaps

    def replay(self, name: str, steps: int) -> Callable[[], None]:
        """Begin a replay on all ranks; what is returned waits for rank 0's results."""
        news = self._place.mirrors[name].news()
        for other in self._place.others:
            assert other.local
            other.mirrors[name].receive(news)
            other.local.replay(name, steps)
        return partial(self._local.replay(name, steps))


def load_beside(
    folder: Path, *, random_weights: int | None, steps_per_replay: int, prefix_cache: bool = True
) -> Engine:
    """The engine in `folder` with all its ranks in this process, on GPU 0."""
    manifest = open_manifest(folder)
    options = LoadOptions(
        random_weights=random_weights,
        steps_per_replay=steps_per_replay,
        device_index=(0,) * manifest.spec.tp,
    )
    vars(capture)["overlap_launches"] = lambda graph: None
    others: list[Place] = []
    for rank in range(manifest.spec.tp - 1, -1, -1):
        capture.step_stream.cache_clear()  # each has a stream of its own
        place = Place(rank, others if rank == 0 else [])
        loaded = loader._load(folder, manifest, options, Timings(), place)
        if rank:
            others.insert(0, place)
    return Engine(loaded, prefix_cache=prefix_cache)
