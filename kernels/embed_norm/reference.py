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
    assert world == 1, "the vocabulary is not split over ranks"
    return rmsnorm(table[tokens.long()], weight, eps)
