"""Token embedding and its norm (spec 2.1): fp32 inside, one rounding."""

from torch import Tensor

from inkling_engine.kernels._exchange import all_parts
from inkling_engine.kernels.rmsnorm.reference import rmsnorm


def embed_norm(
    tokens: Tensor,
    table: Tensor,
    weight: Tensor,
    peers: Tensor,
    exchange: Tensor,
    step_counter: Tensor,
    rank: Tensor,
    call: int,
    calls: int,
    eps: float,
    world: int,
) -> Tensor:
    """Look `tokens` [T] up in `table` [V, H] and normalise; see the package docstring."""
    ranks = peers, exchange, step_counter, rank, call, calls, world
    return rmsnorm(embedded(tokens, table, *ranks), weight, eps)


def embedded(
    tokens: Tensor,
    table: Tensor,
    peers: Tensor,
    exchange: Tensor,
    step_counter: Tensor,
    rank: Tensor,
    call: int,
    calls: int,
    world: int,
) -> Tensor:
    """Rows [T, H] of the table whose part of this rank is `table` [V, H]; zeros for tokens of a rank
    that is absent."""
    owners, own = tokens.long() // len(table), tokens.long() % len(table)
    if world == 1:
        assert not owners.any(), "a token has no embedding"
        return table[own]
    held = (owners == int(rank[0]))[:, None]
    part = table[own].where(held, 0)
    rows = part.new_zeros(part.shape)
    parts = all_parts(part, peers, exchange, step_counter, rank, call, calls, world)
    for other, given in enumerate(parts):
        if given is not None:
            rows = given.where((owners == other)[:, None], rows)
    return rows
