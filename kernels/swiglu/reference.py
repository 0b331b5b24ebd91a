"""The gated activation of a dense MLP (spec 2.6): fp32, one rounding."""

from torch import Tensor
from torch.nn.functional import silu


def swiglu(x: Tensor, scale: Tensor) -> Tensor:
    """Gate the halves of `x` [T, 2I]; see the package docstring."""
    gate, up = x.float().chunk(2, dim=-1)
    return (silu(gate) * up * scale).to(x.dtype)
