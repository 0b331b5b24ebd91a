"""Attention of a decode step: the prologue, then the extend reference, held to one token a row."""

from torch import Tensor

from inkling_engine.kernels.attention_extend.reference import attention_extend
from inkling_engine.kernels.attention_prologue.reference import attention_prologue


def attention_decode(
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
    rel_proj: Tensor,
    page_table: Tensor,
    layer: int,
    heads: int,
    window: int,
    log_floor: int,
    log_alpha: float,
    eps: float,
) -> Tensor:
    """Attention output [T, Nq * D]; see the package docstring."""
    assert int(starts.diff().max()) <= 1, "a decode row has at most one token"
    destinations = destination_slots, destination_offsets
    rows = positions, token_rows, locations, slots, sources, starts, lengths, *destinations
    weights, scaling = (kv_conv, q_norm, k_norm), (log_floor, log_alpha, eps)
    q, r = attention_prologue(qkvr, *weights, kv_pool, conv_pool, *rows, layer, heads, *scaling)
    return attention_extend(
        q, r, rel_proj, kv_pool, page_table, slots, starts, lengths, layer, window, 0
    )
