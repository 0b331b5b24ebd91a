"""Which experts a token goes to, with which weights, and the tokens of each expert.

`router(y, gate_weight, gate_bias, gate_scale, starts, top_k, shared, route_scale)`: y [T, H] and
gate_weight [E + S, H] in the activation dtype, gate_bias [E] f32, gate_scale [1] f32, starts [R + 1]
i32 (tokens from starts[R] on are padding). Returns, with K = top_k + shared:

* experts [T, K] i32: the top_k of the E routed experts by sigmoid(logit) + gate_bias, highest first,
  ties to the lower index; then the shared ones, E .. E + S - 1. Padded tokens: 0
* weights [T, K] f32: softmax(logsigmoid(logits of these)) * route_scale * gate_scale; padded: 0
* order [T * K] i32: assignments (token * K + position) of live tokens grouped by expert, ascending
  within one, then zeros; offsets [E + S + 1] i32: each expert's part of it

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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, slots = y.shape[0], top_k + shared
    return (
        y.new_empty(tokens, slots, dtype=torch.int32),
        y.new_empty(tokens, slots, dtype=torch.float32),
        y.new_empty(tokens * slots, dtype=torch.int32),
        y.new_empty(gate_weight.shape[0] + 1, dtype=torch.int32),
    )


router = define(
    "router",
    "(Tensor y, Tensor gate_weight, Tensor gate_bias, Tensor gate_scale, Tensor starts, int top_k,"
    " int shared, float route_scale)"
    " -> (Tensor experts, Tensor weights, Tensor order, Tensor offsets)",
    reference.router,
    _fake,
)
