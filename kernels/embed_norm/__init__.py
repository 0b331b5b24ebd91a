"""Token embedding and its norm: the first hidden rows of a step.

`embed_norm(tokens, table, weight, peers, exchange, step_counter, rank, call, calls, eps, world) -> hidden`:
tokens [T] i32, table [V, H] and weight [H] in the activation dtype, peers [8], exchange [words] (written),
step_counter [4] i64, rank [4] i32, call, calls, world: see `kernels/_exchange.py`; hidden [T, H] in the
activation dtype. hidden = rmsnorm(table[token], weight), one rounding (spec 2.1). Padded tokens are token 0 and give its row. A token without an embedding is an assertion.

Of several ranks each holds V rows of the vocabulary, from rank * V on, and gives the others those of
its tokens. A token of an absent rank is a row of zeros.
"""

from torch import Tensor

from inkling_engine.kernels._op import define
from inkling_engine.kernels.embed_norm import reference


def _fake(tokens: Tensor, table: Tensor, *_: Tensor | float) -> Tensor:
    return table.new_empty(tokens.shape[0], table.shape[1])


embed_norm = define(
    "embed_norm",
    "(Tensor tokens, Tensor table, Tensor weight, Tensor peers, Tensor(a!) exchange,"
    " Tensor step_counter, Tensor rank, int call, int calls, float eps, int world) -> Tensor",
    reference.embed_norm,
    _fake,
)
