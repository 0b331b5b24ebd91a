"""Attention of a decode step: `attention_extend` for rows of at most one token.

`attention_decode(q, r, rel_proj, kv_pool, page_table, slots, starts, lengths, layer, window) -> o`:
arguments and mathematics as in `attention_extend`, with starts[i + 1] - starts[i] <= 1. An op of
its own because a GPU splits one query's keys, not the queries; on the CPU both run the same code.
"""

from inkling_engine.kernels._op import define
from inkling_engine.kernels.attention_decode import reference
from inkling_engine.kernels.attention_extend import SIGNATURE, fake

attention_decode = define("attention_decode", SIGNATURE, reference.attention_decode, fake)
