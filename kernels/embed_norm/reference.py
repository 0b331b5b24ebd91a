"""Token embedding and its norm (spec 2.1): fp32 inside, one rounding."""

from torch import Tensor

from inkling_engine.kernels.rmsnorm.reference import rmsnorm


def embed_norm(
    tokens: Tensor,
    table: Tensor,
    weight: Tensor,
    peers: Tensor,
    rank: Tensor,
    eps: float,
    world: int,
) -> Tensor:
    """Look `tokens` [T] up in `table` [V, H] and normalise; see the package docstring."""
    return rmsnorm(embedded(tokens, table, rank, world), weight, eps)


def embedded(tokens: Tensor, table: Tensor, rank: Tensor, world: int) -> Tensor:
    """Rows [T, H] of `table` [V, H]; zeros for another rank's tokens."""
    own = tokens.long()
    if world == 1:
        return table[own]
    own = own - int(rank[0]) * len(table)
    held = (own >= 0) & (own < len(table))
    return table[own.where(held, 0)].where(held[:, None], 0)
