"""Logits of the rows that sample.

`head(x, weight, sample_rows, emits, scale, vocab) -> logits`: x [T, H] and weight [V, H] in the
activation dtype, sample_rows (the token to sample after) and emits [R] i32, logits [R, vocab] f32.
logits = scale * (x[sample_row] @ weight[:vocab]^T) in fp32, scale being 1 / mup (spec 2.9); rows that
do not emit are zero and read nothing.
"""

import torch
from torch import Tensor

from inkling_engine.kernels._op import define
from inkling_engine.kernels.head import reference


def _fake(
    x: Tensor, weight: Tensor, sample_rows: Tensor, emits: Tensor, scale: float, vocab: int
) -> Tensor:
    return x.new_empty(sample_rows.shape[0], vocab, dtype=torch.float32)


head = define(
    "head",
    "(Tensor x, Tensor weight, Tensor sample_rows, Tensor emits, float scale, int vocab) -> Tensor",
    reference.head,
    _fake,
)
