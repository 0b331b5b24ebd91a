"""Shapes, inputs and tolerances of the head."""

import torch

from inkling_engine.kernels._cases import Case, normal

TOLERANCE = 2e-6  # logits are fp32 in either activation dtype
HIDDEN, VOCAB = 192, 300
_ROWS: dict[
    str, tuple[int, list[int | None]]
] = {  # tokens, then the sampled token of each row or None
    "one": (1, [0]),
    "decode": (4, [0, 1, 2, 3]),
    "mixed": (9, [None, 4, None, 8]),
    "many": (16, list(range(16))),
    "none": (3, [None, None]),
    "last-inert": (5, [0, 4, None]),
}


def cases() -> list[Case]:
    """All, some and no rows emit; tokens that none samples are NaN; the vocabulary is padded."""
    return [
        _case(name, tokens, rows, dtype)
        for name, (tokens, rows) in _ROWS.items()
        for dtype in (torch.float32, torch.bfloat16)
    ]


def _case(name: str, tokens: int, rows: list[int | None], dtype: torch.dtype) -> Case:
    x = torch.full((tokens, HIDDEN), torch.nan, dtype=dtype)
    sampled = [row for row in rows if row is not None]
    x[sampled] = normal(tokens, HIDDEN, dtype=dtype)[sampled]
    weight = normal(VOCAB + 7, HIDDEN, dtype=dtype, scale=HIDDEN**-0.5)
    weight[VOCAB:] = torch.nan
    arguments = (
        x,
        weight,
        torch.tensor([row or 0 for row in rows], dtype=torch.int32),
        torch.tensor([row is not None for row in rows], dtype=torch.int32),
        0.25,
        VOCAB,
    )
    return Case(f"{name}-{str(dtype).removeprefix('torch.')}", arguments, TOLERANCE)
