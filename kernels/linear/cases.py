"""Shapes, inputs and tolerances of the matrix product."""

import torch

from inkling_engine.kernels._cases import Case, normal

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def cases() -> list[Case]:
    """Few and many rows; widths of whole vectors and odd ones, in both directions."""
    return [
        Case(
            f"{rows}x{depth}x{columns}-{str(dtype).removeprefix('torch.')}",
            (normal(rows, depth, dtype=dtype), normal(columns, depth, dtype=dtype, scale=0.1)),
            tolerance=tolerance,
        )
        for rows, depth, columns in (
            (1, 192, 640),
            (3, 24, 160),
            (8, 37, 23),
            (13, 96, 192),
            (45, 37, 70),
            (64, 256, 48),
            (9, 2080, 24),
            (19, 2064, 9),
            (15, 2080, 24),
            (16, 2064, 2056),
            (2, 5, 1),
            (0, 16, 16),
        )
        for dtype, tolerance in TOLERANCES.items()
    ]
