"""The gated activation of a dense MLP.

`swiglu(x, scale) -> y`: x [T, 2*I] (gate half, then up half) and y [T, I] in the activation dtype,
scale [1] f32. y = silu(gate) * up * scale in fp32, one rounding (spec 2.6; the scale is linear, so
it may stand before the down product).
"""

from torch import Tensor

from inkling_engine.kernels._op import define
from inkling_engine.kernels.swiglu import reference


def _fake(x: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2)


swiglu = define("swiglu", "(Tensor x, Tensor scale) -> Tensor", reference.swiglu, _fake)
