"""Shapes, inputs and tolerances of RMSNorm."""

import torch

from inkling_engine.kernels._cases import Case, normal


def cases() -> list[Case]:
    """Widths of a head and of a hidden row, odd ones included."""
    return [
        Case(
            f"{rows}x{width}-{str(dtype).removeprefix('torch.')}",
            (normal(rows, width, dtype=dtype), 1 + normal(width, dtype=dtype, scale=0.1), 1e-6),
            tolerance={torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype],
        )
        for rows, width in ((1, 16), (5, 64), (4, 192), (3, 37))
        for dtype in (torch.float32, torch.bfloat16)
    ]
