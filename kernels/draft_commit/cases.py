"""Rounds that end. Nothing is computed: results are equal."""

from typing import Any

import torch

from inkling_engine.kernels import table
from inkling_engine.kernels._case_drafts import LINES, SLOTS, Round, copying_cases
from inkling_engine.kernels._cases import Case, normal


def _arguments(spec: Round, width: int, dtype: torch.dtype) -> tuple[Any, ...]:
    meta = spec.meta
    ints = torch.full((LINES, table.INT_HEADER + 3), -7, dtype=torch.int32)
    for row in spec.live:
        ints[row.slot, table.DRAFT_LIMIT] = row.limit
    return (
        spec.state,
        torch.full((SLOTS, spec.drafts, width), torch.nan, dtype=dtype),
        torch.full((SLOTS, spec.drafts), -7, dtype=torch.int32),
        ints,
        normal(len(meta.token_rows), width, dtype=dtype),
        *(meta.ids, meta.slots, meta.starts, meta.lengths),
        *(meta.destination_slots, meta.destination_offsets, meta.emits, spec.drafts),
    )


def cases() -> list[Case]:
    """Every round; an odd width."""
    return copying_cases(_arguments)
