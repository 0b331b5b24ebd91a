"""What the draft depths of a round need of its rows, derived once from the committed step.

`draft_metadata(...) -> DraftMeta`: a row with n tokens of state before the step and L after it
(request_state [lines, 8]) has draft rows p = p0 .. L - 1, p0 = max(0, n - B), K = `drafts`: all depths
run over the same rows, and the B behind n are run again, since they may have read drafts. B = K, but
K - 1 in a verify step, whose rows begin with a token x[n] that was sampled: the phase before has read it
in row n - K. int32 unless stated:

* read: full_table [lines, width], window_table [lines, ring]; recent_tokens [slots, K], whose entry
  [sources[r], q % K] is x[q] for the K - 1 positions q before n; of the step (`StepMeta`): tokens [T],
  slots, sources [R], starts [R + 1], lengths [R] (n), destination_slots, destination_offsets [R, G],
  emits: [R] where `most` = 0, else [T] in a verify step of at most `most` tokens a row
* returned, T' = T + R B: ids [T' + R K]; token_rows, positions (p), hidden_rows [T'] (of the row's
  target hidden state: packed token of the step if p >= n, else T + p % K in the stash of the row's
  source), full_locations, window_locations [T'] i64 (of position p + K: where the draft KV of row p
  lies); slots, sources [R], starts [R + 1], lengths (p0), kv_lengths (p0 + K) [R];
  destination_slots, destination_offsets [R, G]: the boundaries b <= L, at b - K - p0 rows;
  frontier_rows (of p = L - 1, where a row emits), emits [R]

Depth d reads x[p + 1 + d] at row p. For the j-th row of r it is ids[starts[r] + r K + j + d]: the row's
part of ids holds x[p0 + 1 .. L], then K zeros, where `draft_sample` writes its guesses. x[L] is 0 where
the step did not sample. A row emits if the step sampled and did not end its request.
"""

from torch import Tensor

from inkling_engine.kernels._op import define
from inkling_engine.kernels.draft_metadata import reference
from inkling_engine.kernels.draft_metadata.reference import DraftMeta

__all__ = ["DraftMeta", "draft_metadata"]


def _fake(*arguments: Tensor | int) -> tuple[Tensor, ...]:
    step_tokens, slots, destinations, drafts, most = (arguments[i] for i in (4, 5, 9, 13, 14))
    assert isinstance(step_tokens, Tensor) and isinstance(slots, Tensor)
    assert isinstance(destinations, Tensor) and isinstance(drafts, int) and isinstance(most, int)
    tokens, rows = step_tokens.shape[0], slots.shape[0]
    return tuple(reference.empty_meta(slots, tokens, rows, destinations.shape[1], drafts, most))


draft_metadata = define(
    "draft_metadata",
    "(Tensor request_state, Tensor full_table, Tensor window_table, Tensor recent_tokens,"
    " Tensor step_tokens, Tensor slots, Tensor sources, Tensor starts, Tensor lengths,"
    " Tensor destination_slots, Tensor destination_offsets, Tensor emits, int page_size, int drafts,"
    " int most) -> (Tensor ids, Tensor token_rows, Tensor positions, Tensor hidden_rows,"
    " Tensor full_locations, Tensor window_locations, Tensor draft_slots, Tensor draft_sources,"
    " Tensor draft_starts, Tensor draft_lengths, Tensor kv_lengths,"
    " Tensor draft_destination_slots, Tensor draft_destination_offsets, Tensor frontier_rows,"
    " Tensor draft_emits)",
    reference.draft_metadata,
    _fake,
)
