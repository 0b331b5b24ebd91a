"""Everything between the fused q, k, v, r product and attention.

`attention_prologue(...) -> (q, r)` for T tokens over R rows; act is the activation dtype,
C = kv_heads * D:

* qkvr [T, Nq*D + 2*C + Nq*dr] act: q | k | v | r, each head-major
* kv_conv [2*C, 4] f32 (k channels first; the last tap is the current token), q_norm, k_norm [D] act
* kv_pool [layers, pages, 2, kv_heads, page_size, D] act, conv_pool [layers, slots, RING, 2*C] act: written
* positions, token_rows [T] i32, locations [T] i64 (page * page_size + offset in the page)
* slots, sources, lengths [R] i32, starts [R + 1] i32, destination_slots, destination_offsets [R, G] i32
* layer: first index of both pools; log_floor 0: no log scaling (spec 2.4)
* q [T, Nq, D] act: normalised per head, times tau; r [T, Nq, dr] f32: times tau

k and v pass their short convolution (`kernels/_conv.py`), are rounded, k is normalised per head,
and both go to the pool at `locations`. Padded tokens give zeros and write nothing.
"""

import torch
from torch import Tensor

from inkling_engine.kernels._op import define
from inkling_engine.kernels.attention_prologue import reference


def _fake(
    qkvr: Tensor, kv_conv: Tensor, q_norm: Tensor, *arguments: Tensor | float
) -> tuple[Tensor, Tensor]:
    heads = arguments[-4]
    assert isinstance(heads, int)
    tokens, width = qkvr.shape
    dim = q_norm.shape[0]
    rel = (width - kv_conv.shape[0]) // heads - dim
    return (
        qkvr.new_empty(tokens, heads, dim),
        qkvr.new_empty(tokens, heads, rel, dtype=torch.float32),
    )


attention_prologue = define(
    "attention_prologue",
    "(Tensor qkvr, Tensor kv_conv, Tensor q_norm, Tensor k_norm, Tensor(a!) kv_pool,"
    " Tensor(b!) conv_pool, Tensor positions, Tensor token_rows, Tensor locations, Tensor slots,"
    " Tensor sources, Tensor starts, Tensor lengths, Tensor destination_slots,"
    " Tensor destination_offsets, int layer, int heads, int log_floor, float log_alpha, float eps)"
    " -> (Tensor q, Tensor r)",
    reference.attention_prologue,
    _fake,
)
