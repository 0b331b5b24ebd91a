"""Shapes, inputs and tolerances of attention over few tokens a row."""

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
_RAGGED = (Row(1, 0, 5), Row(5, 60, 9), Row(3, 64, 3), INERT, Row(2, 300, 9), Row(4, 120, 8))
_SEVERAL = (
    ("several", Step(_RAGGED, bucket_tokens=40), FULL),
    ("several", Step(_RAGGED, bucket_tokens=40), LOCAL),
    ("several-ring", Step((Row(1, 520, 9), Row(2, 185, 8)), 18, table_width=4), LOCAL),
    ("several-beyond", Step((Row(1, 155, 9), Row(2, 90, 7)), bucket_tokens=16), BIG),
    ("several-pages", Step((Row(1, 30, 4), Row(2, 7, 9)), 13, page_size=4, table_width=5), SMALL),
    ("several-splits", Step((Row(1, 4400, 2), Row(2, 300, 9)), 18, table_width=70), BIG),
    ("several-inert", Step((INERT, INERT), bucket_tokens=18), FULL),
)


def cases() -> list[Case]:
    """Lengths at block, window and extent edges, inert rows, rings of pages, big heads, many splits;
    one token a row and up to nine."""
    dtypes = (torch.float32, torch.bfloat16)
    one = [make_case(*step, dtype, limit=1) for step in _STEPS for dtype in dtypes]
    return one + [make_case(*step, dtype, limit=9) for step in _SEVERAL for dtype in dtypes]
