"""Commit of a step: the request table and the results ring.

`commit(...)` returns nothing and writes, for the R rows of a step:

* request_state [lines, 4] i32: LENGTH grows by the row's tokens; if the row emits, LAST_TOKEN is its
  token, GENERATED grows by one and FINISH is set: NON_FINITE where its logprob is NaN, STOP where the
  token is one of the `stop_ids` stop ids, LENGTH where GENERATED reaches MAX_TOKENS
* token_counts [lines, V] i32: + 1 for an emitted token
* results_int [results, max_rows, 4 + top] i32 and results_float [results, max_rows, 1 + top] f32,
  line step_counter[0] % results: (slot, token, finish, new length, top tokens) and (logprob, top
  logprobs) of every row of the bucket, zeros for inert rows
* step_counter [4] i64: element 0 grows by one

tokens [R] i32, logprobs [R] f32, top_tokens [R, top] i32, top_logprobs [R, top] f32 are `sample`'s;
slots, emits [R] i32, starts [R + 1] i32 are `step_metadata`'s; request_ints is read for limits and
stop ids. Line 0 of the table is never written.
"""

from torch import Tensor

from inkling_engine.kernels._op import define
from inkling_engine.kernels.commit import reference


def _fake(*_: Tensor | int) -> None:
    return None


commit = define(
    "commit",
    "(Tensor(a!) request_state, Tensor(b!) token_counts, Tensor(c!) results_int,"
    " Tensor(d!) results_float, Tensor(e!) step_counter, Tensor request_ints, Tensor tokens,"
    " Tensor logprobs, Tensor top_tokens, Tensor top_logprobs, Tensor slots, Tensor starts,"
    " Tensor emits, int stop_ids) -> ()",
    reference.commit,
    _fake,
)
