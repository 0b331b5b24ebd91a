"""Attention with a learned relative bias over paged KV, any number of tokens a row.

`attention_extend(q, r, rel_proj, kv_pool, page_table, slots, starts, lengths, layer, window, first)
-> o`:

* q [T, Nq, D] act, r [T, Nq, dr] f32 (both with tau), rel_proj [dr, E] act
* kv_pool [layers, pages, 2, kv_heads, page_size, D] act (0 = k, 1 = v); layer is its first index
* page_table [lines, W] i32: logical page p of a slot is at physical page page_table[slot, p % W]
* slots, lengths [R] i32, starts [R + 1] i32; token i of a row is at position length + i
* o [T, Nq * D] act, zeros for padded tokens

score(p, s) = (q_p . k_s) / D + sum_c r_p[c] * rel_proj[c, p - s], the bias 0 at distances >= E;
key s is visible if s >= first and 0 <= p - s and (window = 0 or p - s < window); fp32 softmax
(spec 2.4). No token lies before `first`. A row's own keys are in the pool already. Keys that no token
may see are never read.
"""

import torch
from torch import Tensor

from inkling_engine.kernels._op import define
from inkling_engine.kernels.attention_extend import reference

TENSORS = (
    "Tensor q, Tensor r, Tensor rel_proj, Tensor kv_pool, Tensor page_table, Tensor slots,"
    " Tensor starts, Tensor lengths"
)


def fake(q: Tensor, *_: Tensor | int) -> Tensor:
    """Shape of the output of both attention ops."""
    return torch.empty_like(q).flatten(1)


attention_extend = define(
    "attention_extend",
    f"({TENSORS}, int layer, int window, int first) -> Tensor",
    reference.attention_extend,
    fake,
)
