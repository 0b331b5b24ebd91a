"""The mixture of experts, routed and shared ones together.

`experts(y, w13, w2, weights, order, offsets) -> out`: y and out [T, H], w13 [E, 2*I, H] (gate rows,
then up rows) and w2 [E, H, I] in the activation dtype; weights [T, K] f32, order [T * K] i32 and
offsets [E + 1] i32 are the router's. out = sum over a token's K assignments of
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
    "(Tensor y, Tensor w13, Tensor w2, Tensor weights, Tensor order, Tensor offsets) -> Tensor",
    reference.experts,
    _fake,
)
