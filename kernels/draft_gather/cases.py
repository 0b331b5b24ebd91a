"""Rounds whose hidden states are gathered. Nothing is computed: results are equal."""

import torch

from inkling_engine.kernels._case_drafts import ROUNDS, Round
from inkling_engine.kernels._cases import Case, normal


def _case(name: str, spec: Round, width: int, dtype: torch.dtype) -> Case:
    meta = spec.meta
    arguments = (
        normal(spec.tokens, width, dtype=dtype),
        spec.draft_hidden(width, dtype),
        *(meta.token_rows, meta.hidden_rows, meta.sources, meta.starts),
    )
    return Case(f"{name}-{width}-{str(dtype).removeprefix('torch.')}", arguments, tolerance=0)


def cases() -> list[Case]:
    """Every round; an odd width."""
    return [
        _case(name, spec, width, dtype)
        for name, spec in ROUNDS.items()
        for width, dtype in ((64, torch.bfloat16), (37, torch.float32))
    ]
