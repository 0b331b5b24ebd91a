"""Which experts a token goes to, with which weights, and which tokens an expert gets.

`router(y, gate_weight, gate_bias, gate_scale, starts, top_k, shared, route_scale)`: y [T, H] and
gate_weight [E + S, H] in the activation dtype, gate_bias [E] f32, gate_scale [1] f32, starts [R + 1]
i32 (tokens from starts[R] on are padding). Returns, with K = top_k + shared:

* experts [T, K] i32: the top_k of the E routed experts by sigmoid(logit) + gate_bias, highest first,
  ties to the lower index; then the shared ones, E .. E + S - 1. Padded tokens: 0
* weights [T, K] f32: softmax(logsigmoid(logits of these)) * route_scale * gate_scale; padded: 0
* places [T, E] i8: 1 + position of routed expert e among the token's K, 0 if it is not; padded: 0

Logits are fp32 (spec 2.7). A NaN logit is chosen last, so every token has K distinct experts.
"""

import torch
from torch import Tensor

from inkling_engine.kernels._op import define
from inkling_engine.kernels.router import reference


def _fake(
    y: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    gate_scale: Tensor,
    starts: Tensor,
    top_k: int,
    shared: int,
    route_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, slots = y.shape[0], top_k + shared
    return (
        y.new_empty(tokens, slots, dtype=torch.int32),
        y.new_empty(tokens, slots, dtype=torch.float32),
        y.new_empty(tokens, gate_bias.shape[0], dtype=torch.int8),
    )


router = define(
    "router",
    "(Tensor y, Tensor gate_weight, Tensor gate_bias, Tensor gate_scale, Tensor starts, int top_k,"
    " int shared, float route_scale) -> (Tensor experts, Tensor weights,"
    " Tensor places)",
    reference.router,
    _fake,
)
