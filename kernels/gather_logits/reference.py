"""Logits of the whole vocabulary; see the package docstring."""

import torch
from torch import Tensor

from inkling_engine.kernels._exchange import ABSENT_LOGIT, all_parts


def gather_logits(
    logits: Tensor,
    unsure: Tensor,
    peers: Tensor,
    exchange: Tensor,
    step_counter: Tensor,
    rank: Tensor,
    call: int,
    calls: int,
    world: int,
    vocab: int,
) -> Tensor:
    """Gather the ranks' columns; see the package docstring."""
    rows, columns = logits.shape
    assert vocab <= world * columns
    whole = logits.new_full((rows, world * columns), ABSENT_LOGIT)
    given = logits if unsure.any() else logits[:0]
    parts = all_parts(given, peers, exchange, step_counter, rank, call, calls, world)
    if len(given) == 0:
        return whole[:, :vocab].fill_(torch.nan).contiguous()
    for other, part in enumerate(parts):
        if part is not None:
            whole[:, other * columns : (other + 1) * columns] = part
    return whole[:, :vocab].contiguous()
