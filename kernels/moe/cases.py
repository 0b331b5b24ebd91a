"""Shapes, inputs and tolerances of router and experts in one: choices that no rounding changes."""

import torch

from inkling_engine.kernels._cases import Case, normal
from inkling_engine.kernels.experts.cases import TOLERANCES
from inkling_engine.kernels.router.cases import ROUTE_SCALE, Gate, gate_weights

_TINY, _ODD, _WIDE = Gate(192, 8, 2, 2), Gate(37, 5, 1, 3), Gate(64, 40, 2, 6)


def cases() -> list[Case]:
    """One token, live or not (then full of NaN); many experts; more tokens than one."""
    sizes = [(_TINY, 96, 1, 1), (_ODD, 21, 1, 1), (_WIDE, 24, 1, 1), (_TINY, 96, 0, 1)]
    sizes.append((_ODD, 21, 2, 3))
    return [_case(*size, dtype) for size in sizes for dtype in TOLERANCES]


def _case(gate: Gate, width: int, live: int, tokens: int, dtype: torch.dtype) -> Case:
    y = normal(tokens, gate.hidden, dtype=dtype)
    y[live:] = torch.nan
    experts = gate.routed + gate.shared
    w13 = normal(experts, 2 * width, gate.hidden, dtype=dtype, scale=gate.hidden**-0.5)
    w2 = normal(experts, gate.hidden, width, dtype=dtype, scale=width**-0.5)
    starts = torch.tensor([0, live], dtype=torch.int32)
    sizes = gate.top_k, gate.shared, ROUTE_SCALE
    name = f"{tokens}x{live}-{experts}x{width}-{str(dtype).removeprefix('torch.')}"
    arguments = (y, *gate_weights(gate, dtype), w13, w2, starts, *sizes)
    return Case(name, arguments, TOLERANCES[dtype])
