"""The mixture of experts, routed and shared ones together.

`experts(y, w13, w2, chosen, weights, places, starts) -> out`: y and out [T, H], w13 [E, 2*I, H]
(gate rows, then up rows) and w2 [E, H, I] in the activation dtype; chosen [T, K] i32 and weights
[T, K] f32 and places [T, routed experts] i8 are the router's; starts [R + 1] i32 (tokens from
starts[R] on are padding). out = sum over a token's K experts of
weight * (silu(gate) * up) @ w2^T, where silu(gate) * up is rounded to the activation dtype and all
else is fp32, with one rounding at the end (spec 2.8). Padded tokens give zeros.
"""

import torch
from torch import Tensor

from inkling_engine.kernels._op import define
from inkling_engine.kernels.experts import reference


def _fake(y: Tensor, *_: Tensor) -> Tensor:
    return torch.empty_like(y)


experts = define(
    "experts",
    "(Tensor y, Tensor w13, Tensor w2, Tensor chosen, Tensor weights, Tensor places,"
    " Tensor starts) -> Tensor",
    reference.experts,
    _fake,
)
