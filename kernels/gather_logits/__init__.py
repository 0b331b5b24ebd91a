"""Logits of the whole vocabulary out of all ranks' columns, in a step that needs them.

`gather_logits(logits, unsure, peers, exchange, step_counter, rank, call, calls, world, vocab) -> whole`:
logits [S, C] f32, this rank's columns from rank * C on; unsure [S] i32, the same on all ranks; peers [8], exchange [words] (written),
step_counter [4] i64, rank [4] i32, call, calls, world: see `kernels/_exchange.py`; whole [S, vocab] f32,
the ranks' columns in order as far as vocab. Columns of an absent rank are ABSENT_LOGIT, which is never drawn.
If no sample is unsure the ranks meet without giving anything, and `whole` may hold anything.
"""

from typing import Any

from torch import Tensor

from inkling_engine.kernels._op import define
from inkling_engine.kernels.gather_logits import reference


def _fake(logits: Tensor, *rest: Any) -> Tensor:
    return logits.new_empty(logits.shape[0], rest[-1])


gather_logits = define(
    "gather_logits",
    "(Tensor logits, Tensor unsure, Tensor peers, Tensor(a!) exchange, Tensor step_counter, Tensor rank, int call,"
    " int calls, int world, int vocab) -> Tensor",
    reference.gather_logits,
    _fake,
)
