"""Shapes, inputs and tolerances of the gated activation."""

import torch
from torch import Tensor

from inkling_engine.kernels._cases import Case, normal

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def cases() -> list[Case]:
    """Whole vectors, odd widths, no rows, and gates over the whole range of exp."""
    return [
        Case(f"{name}-{str(dtype).removeprefix('torch.')}", (x.to(dtype), scale), tolerance)
        for name, x, scale in (
            ("1x256", normal(1, 512), torch.tensor([1.0])),
            ("5x96", normal(5, 192, scale=3), torch.tensor([0.37])),
            ("3x7", normal(3, 14), torch.tensor([-1.5])),
            ("none", normal(0, 32), torch.tensor([1.0])),
            ("range", _range(), torch.tensor([1.0])),
        )
        for dtype, tolerance in TOLERANCES.items()
    ]


def _range() -> Tensor:
    """Gates from -200 to 200, infinite and NaN; `up` keeps the finite results near 1."""
    special = torch.tensor([torch.inf, torch.nan, 0.0, -0.0, 1e-30, -1e-30, 88.7, -88.7, -103.9])
    gate = torch.cat([torch.linspace(-200, 200, 1015), special]).reshape(4, 256)
    return torch.cat([gate, 1 / gate.abs().clamp(1, 1000)], dim=-1)
