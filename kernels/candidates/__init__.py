"""Sampling from a few candidates of each rank, exact wherever it does not say otherwise.

`candidates(...) -> (chosen, logprobs, top_tokens, top_logprobs, unsure)`. As `sample`, but for

* logits [S, C] f32: this rank's columns, of the ids from rank * C on as far as `vocab`
* peers, exchange (written), step_counter, rank, call, calls, world: see `kernels/_exchange.py`. Each rank
  gives `record_words` words a sample: statistics, its best id, its top raw logits, its `budget` best ids
* unsure [S] i32: 1 where that does not prove the token; it and its logprob are 0 then. step_counter
  counts such samples and the steps that have any (`table.WHOLE_SAMPLES`, `WHOLE_STEPS`)

What is not unsure is what `sample` gives for the whole logits: the same token, logprobs but for the order
of a sum. Greedy rows and draws without filters need one id of each rank, the best with its noise, and are
never unsure. For min-p, top-k and top-p the ids of all ranks are put in order as far as no rank has left
one out: down to the best of the ranks' last ones. Proven are then

* top-k, if that many ids are in order, or fewer pass min-p
* min-p, if the last id in order fails it by more than CLOSE
* top-p alone, over all of the mass, if the ids in order reach it
* each cut of top-p, if the mass before an id differs from the goal by more than rounding could make:
  CLOSE of the whole mass, EXACT of it if no part of the mass is a rank's own sum
"""

from typing import Any

import torch
from torch import Tensor

from inkling_engine.kernels._op import define
from inkling_engine.kernels.candidates import reference


def _fake(logits: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    rows, top = logits.shape[0], rest[13]
    return (
        logits.new_empty(rows, dtype=torch.int32),
        logits.new_empty(rows),
        logits.new_empty(rows, top, dtype=torch.int32),
        logits.new_empty(rows, top),
        logits.new_empty(rows, dtype=torch.int32),
    )


candidates = define(
    "candidates",
    "(Tensor logits, Tensor token_counts, Tensor request_state, Tensor request_ints,"
    " Tensor request_floats, Tensor tokens, Tensor token_rows, Tensor slots, Tensor starts,"
    " Tensor lengths, Tensor sample_rows, Tensor emits, int stop_ids, int bias_ids, int top,"
    " int drafts, Tensor peers, Tensor(a!) exchange, Tensor(b!) step_counter, Tensor rank,"
    " int budget, int call, int calls, int world, int vocab) -> (Tensor chosen, Tensor logprobs,"
    " Tensor top_tokens, Tensor top_logprobs, Tensor unsure)",
    reference.candidates,
    _fake,
)
