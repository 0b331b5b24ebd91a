"""Shapes and inputs of drawing again: those of sampling, some samples being sure."""

import torch

from inkling_engine.kernels._cases import Case, normal
from inkling_engine.kernels.sample import cases as sampling


def cases() -> list[Case]:
    """All, some and no samples unsure; what is not read is NaN."""
    made = []
    for case in sampling.cases():
        logits, emits = case.arguments[0].clone(), case.arguments[11]
        top, samples = case.arguments[14], len(emits)
        sure = torch.arange(samples) % 3 == {"filters": 1, "changes": 2}.get(case.name[:7], 3)
        if case.name.startswith("greedy"):
            sure[:] = True
        unsure = emits * ~sure
        logits[unsure == 0] = torch.nan
        results = (
            torch.arange(samples, dtype=torch.int32),
            normal(samples),
            torch.arange(samples * top, dtype=torch.int32).view(samples, top),
            normal(samples, top),
        )
        before, after = case.arguments[1:11], case.arguments[12:16]
        arguments = (logits, *before, unsure, *after, *results)
        made.append(Case(case.name, arguments, case.tolerance))
    return made
