"""A rank's place among the ranks of an engine: its exchange block, and those of the others.

Each rank makes the memory of its block itself, nameless, and hands a descriptor of it to the others,
which map it: block r is the pool `exchange` of rank r, and `peers` are the blocks' addresses in the
own process. A block goes when the last process that has it ends, however it ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from inkling_engine.artifacts.manifest import Manifest
from inkling_engine.kernels._exchange import ERROR, LIFE, OWNER, WORD
from inkling_engine.runtime.mirror import Mirror
from inkling_engine.runtime.replay import Replayer

POOL = "exchange"


class Seat(Protocol):
    """What a load asks of the rank that it loads."""

    rank: int

    def pools(self, manifest: Manifest, device: str) -> Mapping[str, Tensor]:
        """Pools that this makes itself, by name."""

    def proceed(self) -> None:
        """Native code may be opened from now on; on a rank that is not 0, wait until it may."""

    def meet(self, pools: Mapping[str, Tensor]) -> None:
        """All programs are warm: wait until they are on all ranks, and write into the pools where the
        others are."""

    def replayer(self, local: Replayer, mirrors: Mapping[str, Mirror]) -> Replayer:
        """What replays on all ranks that this one leads, given what does so here."""

    def mark(self) -> None:
        """On a GPU, behind a replay, on its stream: let the host see the error word."""

    def watch(self) -> None:
        """On a GPU, ever again while a replay is waited for: see whether all ranks are there."""

    def digests(self) -> list[dict[str, str]]:
        """`StatePool.replicated` of the ranks that this one leads, in their order."""

    def usage(self) -> list[dict[str, Any]]:
        """`usage.describe` of the ranks that this one leads, in their order."""

    def close(self) -> None:
        """End the ranks that this one leads."""


class Blocks:
    """The exchange blocks of all ranks as `rank` sees them, in memory that processes share."""

    def __init__(self, words: int, world: int, rank: int) -> None:
        """Make the own block, of `words` words."""
        self.rank, self.world, self.words = rank, world, words
        self._handle = self._open()
        self.all = {rank: self._map(self._handle)}
        self.own = self.all[rank]

    def share(self, pools: Mapping[str, Tensor]) -> int:
        """Bring the pools to where steps begin; a descriptor of the own block, the caller's."""
        self.own[OWNER] = 1 + self.rank
        handle, self._handle = self._handle, -1
        return handle

    def meet(
        self, handles: Mapping[int, int], sockets: Mapping[int, int], pools: Mapping[str, Tensor]
    ) -> None:
        """Map the blocks behind `handles` and fill `peers`. `sockets` are descriptors that hang up when
        a rank's process ends. All by rank."""
        for rank, handle in handles.items():
            self.all[rank] = self._map(handle)
            self._require_owner(rank)
        for rank, block in self.all.items():
            pools["peers"][rank] = block.data_ptr()
        for rank, handle in sockets.items():
            self.own[LIFE + rank] = 1 + handle

    def missing(self) -> int | None:
        """The rank that was waited for in vain."""
        found = self._error()
        return found - 1 if found else None

    def mark(self) -> None:
        """Let `missing` see the error word: nothing to do, it is there."""

    def give_up(self, rank: int) -> None:
        """Wait no more, since `rank` is gone."""
        self.own[ERROR] = 1 + rank

    def close(self) -> None:
        """Nothing runs any more: let go of what others may share."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _error(self) -> int:
        return int(self.own[ERROR])

    def _open(self) -> int:
        """A descriptor of new, zeroed memory for a block."""
        if hasattr(os, "memfd_create"):
            handle = os.memfd_create("inkling-exchange")
        else:
            handle, name = tempfile.mkstemp()
            os.unlink(name)
        os.ftruncate(handle, self.words * WORD)
        return handle

    def _map(self, handle: int) -> Tensor:
        """The block behind a descriptor, [words] int64."""
        return torch.frombuffer(mmap.mmap(handle, self.words * WORD), dtype=torch.int64)

    def _require_owner(self, rank: int) -> None:
        """The block must say whose it is: its memory can be read here."""
        assert int(self.all[rank][OWNER]) == 1 + rank, f"the block of rank {rank} is another's"


def open_blocks(manifest: Manifest, device: str, rank: int) -> Blocks:
    """The blocks of a manifest's engine on `device`, the own one made."""
    words = next(entry.shape[0] for entry in manifest.pools if entry.name == POOL)
    if device == "cpu":
        return Blocks(words, manifest.spec.tp, rank)
    from inkling_engine.runtime.gpu_blocks import GpuBlocks

    return GpuBlocks(words, manifest.spec.tp, rank, torch.device(device))
