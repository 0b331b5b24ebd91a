"""Router and experts of a step in one op, for steps of one token.

`moe(y, gate_weight, gate_bias, gate_scale, w13, w2, starts, top_k, shared, route_scale) -> out` is
`experts(y, w13, w2, *router(y, gate_weight, gate_bias, gate_scale, starts, ...), starts)`: shapes
and mathematics are theirs. An op of its own because a GPU's launches for one token leave no choice
behind; on the CPU both ops' code runs.
"""

import torch
from torch import Tensor

from inkling_engine.kernels._op import define
from inkling_engine.kernels.moe import reference


def _fake(y: Tensor, *_: Tensor | float) -> Tensor:
    return torch.empty_like(y)


moe = define(
    "moe",
    "(Tensor y, Tensor gate_weight, Tensor gate_bias, Tensor gate_scale, Tensor w13, Tensor w2,"
    " Tensor starts, int top_k, int shared, float route_scale) -> Tensor",
    reference.moe,
    _fake,
)
