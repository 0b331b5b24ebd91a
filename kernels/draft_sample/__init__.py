"""The guess of a draft depth for every row that goes on.

`draft_sample(...)` returns nothing. For the R rows of a draft phase, K = `drafts`:

* read: logits [R, V'] f32 over the first V' <= V tokens; token_counts [lines, V], request_state,
  request_ints, request_floats: the committed request table, with `stop_ids` stop ids and `bias_ids` biases;
  slots, lengths (p0), emits [R], starts [R + 1] i32: `draft_metadata`'s
* written, where a row emits: draft_tokens [lines, K] i32 at (slot, depth), and the place of the guess in
  ids [T' + R K] i32, starts[r + 1] + r K + depth

The guess of depth d stands at position L + 1 + d, L = lengths[r] + starts[r + 1] - starts[r]. It is what
`sample` would choose there from these logits without min-p, top-k and top-p: the same bias, stop mask,
penalties (the guesses of the depths before count as generated) and noise. Logits of which one is not
finite guess token 0.
"""

from torch import Tensor

from inkling_engine.kernels._op import define
from inkling_engine.kernels.draft_sample import reference


def _fake(*_: Tensor | int) -> None:
    return None


draft_sample = define(
    "draft_sample",
    "(Tensor logits, Tensor token_counts, Tensor request_state, Tensor request_ints,"
    " Tensor request_floats, Tensor(a!) draft_tokens, Tensor(b!) ids, Tensor slots, Tensor starts,"
    " Tensor lengths, Tensor emits, int depth, int drafts, int stop_ids, int bias_ids) -> ()",
    reference.draft_sample,
    _fake,
)
