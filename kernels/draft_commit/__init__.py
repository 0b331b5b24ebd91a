"""What the next round's draft phase needs of this one: stash, recent tokens, count of drafts.

`draft_commit(...)` returns nothing. For each row of a draft phase, L = lengths[r] + starts[r + 1] -
starts[r], K = `drafts`, and act the activation dtype:

* written: draft_hidden [slots, K, H] act: entry p % K = hidden of row p, the last K rows before L;
  recent_tokens [slots, K] i32: entry q % K = x[q], the last K - 1 positions before L but position 0,
  which no depth reads; request_state [lines, 8] i32: DRAFTS = min(K, DRAFT_LIMIT) where the row emits, else 0
* read: request_ints; hidden [T', H] act: `draft_gather`'s; ids [T' + R K], slots, lengths (p0), emits
  [R], starts [R + 1], destination_slots, destination_offsets [R, G] i32: `draft_metadata`'s

A destination of offset o is a snapshot at b = lengths[r] + K + o: its stash and recent tokens are those
before b. Nothing is read from what is written.
"""

from torch import Tensor

from inkling_engine.kernels._op import define
from inkling_engine.kernels.draft_commit import reference


def _fake(*_: Tensor | int) -> None:
    return None


draft_commit = define(
    "draft_commit",
    "(Tensor(a!) request_state, Tensor(b!) draft_hidden, Tensor(c!) recent_tokens,"
    " Tensor request_ints, Tensor hidden, Tensor ids, Tensor slots, Tensor starts, Tensor lengths,"
    " Tensor destination_slots, Tensor destination_offsets, Tensor emits, int drafts) -> ()",
    reference.draft_commit,
    _fake,
)
