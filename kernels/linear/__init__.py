"""Matrix product of each token.

`linear(x, weight) -> y`: x [T, K], weight [N, K], y [T, N], all in the activation dtype.
y = x @ weight^T, accumulated in fp32, one rounding.
"""

from torch import Tensor

from inkling_engine.kernels._op import define
from inkling_engine.kernels.linear import reference


def _fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


linear = define("linear", "(Tensor x, Tensor weight) -> Tensor", reference.linear, _fake)
