"""Shapes, inputs and tolerances of the experts, with choices from the router's reference."""

from typing import NamedTuple

import torch

from inkling_engine.kernels._cases import Case, normal
from inkling_engine.kernels.router.cases import ROUTE_SCALE, Gate, gate_weights
from inkling_engine.kernels.router.reference import router

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


class _Size(NamedTuple):
    gate: Gate
    width: int
    live: int
    tokens: int


_TINY, _ODD = Gate(192, 8, 2, 2), Gate(37, 5, 1, 3)
_SIZES = [
    _Size(_TINY, 96, 1, 1),
    _Size(_TINY, 96, 3, 8),
    _Size(_TINY, 96, 11, 13),
    _Size(_TINY, 96, 70, 70),
    _Size(_TINY, 96, 0, 4),
    _Size(_ODD, 21, 30, 32),
    _Size(Gate(64, 40, 2, 3), 24, 2, 2),  # most experts are idle
    _Size(Gate(64, 40, 2, 3), 24, 61, 70),  # fewer experts than assignments
    _Size(Gate(40, 5, 2, 2), 24, 130, 140),  # more tokens than a GPU's programs look through
    _Size(Gate(24, 10, 2, 2), 16, 270, 300),  # shared experts' tiles among the routed ones'
    _Size(Gate(80, 2, 1, 1), 272, 100, 100),  # too wide for high tiles to hold
]


def cases() -> list[Case]:
    """One, few and many rows an expert, idle experts, padded tokens full of NaN."""
    return [
        _case(size, dtype, tolerance) for size in _SIZES for dtype, tolerance in TOLERANCES.items()
    ]


def _case(size: _Size, dtype: torch.dtype, tolerance: float) -> Case:
    gate, width = size.gate, size.width
    y = normal(size.tokens, gate.hidden, dtype=dtype)
    y[size.live :] = torch.nan
    starts = torch.tensor([0, size.live], dtype=torch.int32)
    chosen, weights, places = router(
        y, *gate_weights(gate, dtype), starts, gate.top_k, gate.shared, ROUTE_SCALE
    )
    experts = gate.routed + gate.shared
    w13 = normal(experts, 2 * width, gate.hidden, dtype=dtype, scale=gate.hidden**-0.5)
    w2 = normal(experts, gate.hidden, width, dtype=dtype, scale=width**-0.5)
    name = f"{size.tokens}x{size.live}-{experts}x{width}-{str(dtype).removeprefix('torch.')}"
    return Case(name, (y, w13, w2, chosen, weights, places, starts), tolerance)
