"""Shapes, inputs and tolerances of candidates: a rank alone, the others absent."""

import torch

from inkling_engine.kernels._cases import Case, Ranks
from inkling_engine.kernels.sample import cases as sampling

_BUDGETS = (4, 8, 16, 64)


def cases() -> list[Case]:
    """Everything that sampling is tried on: as the only ids there are, and as those of an inner rank."""
    made = []
    for number, case in enumerate(sampling.cases()):
        logits, *rest = case.arguments
        vocab, budget = logits.shape[1], _BUDGETS[number % len(_BUDGETS)]
        for world, rank, columns in ((2, 0, vocab), (3, 1, -(-vocab // 3)), (2, 1, vocab - 9)):
            own = torch.full((len(logits), world * columns), torch.nan)
            own[:, :vocab] = logits[:, : world * columns]
            own = own[:, rank * columns : (rank + 1) * columns].contiguous()
            ranks = Ranks(world, rank).tensors
            arguments = (own, *rest, *ranks, budget, 5, 9, world, vocab)
            made.append(Case(f"{case.name}-{rank}of{world}", arguments, case.tolerance))
    return made
