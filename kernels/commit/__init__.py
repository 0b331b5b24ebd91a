"""Commit of a step: the request table and the results ring.

`commit(...)` returns nothing and writes, for the R rows of a step:

* request_state [lines, 8] i32: a row that emits has LAST_TOKEN, GENERATED and FINISH as its tokens
  make them, one after the other: NON_FINITE where a logprob is NaN, STOP where the token is one of the
  `stop_ids` stop ids, LENGTH where GENERATED reaches MAX_TOKENS. LENGTH grows by the row's tokens
* token_counts [lines, V] i32: + 1 for an emitted token
* results_int [results, max_rows, 5 + N (1 + top)] i32 and results_float [results, max_rows,
  N (1 + top)] f32 for N tokens a row, line step_counter[0] % results: (slot, emitted tokens, finish,
  new length, drafts, tokens, top tokens) and (logprobs, top logprobs) of every row of the bucket,
  zeros for inert rows and behind the emitted tokens
* step_counter [4] i64: element 0 grows by one
* snapshot_slots [lines, Gmax], snapshot_lengths [slots] i32: in verify steps alone

tokens [S] i32, logprobs [S] f32, top_tokens [S, top] i32, top_logprobs [S, top] f32 are `sample`'s;
step_tokens [T], slots, lengths [R], starts [R + 1], emits [S], destination_slots, destination_offsets
[R, G] i32 are `step_metadata`'s; request_ints is read for limits and stop ids. Line 0 of the table is
never written.

In a verify step (`drafts` > 0, S = T) a row's tokens behind its first are drafts. The leading ones that
are the target's tokens are accepted and emitted, then the target's next token; what ends the request
cuts the run behind it. LENGTH grows by what is emitted: the row's first token and the drafts before
the last emitted one. A boundary not beyond the new length takes its destination off the slot's list
and is recorded in snapshot_lengths. FORCE_ACCEPT says how many of the drafts are taken whatever they are.
"""

from torch import Tensor

from inkling_engine.kernels._op import define
from inkling_engine.kernels.commit import reference


def _fake(*_: Tensor | int) -> None:
    return None


commit = define(
    "commit",
    "(Tensor(a!) request_state, Tensor(b!) token_counts, Tensor(c!) results_int,"
    " Tensor(d!) results_float, Tensor(e!) step_counter, Tensor(f!) snapshot_slots,"
    " Tensor(g!) snapshot_lengths, Tensor request_ints, Tensor tokens, Tensor logprobs,"
    " Tensor top_tokens, Tensor top_logprobs, Tensor step_tokens, Tensor slots, Tensor starts,"
    " Tensor lengths, Tensor emits, Tensor destination_slots, Tensor destination_offsets,"
    " int stop_ids, int drafts) -> ()",
    reference.commit,
    _fake,
)
