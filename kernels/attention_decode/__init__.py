"""Everything between the fused q, k, v, r product and the output product, in a decode step.

`attention_decode(...) -> o [T, Nq * D]` is `attention_prologue` and then `attention_extend`, for
rows of at most one token (starts[i + 1] - starts[i] <= 1): arguments, mathematics and what is
written are theirs. An op of its own because a GPU does both in one launch, and splits one query's
keys, not the queries; on the CPU the same code runs.
"""

from torch import Tensor

from inkling_engine.kernels._op import define
from inkling_engine.kernels.attention_decode import reference


def _fake(qkvr: Tensor, kv_conv: Tensor, q_norm: Tensor, *arguments: Tensor | float) -> Tensor:
    heads = arguments[-5]
    assert isinstance(heads, int)
    return qkvr.new_empty(qkvr.shape[0], heads * q_norm.shape[0])


attention_decode = define(
    "attention_decode",
    "(Tensor qkvr, Tensor kv_conv, Tensor q_norm, Tensor k_norm, Tensor(a!) kv_pool,"
    " Tensor(b!) conv_pool, Tensor positions, Tensor token_rows, Tensor locations, Tensor slots,"
    " Tensor sources, Tensor starts, Tensor lengths, Tensor destination_slots,"
    " Tensor destination_offsets, Tensor rel_proj, Tensor page_table, int layer, int heads,"
    " int window, int log_floor, float log_alpha, float eps) -> Tensor",
    reference.attention_decode,
    _fake,
)
