"""Shapes, inputs and tolerances of prologue and attention over one token a row."""

import torch

from inkling_engine.kernels._case_rows import INERT, Row, Step
from inkling_engine.kernels._cases import Case, normal
from inkling_engine.kernels.attention_extend.cases import BIG, FULL, LOCAL, SMALL, Heads

_ROWS = (Row(1, 0), Row(5, 63), Row(3, 64), INERT, Row(2, 300), Row(4, 127), Row(6, 128))
_SNAPSHOTS = (
    Row(2, 7, snapshots=((1, 5), (0, 6))),
    Row(1, 62, source=8, snapshots=((1, 9),)),
    Row(3, 0, snapshots=((1, 10),)),
)
_STEPS = (
    ("rows", Step(_ROWS, bucket_tokens=7), FULL),
    ("rows", Step(_ROWS, bucket_tokens=7), LOCAL),
    ("ring", Step((Row(1, 520), Row(2, 191)), bucket_tokens=2, table_width=3), LOCAL),
    ("snapshots", Step(_SNAPSHOTS, bucket_tokens=3), LOCAL),
    ("snapshots", Step(_SNAPSHOTS, bucket_tokens=3, page_size=16, table_width=5), FULL),
    ("beyond", Step((Row(1, 200), Row(2, 95), Row(3, 96)), bucket_tokens=3), BIG),
    ("pages", Step((Row(1, 30), Row(2, 7), INERT), 3, page_size=4, table_width=3), SMALL),
    ("splits", Step((Row(1, 4400), Row(2, 300)), bucket_tokens=2, table_width=70), BIG),
    ("inert", Step((INERT,), bucket_tokens=1), FULL),
)


def cases() -> list[Case]:
    """Lengths at block, window and extent edges, inert rows, rings of pages, big heads, many
    splits, snapshots; tau in full layers."""
    dtypes = (torch.float32, torch.bfloat16)
    return [_case(*step, dtype) for step in _STEPS for dtype in dtypes]


def _case(name: str, step: Step, shape: Heads, dtype: torch.dtype) -> Case:
    tokens, dim, kv = step.bucket_tokens, shape.dim, 2 * shape.kv_heads * shape.dim
    arguments = (
        normal(tokens, shape.heads * (dim + shape.rel) + kv, dtype=dtype),
        normal(kv, 4, scale=0.5),
        3 + normal(dim, dtype=dtype, scale=0.1),
        1 + normal(dim, dtype=dtype, scale=0.1, seed=1),
        step.kv(2, shape.kv_heads, dim, dtype),
        step.rings(2, 11, kv, dtype),
        step.positions,
        step.token_rows,
        step.locations,
        step.slots,
        step.sources,
        step.starts,
        step.lengths,
        *step.destinations,
        normal(shape.rel, shape.extent, dtype=dtype, scale=0.5),
        step.page_table,
        1,
        shape.heads,
        shape.window,
        0 if shape.window else 32,
        0.1,
        1e-6,
    )
    label = f"{name}-{shape.heads}x{dim}-w{shape.window}-{str(dtype).removeprefix('torch.')}"
    return Case(label, arguments, tolerance={torch.float32: 1e-5, torch.bfloat16: 8e-3}[dtype])
