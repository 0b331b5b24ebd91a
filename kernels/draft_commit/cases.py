"""Rounds that end. Nothing is computed: results are equal."""

import torch

from inkling_engine.kernels import table
from inkling_engine.kernels._case_drafts import LINES, ROUNDS, SLOTS, Round
from inkling_engine.kernels._cases import Case, normal


def _case(name: str, spec: Round, width: int, dtype: torch.dtype) -> Case:
    meta = spec.meta
    ints = torch.full((LINES, table.INT_HEADER + 3), -7, dtype=torch.int32)
    for row in spec.live:
        ints[row.slot, table.DRAFT_LIMIT] = row.limit
    arguments = (
        spec.state,
        torch.full((SLOTS, spec.drafts, width), torch.nan, dtype=dtype),
        torch.full((SLOTS, spec.drafts), -7, dtype=torch.int32),
        ints,
        normal(len(meta.token_rows), width, dtype=dtype),
        *(meta.ids, meta.slots, meta.starts, meta.lengths),
        *(meta.destination_slots, meta.destination_offsets, meta.emits, spec.drafts),
    )
    return Case(f"{name}-{width}-{str(dtype).removeprefix('torch.')}", arguments, tolerance=0)


def cases() -> list[Case]:
    """Every round; an odd width."""
    return [
        _case(name, spec, width, dtype)
        for name, spec in ROUNDS.items()
        for width, dtype in ((64, torch.bfloat16), (37, torch.float32))
    ]
