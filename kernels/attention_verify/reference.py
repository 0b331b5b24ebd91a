"""Attention of a verify step: the extend reference, held to `most` tokens a row."""

from torch import Tensor

from inkling_engine.kernels.attention_extend.reference import attention_extend


def attention_verify(
    q: Tensor,
    r: Tensor,
    rel_proj: Tensor,
    kv_pool: Tensor,
    page_table: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    layer: int,
    window: int,
    first: int,
    most: int,
) -> Tensor:
    """Attention output [T, Nq * D]; see the package docstring."""
    assert int(starts.diff().max()) <= most, "a row has more tokens than `most`"
    return attention_extend(
        q, r, rel_proj, kv_pool, page_table, slots, starts, lengths, layer, window, first
    )
