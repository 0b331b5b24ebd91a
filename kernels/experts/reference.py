"""Routed and shared experts together (spec 2.8): fp32, the activation and the result rounded."""

import torch
from torch import Tensor
from torch.nn.functional import silu


def experts(
    y: Tensor,
    w13: Tensor,
    w2: Tensor,
    chosen: Tensor,
    weights: Tensor,
    places: Tensor,
    starts: Tensor,
) -> Tensor:
    """Run each expert over its tokens and mix; see the package docstring."""
    live = int(starts[-1])
    rows = torch.zeros(*chosen.shape, y.shape[1])
    for expert in chosen[:live].unique().tolist():
        tokens, slots = (chosen[:live] == expert).nonzero(as_tuple=True)
        gate, up = (y[tokens].float() @ w13[expert].float().T).chunk(2, dim=-1)
        activation = (silu(gate) * up).to(y.dtype)
        rows[tokens, slots] = activation.float() @ w2[expert].float().T
    mixed = (rows * weights[..., None]).sum(1)
    mixed[live:] = 0
    return mixed.to(y.dtype)
