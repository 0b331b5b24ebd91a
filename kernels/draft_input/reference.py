"""Input of a draft depth (spec 6.1): two norms side by side; see the package docstring."""

import torch
from torch import Tensor

from inkling_engine.kernels.embed_norm.reference import embedded
from inkling_engine.kernels.rmsnorm.reference import rmsnorm


def draft_input(
    hidden: Tensor,
    ids: Tensor,
    table: Tensor,
    embed_norm: Tensor,
    hidden_norm: Tensor,
    token_norm: Tensor,
    token_rows: Tensor,
    starts: Tensor,
    peers: Tensor,
    exchange: Tensor,
    step_counter: Tensor,
    rank: Tensor,
    depth: int,
    drafts: int,
    call: int,
    calls: int,
    eps: float,
    world: int,
    backbone_norm: bool,
) -> Tensor:
    """Norm hidden states and tokens; see the package docstring."""
    live = int(starts[-1])
    token = ids[torch.arange(live) + token_rows[:live] * drafts + depth]
    ranks = peers, exchange, step_counter, rank, call, calls, world
    known = embedded(token, table, *ranks)
    if backbone_norm:
        known = rmsnorm(known, embed_norm, eps)
    z = hidden.new_zeros(len(hidden), 2 * hidden.shape[1])
    halves = rmsnorm(hidden[:live], hidden_norm, eps), rmsnorm(known, token_norm, eps)
    z[:live] = torch.cat(halves, dim=1)
    return z
