"""Sampling of the next token of every emitting row, with logprobs.

`sample(...) -> (chosen, logprobs, top_tokens, top_logprobs)` for S samples over a vocabulary of V:

* logits [S, V] f32; token_counts [lines, V] i32, request_state, request_ints, request_floats: the
  request table (`kernels/table.py`), a line a slot, with `stop_ids` stop ids and `bias_ids` biases
* tokens, token_rows [T], slots, lengths [R], starts [R + 1], sample_rows, emits [S] i32: the step's
  metadata. Sample s stands behind packed token t = sample_rows[s], the i-th of row r = token_rows[t]
  (i = t - starts[r]): its token is to stand at position lengths[r] + i + 1. One of emits 0 gives zeros
* chosen [S] i32, logprobs [S] f32, top_tokens [S, top] i32, top_logprobs [S, top] f32

In a verify step (`drafts` > 0) tokens starts[r] + 1 .. t are drafts. The sample is what plain decoding
would draw once they are accepted: they count as generated, in token_counts and towards MIN_TOKENS.

Logprobs are the log-softmax of the raw logits, the top ones by descending logit, then ascending id:
as many as the request's TOP_LOGPROBS says, zeros after them. A raw logit that is NaN or infinite gives
token 0 and NaN logprobs. The token is drawn from the
processed logits: + logit bias; stop ids masked while fewer than MIN_TOKENS are generated;
repetition on all seen tokens (l > 0 ? l / r : l * r); frequency * count and presence on generated
ones. Temperature 0 takes the highest (lowest id on ties). Otherwise l / T is filtered in this order:
min-p (p >= min_p * max p), top-k (of equal ones the lower ids), top-p (the smallest set in order of
descending p, then ascending id, whose share of what is left reaches top_p; at least one), and the
highest l / T + Gumbel noise is taken. The noise depends on (seed, position, token id) alone:
Philox-4x32-10 with key (SEED_LOW, SEED_HIGH) and counter (token id, position, 0, 0), first word.
"""

import torch
from torch import Tensor

from inkling_engine.kernels._op import define
from inkling_engine.kernels.sample import reference


def _fake(logits: Tensor, *arguments: Tensor | int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, top = logits.shape[0], arguments[-2]
    assert isinstance(top, int)
    return (
        logits.new_empty(rows, dtype=torch.int32),
        logits.new_empty(rows),
        logits.new_empty(rows, top, dtype=torch.int32),
        logits.new_empty(rows, top),
    )


sample = define(
    "sample",
    "(Tensor logits, Tensor token_counts, Tensor request_state, Tensor request_ints,"
    " Tensor request_floats, Tensor tokens, Tensor token_rows, Tensor slots, Tensor starts,"
    " Tensor lengths, Tensor sample_rows, Tensor emits, int stop_ids, int bias_ids, int top,"
    " int drafts) -> (Tensor chosen, Tensor logprobs, Tensor top_tokens, Tensor top_logprobs)",
    reference.sample,
    _fake,
)
