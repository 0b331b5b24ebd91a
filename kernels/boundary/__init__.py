"""The end of a sub-layer: reduction over ranks, short convolution, residual, the next norm.

`boundary(...) -> (hidden, normed)` for T tokens over R rows; act is the activation dtype:

* x [T, H] act: this rank's part of the sub-layer's output; residual [T, H] act
* conv_weight [H, 4] f32 (last tap: the current token), norm_weight [H] act
* conv_pool [layers, slots, RING, H] act: written (see `kernels/_conv.py`); layer is its first index
* token_rows [T] i32, slots, sources, lengths [R] i32, starts [R + 1] i32,
  destination_slots, destination_offsets [R, G] i32
* peers [8], exchange [words] (written), step_counter [4] i64, rank [4] i32, call, calls, world: the ranks
  that x is summed over (see `kernels/_exchange.py`), in fp32 in rank order, rounded once to act
* hidden = round(residual + conv(x)), normed = round(rmsnorm(residual + conv(x)) * w), both [T, H] act,
  the sum kept in fp32 and normalised unrounded (spec 2.2, 2.3, 2.5)

Padded tokens are convolved as if they had no history and write no state.
"""

import torch
from torch import Tensor

from inkling_engine.kernels._op import define
from inkling_engine.kernels.boundary import reference


def _fake(x: Tensor, *_: Tensor | float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


boundary = define(
    "boundary",
    "(Tensor x, Tensor residual, Tensor conv_weight, Tensor norm_weight, Tensor(a!) conv_pool,"
    " Tensor token_rows, Tensor slots, Tensor sources, Tensor starts, Tensor lengths,"
    " Tensor destination_slots, Tensor destination_offsets, Tensor peers, Tensor(b!) exchange,"
    " Tensor step_counter, Tensor rank, int layer, int call, int calls, float eps, int world)"
    " -> (Tensor hidden, Tensor normed)",
    reference.boundary,
    _fake,
)
