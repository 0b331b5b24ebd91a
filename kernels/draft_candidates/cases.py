"""Shapes and inputs of draft candidates: a rank alone, the others absent. Results are equal."""

import torch

from inkling_engine.kernels._cases import Case, Ranks
from inkling_engine.kernels.draft_sample import cases as sampling


def cases() -> list[Case]:
    """First, inner and last ranks, the last of which may have fewer real ids, or none."""
    made = []
    worlds = ((2, 0), (2, 1), (4, 3), (3, 2), (4, 1), (2, 0))
    for case, (world, rank) in zip(sampling.cases(), worlds, strict=True):
        logits, vocab = case.arguments[0], case.arguments[0].shape[1]
        columns = -(-vocab // world) + (world == 3) * vocab
        own = torch.full((len(logits), world * columns), torch.nan)
        own[:, :vocab] = logits
        own = own[:, rank * columns : (rank + 1) * columns].contiguous()
        ranks = Ranks(world, rank).tensors
        arguments = (own, *case.arguments[1:], *ranks, -2, 9, world, vocab)
        made.append(Case(f"{case.name}-{rank}of{world}", arguments, tolerance=0))
    return made
