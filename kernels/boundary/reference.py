"""Boundary of a sub-layer (spec 2.3, 2.5): convolution, residual and norm in fp32."""

from torch import Tensor

from inkling_engine.kernels._conv import Rows, short_conv
from inkling_engine.kernels._exchange import all_parts, rank_sum
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
    exchange: Tensor,
    step_counter: Tensor,
    rank: Tensor,
    layer: int,
    call: int,
    calls: int,
    eps: float,
    world: int,
) -> tuple[Tensor, Tensor]:
    """Hidden state and its norm; see the package docstring."""
    rows = Rows(slots, sources, starts, lengths, destination_slots, destination_offsets)
    if world > 1:
        x = rank_sum(all_parts(x, peers, exchange, step_counter, rank, call, calls, world))
    hidden = residual.float() + short_conv(x, conv_weight, conv_pool[layer], rows)
    return hidden.to(x.dtype), rmsnorm(hidden, norm_weight, eps).to(x.dtype)
