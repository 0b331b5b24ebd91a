"""Shapes and inputs of gathered logits."""

import torch
from torch import Tensor

from inkling_engine.kernels._cases import Case, Ranks, normal


def _last(rows: int) -> Tensor:
    """The last sample alone is unsure."""
    return (torch.arange(rows) == rows - 1).int()


def cases() -> list[Case]:
    """First and last ranks, a vocabulary that ends inside a rank's columns or with the first's."""
    return [
        Case(
            f"{rows}x{columns}-{rank}of{world}-{vocab}",
            (normal(rows, columns), _last(rows), *Ranks(world, rank).tensors, 6, 7, world, vocab),
            tolerance=0.0,
        )
        for rows, columns, world, rank, vocab in (
            (1, 64, 2, 0, 128),
            (5, 37, 4, 1, 130),
            (5, 37, 4, 3, 130),
            (3, 300, 8, 7, 2399),
            (2, 40, 4, 2, 30),
        )
    ]
