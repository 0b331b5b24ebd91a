"""Samples that candidates did not prove, drawn from whole logits.

`resample(logits, ..., chosen, logprobs, top_tokens, top_logprobs)` returns nothing: where unsure [S] i32
is not 0 it writes over the results [S], [S], [S, top], [S, top] of `candidates` what `sample` gives for
the whole logits [S, V] f32 and its other arguments. The others' logits are not read and may hold anything.
"""

from torch import Tensor

from inkling_engine.kernels._op import define
from inkling_engine.kernels.resample import reference


def _fake(*_: Tensor | int) -> None:
    return None


resample = define(
    "resample",
    "(Tensor logits, Tensor token_counts, Tensor request_state, Tensor request_ints,"
    " Tensor request_floats, Tensor tokens, Tensor token_rows, Tensor slots, Tensor starts,"
    " Tensor lengths, Tensor sample_rows, Tensor unsure, int stop_ids, int bias_ids, int top,"
    " int drafts, Tensor(a!) chosen, Tensor(b!) logprobs, Tensor(c!) top_tokens,"
    " Tensor(d!) top_logprobs) -> ()",
    reference.resample,
    _fake,
)
