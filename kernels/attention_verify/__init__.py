"""Attention of a verify step and of its draft phase: `attention_extend` for rows of few tokens.

`attention_verify(q, r, rel_proj, kv_pool, page_table, slots, starts, lengths, layer, window, first,
most) -> o`: arguments and mathematics as in `attention_extend`, and starts[i + 1] - starts[i] <= most:
1 + K where K drafts are verified, 1 + 2 K where the depths follow. An op of its own because a GPU
splits the keys of a row's queries, not the queries; on the CPU both run the same code.
"""

from inkling_engine.kernels._op import define
from inkling_engine.kernels.attention_extend import TENSORS, fake
from inkling_engine.kernels.attention_verify import reference

attention_verify = define(
    "attention_verify",
    f"({TENSORS}, int layer, int window, int first, int most) -> Tensor",
    reference.attention_verify,
    fake,
)
