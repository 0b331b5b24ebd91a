"""Boundary of a sub-layer (spec 2.3, 2.5): convolution, residual and norm in fp32."""

from torch import Tensor

from inkling_engine.kernels._conv import Rows, short_conv
from inkling_engine.kernels.rmsnorm.reference import rmsnorm


def boundary(
    x: Tensor,
    residual: Tensor,
    conv_weight: Tensor,
    norm_weight: Tensor,
    conv_pool: Tensor,
    token_rows: Tensor,
    slots: Tensor,
    sources: Tensor,
    starts: Tensor,
    lengths: Tensor,
    destination_slots: Tensor,
    destination_offsets: Tensor,
    peers: Tensor,
    rank: Tensor,
    layer: int,
    eps: float,
    world: int,
) -> tuple[Tensor, Tensor]:
    """Hidden state and its norm; see the package docstring."""
    rows = Rows(slots, sources, starts, lengths, destination_slots, destination_offsets)
    hidden = residual.float() + short_conv(x, conv_weight, conv_pool[layer], rows)
    return hidden.to(x.dtype), rmsnorm(hidden, norm_weight, eps).to(x.dtype)
