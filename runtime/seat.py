"""A rank's place among the ranks of an engine on this machine: one mapping of all exchange blocks.

Rank 0 makes memory without a name and hands its descriptor to the other ranks' processes. Each maps
all of it: block r is the pool `exchange` of rank r, and `peers` are the blocks' addresses in the
own process. It goes when the last process that has it ends, however it ends.
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
from inkling_engine.kernels._exchange import ERROR, LIFE, WORD
from inkling_engine.runtime.mirror import Mirror
from inkling_engine.runtime.replay import Replayer

POOL = "exchange"


def block_words(manifest: Manifest) -> int:
    """Words of one rank's exchange block."""
    return next(entry.shape[0] for entry in manifest.pools if entry.name == POOL)


def open_memory(words: int, world: int) -> int:
    """A descriptor of zeroed memory for `world` blocks of `words` words, which nobody else can open."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("inkling-exchange")
    else:
        handle, name = tempfile.mkstemp()
        os.unlink(name)
    os.ftruncate(handle, world * _stride(words))
    return handle


class Seat(Protocol):
    """What a load asks of the rank that it loads."""

    rank: int

    def pools(self) -> Mapping[str, Tensor]:
        """Pools that are there already, by name."""

    def take(self, pools: Mapping[str, Tensor]) -> None:
        """Write who this is, and where the others are, into the pools."""

    def proceed(self) -> None:
        """Native code may be opened from now on; on a rank that is not 0, wait until it may."""

    def replayer(self, local: Replayer, mirrors: Mapping[str, Mirror]) -> Replayer:
        """What replays on all ranks that this one leads, given what does so here."""

    def digests(self) -> list[dict[str, str]]:
        """`StatePool.replicated` of the ranks that this one leads, in their order."""

    def usage(self) -> list[dict[str, Any]]:
        """`usage.describe` of the ranks that this one leads, in their order."""

    def close(self) -> None:
        """End the ranks that this one leads."""


class Blocks:
    """The exchange blocks of all ranks as `rank` sees them."""

    def __init__(self, handle: int, words: int, world: int, rank: int) -> None:
        """Map the memory behind `handle`, which may then be closed."""
        self.rank, self.world = rank, world
        whole = mmap.mmap(handle, world * _stride(words))
        flat = torch.frombuffer(whole, dtype=torch.int64)
        stride = _stride(words) // WORD
        self.all = [flat[r * stride : r * stride + words] for r in range(world)]

    @property
    def own(self) -> Tensor:
        """The own block, [words] int64."""
        return self.all[self.rank]

    def take(self, pools: Mapping[str, Tensor], sockets: Mapping[int, int]) -> None:
        """Fill `rank` and `peers`; `sockets` are descriptors that hang up when a rank's process ends,
        by rank."""
        pools["rank"][0] = self.rank
        for rank, block in enumerate(self.all):
            pools["peers"][rank] = block.data_ptr()
        for rank, handle in sockets.items():
            self.own[LIFE + rank] = 1 + handle

    def missing(self) -> int | None:
        """The rank that this one gave up waiting for."""
        return int(self.own[ERROR]) - 1 if self.own[ERROR] else None


def _stride(words: int) -> int:
    """Bytes from one block to the next: whole pages."""
    return -(-words * WORD // mmap.PAGESIZE) * mmap.PAGESIZE
