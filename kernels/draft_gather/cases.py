"""Rounds whose hidden states are gathered. Nothing is computed: results are equal."""

from typing import Any

import torch

from inkling_engine.kernels._case_drafts import Round, copying_cases
from inkling_engine.kernels._cases import Case, normal


def _arguments(spec: Round, width: int, dtype: torch.dtype) -> tuple[Any, ...]:
    meta = spec.meta
    return (
        normal(spec.tokens, width, dtype=dtype),
        spec.draft_hidden(width, dtype),
        *(meta.token_rows, meta.hidden_rows, meta.sources, meta.starts),
    )


def cases() -> list[Case]:
    """Every round; an odd width."""
    return copying_cases(_arguments)
