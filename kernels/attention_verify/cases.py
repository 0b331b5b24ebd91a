"""Shapes, inputs and tolerances of attention over few tokens a row."""

import torch

from inkling_engine.kernels._case_rows import INERT, Row, Step
from inkling_engine.kernels._cases import Case
from inkling_engine.kernels.attention_extend.cases import BIG, FULL, LOCAL, SMALL, make_case

_RAGGED = (Row(1, 0, 5), Row(5, 60, 9), Row(3, 64, 3), INERT, Row(2, 300, 9), Row(4, 120, 8))
_DRAFTS = (Row(1, 8, 17), Row(3, 340, 9), INERT, Row(2, 70, 17), Row(4, 130, 16), Row(5, 9, 1))
_STEPS = (
    ("rows", Step(_RAGGED, bucket_tokens=40), FULL),
    ("rows", Step(_RAGGED, bucket_tokens=40), LOCAL),
    ("ring", Step((Row(1, 520, 9), Row(2, 185, 8)), 18, table_width=4), LOCAL),
    ("beyond", Step((Row(1, 155, 9), Row(2, 90, 7)), bucket_tokens=16), BIG),
    ("pages", Step((Row(1, 30, 4), Row(2, 7, 9)), 13, page_size=4, table_width=5), SMALL),
    ("splits", Step((Row(1, 4400, 2), Row(2, 300, 9)), 18, table_width=70), BIG),
    ("inert", Step((INERT, INERT), bucket_tokens=18), FULL),
)


def cases() -> list[Case]:
    """Rows of one to nine tokens: lengths at block, window and extent edges, inert rows, rings of
    pages, big heads, many splits. Of up to 17, more than a tile holds, with keys that begin later."""
    dtypes = (torch.float32, torch.bfloat16)
    found = [make_case(*step, dtype, 0, 9) for step in _STEPS for dtype in dtypes]
    drafts = Step(_DRAFTS, bucket_tokens=68)
    shapes = ((shape, dtype) for shape in (FULL, LOCAL, BIG) for dtype in dtypes)
    return found + [make_case("first", drafts, *kind, 8, 17) for kind in shapes]
