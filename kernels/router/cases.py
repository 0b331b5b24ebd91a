"""Shapes, inputs and tolerances of the router: choices are equal, weights close."""

from typing import NamedTuple

import torch
from torch import Tensor

from inkling_engine.kernels._cases import Case, normal

TOLERANCE = 1e-5
ROUTE_SCALE = 2.5


class Gate(NamedTuple):
    """A router's sizes."""

    hidden: int
    routed: int
    shared: int
    top_k: int


_TINY, _ODD, _WIDE = Gate(192, 8, 2, 2), Gate(37, 5, 1, 3), Gate(64, 256, 2, 6)
_DEEP = Gate(520, 130, 2, 4)  # more experts than a GPU's block, depth not a multiple of it


def cases() -> list[Case]:
    """Live and padded tokens, no tokens, exact ties, logits that are NaN or overflow."""
    sizes = [
        (_TINY, [0, 1], 1),
        (_TINY, [0, 0, 2, 3, 3, 8], 8),
        (_TINY, [0, 1, 1], 4),
        (_TINY, [0, 0, 0], 3),
        (_TINY, [0, 40, 70], 70),
        (_ODD, [0, 3, 16], 20),
        (_WIDE, [0, 5, 12], 12),
        (_DEEP, [0, 100, 261], 280),
    ]
    return [
        *(
            _case(f"{tokens}x{starts[-1]}-{gate.routed}", gate, starts, tokens, dtype)
            for gate, starts, tokens in sizes
            for dtype in (torch.float32, torch.bfloat16)
        ),
        Case("ties", (*_ties(), _starts([0, 3]), 2, 2, ROUTE_SCALE), TOLERANCE),
        Case("extremes", (*_extremes(), _starts([0, 3]), 2, 1, ROUTE_SCALE), TOLERANCE),
        Case("nan-experts", (*_nan_experts(), _starts([0, 3]), 4, 1, ROUTE_SCALE), TOLERANCE),
        Case("few-experts", (*_nan_experts(), _starts([0, 3]), 2, 1, ROUTE_SCALE), TOLERANCE),
    ]


def _case(name: str, gate: Gate, starts: list[int], tokens: int, dtype: torch.dtype) -> Case:
    y = normal(tokens, gate.hidden, dtype=dtype)
    y[starts[-1] :] = torch.nan
    arguments = (
        y,
        *gate_weights(gate, dtype),
        _starts(starts),
        gate.top_k,
        gate.shared,
        ROUTE_SCALE,
    )
    return Case(f"{name}-{str(dtype).removeprefix('torch.')}", arguments, TOLERANCE)


def gate_weights(gate: Gate, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A gate's weight, bias and scale."""
    weight = normal(gate.routed + gate.shared, gate.hidden, dtype=dtype, scale=gate.hidden**-0.5)
    return weight, normal(gate.routed, scale=0.1), torch.tensor([1.25])


def _starts(starts: list[int]) -> Tensor:
    return torch.tensor(starts, dtype=torch.int32)


def _ties() -> tuple[Tensor, ...]:
    """Logits that are exact in any order of summation: experts 1, 3, 4 equal, then all equal."""
    weight = torch.zeros(8, 16)
    weight[[1, 3, 4], 0] = 1.0
    y = torch.zeros(3, 16)
    y[0, 0], y[1, 0] = 2.0, -2.0
    return y, weight, torch.zeros(6), torch.ones(1)


def _extremes() -> tuple[Tensor, ...]:
    """Expert e's logit is column e of y: scores saturate to 0 and 1 and tie; a row is all NaN."""
    y = torch.tensor(
        [
            [-200.0, -150.0, -300.0, -400.0, -500.0, -120.0],
            [300.0, 5.0, -300.0, 200.0, 0.0, 90.0],
            [torch.nan] * 6,
        ]
    )
    return y, torch.eye(6), torch.zeros(5), torch.ones(1)


def _nan_experts() -> tuple[Tensor, ...]:
    """Experts 0 and 2 have NaN logits: they are chosen after all others."""
    weight = normal(6, 16)
    weight[[0, 2]] = torch.nan
    return normal(3, 16, seed=1), weight, torch.zeros(5), torch.ones(1)
