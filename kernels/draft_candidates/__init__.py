"""`draft_sample` by several ranks, each of which gives its best id of a row.

`draft_candidates(...)` returns nothing. As `draft_sample`, but logits [R, C] f32 are this rank's columns,
of the ids from rank * C on as far as `vocab` <= V; peers, exchange (written), step_counter, rank, call,
calls, world: see `kernels/_exchange.py`. All ranks write the same guesses: what `draft_sample` gives for
the whole logits [R, vocab].
"""

from torch import Tensor

from inkling_engine.kernels._op import define
from inkling_engine.kernels.draft_candidates import reference


def _fake(*_: Tensor | int) -> None:
    return None


draft_candidates = define(
    "draft_candidates",
    "(Tensor logits, Tensor token_counts, Tensor request_state, Tensor request_ints,"
    " Tensor request_floats, Tensor(a!) draft_tokens, Tensor(b!) ids, Tensor slots, Tensor starts,"
    " Tensor lengths, Tensor emits, int depth, int drafts, int stop_ids, int bias_ids,"
    " Tensor peers, Tensor(c!) exchange, Tensor step_counter, Tensor rank, int call, int calls,"
    " int world, int vocab) -> ()",
    reference.draft_candidates,
    _fake,
)
