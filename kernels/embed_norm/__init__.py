"""Token embedding and its norm: the first hidden rows of a step.

`embed_norm(tokens, table, weight, peers, rank, eps, world) -> hidden`: tokens [T] i32, table [V, H]
and weight [H] in the activation dtype, peers [8] i64, rank [4] i32 (its first entry, read when
world > 1), hidden [T, H] in the activation dtype. hidden = rmsnorm(table[token], weight), one rounding
(spec 2.1). Padded tokens are token 0 and give its row. A token without an embedding is an assertion.

Of several ranks each holds V rows of the vocabulary, from rank * V on. A token of another rank's is a
row of zeros; the sum over ranks is not made yet.
"""

from torch import Tensor

from inkling_engine.kernels._op import define
from inkling_engine.kernels.embed_norm import reference


def _fake(tokens: Tensor, table: Tensor, *_: Tensor | float) -> Tensor:
    return table.new_empty(tokens.shape[0], table.shape[1])


embed_norm = define(
    "embed_norm",
    "(Tensor tokens, Tensor table, Tensor weight, Tensor peers, Tensor rank, float eps, int world)"
    " -> Tensor",
    reference.embed_norm,
    _fake,
)
