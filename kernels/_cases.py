"""What a `cases` module returns, and the generators it builds inputs with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One call of an op: positional arguments, and the tolerance of its floating outputs.

    `tolerance` bounds |found - reference| by tolerance * max(1, max|reference|); integers must be
    equal. Mutated arguments are compared the same way, bytes outside the mutation exactly.
    """

    name: str
    arguments: tuple[Any, ...]
    tolerance: float


def normal(
    *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0
) -> Tensor:
    """Seeded normal values of `shape`, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(hash((seed, shape)) & 0x7FFFFFFF)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)
