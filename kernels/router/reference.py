"""The sigmoid router with shared experts (spec 2.7), in fp32."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def router(
    y: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    gate_scale: Tensor,
    starts: Tensor,
    top_k: int,
    shared: int,
    route_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose and weigh experts; see the package docstring."""
    tokens, slots, live = len(y), top_k + shared, int(starts[-1])
    routed = len(gate_bias)
    logits = y[:live].float() @ gate_weight.float().T
    scores = (logits[:, :routed].sigmoid() + gate_bias).nan_to_num(nan=-torch.inf)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = torch.cat([best, torch.arange(routed, routed + shared).expand(live, shared)], dim=-1)
    mixed = logsigmoid(logits.gather(1, chosen)).softmax(-1) * route_scale * gate_scale

    experts, weights = torch.zeros(tokens, slots, dtype=torch.int32), torch.zeros(tokens, slots)
    experts[:live], weights[:live] = chosen, mixed
    places = torch.zeros(tokens, routed, dtype=torch.int8)
    places[:live].scatter_(1, best, torch.arange(1, top_k + 1, dtype=torch.int8).expand(live, -1))
    return experts, weights, places
