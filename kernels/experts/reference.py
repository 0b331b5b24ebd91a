"""Routed and shared experts together (spec 2.8): fp32, the activation and the result rounded."""

import torch
from torch import Tensor
from torch.nn.functional import silu


def experts(
    y: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, order: Tensor, offsets: Tensor
) -> Tensor:
    """Run each expert over its tokens and mix; see the package docstring."""
    tokens, slots = weights.shape
    down = torch.zeros(tokens * slots, y.shape[1])
    for expert, (begin, end) in enumerate(
        zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    ):
        assignments = order[begin:end].long()
        gate, up = (y[assignments // slots].float() @ w13[expert].float().T).chunk(2, dim=-1)
        activation = (silu(gate) * up).to(y.dtype)
        down[assignments] = activation.float() @ w2[expert].float().T
    live = int(offsets[-1]) // slots
    mixed = (down.view(tokens, slots, -1) * weights[..., None]).sum(1)
    mixed[live:] = 0
    return mixed.to(y.dtype)
