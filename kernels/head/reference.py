"""Logits of the rows that sample (spec 2.9), in fp32."""

from torch import Tensor


def head(
    x: Tensor, weight: Tensor, sample_rows: Tensor, emits: Tensor, scale: float, vocab: int
) -> Tensor:
    """Multiply the sampled rows of `x` by the head; see the package docstring."""
    emitting = emits.bool()
    logits = x.new_zeros(len(emits), vocab, dtype=weight.float().dtype)
    sampled = x[sample_rows[emitting].long()].float()
    logits[emitting] = scale * (sampled @ weight[:vocab].float().T)
    return logits
