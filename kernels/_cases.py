"""What a `cases` module returns, and the generators it builds inputs with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inkling_engine.kernels._exchange import exchange_words


@dataclass(frozen=True)
class Case:
    """One call of an op: positional arguments, and the tolerance of its floating outputs.

    `tolerance` bounds |found - reference| by tolerance * max(1, max|reference|); integers must be
    equal. Mutated arguments are compared the same way, bytes outside the mutation exactly.
    """

    name: str
    arguments: tuple[Any, ...]
    tolerance: float


@dataclass(frozen=True)
class Ranks:
    """An exchange of `world` ranks, this one `rank`, the others absent: what ops that exchange take."""

    world: int = 1
    rank: int = 0
    words: int = exchange_words(1 << 16, 8)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """peers, exchange, step_counter, rank."""
        return (
            torch.zeros(8, dtype=torch.int64),
            torch.zeros(self.words, dtype=torch.int64),
            torch.tensor([5, 0, 0, 0]),
            torch.tensor([self.rank, 0, 0, 0], dtype=torch.int32),
        )


def normal(
    *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0
) -> Tensor:
    """Seeded normal values of `shape`, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(hash((seed, shape)) & 0x7FFFFFFF)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)
