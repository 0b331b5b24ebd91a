"""Shapes, inputs and tolerances of the embedding."""

import torch

from inkling_engine.kernels._cases import Case, Ranks, normal

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 8e-3}


def cases() -> list[Case]:
    """One token, the first and last ids, repeated and padded tokens, another rank's tokens."""
    return [
        Case(
            f"{name}-{width}-{str(dtype).removeprefix('torch.')}",
            (
                torch.tensor(tokens, dtype=torch.int32),
                normal(40, width, dtype=dtype),
                1 + normal(width, dtype=dtype, scale=0.1),
                *Ranks(world, rank).tensors,
                *(3, 7, 1e-6),
                world,
            ),
            tolerance,
        )
        for name, tokens, rank, world in (
            ("one", [7], 0, 1),
            ("ends", [0, 39, 0], 0, 1),
            ("padded", [5, 5, 12, 38, 0, 0, 0], 0, 1),
            ("first-rank", [0, 39, 40, 159], 0, 4),
            ("inner-rank", [0, 39, 40, 79, 80, 159], 1, 4),
        )
        for width in (192, 37)
        for dtype, tolerance in TOLERANCES.items()
    ]
