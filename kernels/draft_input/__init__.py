"""Input of a draft depth: the normed hidden state and the normed embedding of the next token.

`draft_input(...) -> z [T', 2H]`, rows of zeros from starts[R] on; act = activation dtype:

* hidden [T', H] act: the target's hidden state at depth 0, else the depth's before
* ids [T' + R K] i32, token_rows [T'], starts [R + 1] i32: as in `draft_metadata`, K = `drafts`; row i of
  row r reads the token ids[i + r K + depth]
* table [V, H] (the embedding), embed_norm, hidden_norm, token_norm [H] act; peers, exchange (written),
  step_counter, rank, call, calls, world: as in `embed_norm`

z = (rmsnorm(hidden, hidden_norm) ; rmsnorm(e, token_norm)), one rounding each (spec 6.1); e is the op
`embed_norm` of the token, with its rounding, or the embedding itself without `backbone_norm`.
"""

from torch import Tensor

from inkling_engine.kernels._op import define
from inkling_engine.kernels.draft_input import reference


def _fake(hidden: Tensor, *_: Tensor | float) -> Tensor:
    return hidden.new_empty(hidden.shape[0], 2 * hidden.shape[1])


draft_input = define(
    "draft_input",
    "(Tensor hidden, Tensor ids, Tensor table, Tensor embed_norm, Tensor hidden_norm,"
    " Tensor token_norm, Tensor token_rows, Tensor starts, Tensor peers, Tensor(a!) exchange,"
    " Tensor step_counter, Tensor rank, int depth, int drafts, int call, int calls, float eps,"
    " int world, bool backbone_norm) -> Tensor",
    reference.draft_input,
    _fake,
)
