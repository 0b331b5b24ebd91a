"""Target hidden states of a draft phase's rows.

`draft_gather(hidden, draft_hidden, token_rows, hidden_rows, sources, starts) -> [T', H]`: hidden [T, H]
are the step's (after the final norm), draft_hidden [slots, K, H] the stash of the rows before it, both in
the activation dtype; the others int32 as in `draft_metadata`: token_rows, hidden_rows [T'], sources
[R], starts [R + 1]. Row i is hidden[hidden_rows[i]], or where that is T + k entry k of the stash of
sources[token_rows[i]]; rows from starts[R] on are zeros.
"""

from torch import Tensor

from inkling_engine.kernels._op import define
from inkling_engine.kernels.draft_gather import reference


def _fake(hidden: Tensor, draft_hidden: Tensor, token_rows: Tensor, *_: Tensor) -> Tensor:
    return hidden.new_empty(token_rows.shape[0], hidden.shape[1])


draft_gather = define(
    "draft_gather",
    "(Tensor hidden, Tensor draft_hidden, Tensor token_rows, Tensor hidden_rows, Tensor sources,"
    " Tensor starts) -> Tensor",
    reference.draft_gather,
    _fake,
)
