"""Shapes, inputs and tolerances of attention over one token a row."""

import torch

from inkling_engine.kernels._case_rows import INERT, Row, Step
from inkling_engine.kernels._cases import Case
from inkling_engine.kernels.attention_extend.cases import BIG, FULL, LOCAL, SMALL, make_case

_ROWS = (Row(1, 0), Row(5, 63), Row(3, 64), INERT, Row(2, 300), Row(4, 127), Row(6, 128))
_STEPS = (
    ("rows", Step(_ROWS, bucket_tokens=7), FULL),
    ("rows", Step(_ROWS, bucket_tokens=7), LOCAL),
    ("ring", Step((Row(1, 520), Row(2, 191)), bucket_tokens=2, table_width=3), LOCAL),
    ("beyond", Step((Row(1, 200), Row(2, 95), Row(3, 96)), bucket_tokens=3), BIG),
    ("pages", Step((Row(1, 30), Row(2, 7), INERT), 3, page_size=4, table_width=3), SMALL),
    ("splits", Step((Row(1, 4400), Row(2, 300)), bucket_tokens=2, table_width=70), BIG),
    ("inert", Step((INERT,), bucket_tokens=1), FULL),
)


def cases() -> list[Case]:
    """Lengths at block, window and extent edges, inert rows, rings of pages, big heads, many splits."""
    dtypes = (torch.float32, torch.bfloat16)
    return [make_case(*step, dtype) for step in _STEPS for dtype in dtypes]
