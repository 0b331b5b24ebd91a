"""Attention prologue (spec 2.3, 2.4): convolution of k and v, head norms, tau, KV write."""

import torch
from torch import Tensor

from inkling_engine.kernels._conv import Rows, short_conv
from inkling_engine.kernels.rmsnorm.reference import rmsnorm


def attention_prologue(
    qkvr: Tensor,
    kv_conv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    kv_pool: Tensor,
    conv_pool: Tensor,
    positions: Tensor,
    token_rows: Tensor,
    locations: Tensor,
    slots: Tensor,
    sources: Tensor,
    starts: Tensor,
    lengths: Tensor,
    destination_slots: Tensor,
    destination_offsets: Tensor,
    layer: int,
    heads: int,
    log_floor: int,
    log_alpha: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Queries and relative vectors of a step; see the package docstring."""
    tokens, dim, kv_width = len(qkvr), q_norm.shape[0], kv_conv.shape[0]
    q, kv, r = qkvr.split([heads * dim, kv_width, qkvr.shape[1] - heads * dim - kv_width], dim=1)
    rows = Rows(slots, sources, starts, lengths, destination_slots, destination_offsets)
    convolved = short_conv(kv, kv_conv, conv_pool[layer], rows).to(qkvr.dtype)
    k, v = convolved.view(tokens, 2, -1, dim).unbind(1)
    _write(kv_pool[layer], rmsnorm(k, k_norm, eps), v, locations, int(starts[-1]))
    tau = _tau(positions, log_floor, log_alpha)
    q_out = rmsnorm(q.view(tokens, heads, dim).float(), q_norm, eps) * tau
    r_out = r.float().view(tokens, heads, -1) * tau
    live = (torch.arange(tokens) < starts[-1])[:, None, None]
    return q_out.where(live, 0).to(qkvr.dtype), r_out.where(live, 0)


def _write(pool: Tensor, k: Tensor, v: Tensor, locations: Tensor, live: int) -> None:
    """Write k, v [T, kv_heads, D] of live tokens to `pool` [pages, 2, kv_heads, page_size, D]."""
    page_size = pool.shape[3]
    for token, location in enumerate(locations[:live].tolist()):
        page, offset = divmod(location, page_size)
        pool[page, 0, :, offset] = k[token]
        pool[page, 1, :, offset] = v[token]


def _tau(positions: Tensor, floor: int, alpha: float) -> Tensor:
    """1 + alpha * ln(max(1, (position + 1) / floor)) as fp32 [T, 1, 1]; 1 without a floor."""
    if floor == 0:
        return torch.ones(len(positions), 1, 1)
    ratio = ((positions + 1).float() / floor).clamp(min=1)
    return (1 + alpha * ratio.log()).view(-1, 1, 1)
