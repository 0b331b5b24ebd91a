"""Shapes, inputs and tolerances of the attention prologue."""

import torch

from inkling_engine.kernels._case_rows import INERT, VERIFIED, Row, Step
from inkling_engine.kernels._cases import Case, normal

_STEPS = {
    "decode": Step(rows=(Row(1, 63), Row(2, 64), INERT, Row(4, 1)), bucket_tokens=4),
    "padded": Step(
        rows=(Row(3, 0, 1), INERT, Row(1, 2, 2), Row(2, 127, 3), Row(4, 0, 3)), bucket_tokens=12
    ),
    "snapshots": Step(
        rows=(
            Row(2, 7, 20, snapshots=((1, 5), (9, 6), (17, 7))),
            Row(1, 62, 3, source=8, snapshots=((2, 9),)),
            Row(3, 0, 8, snapshots=((8, 10),)),
        ),
        bucket_tokens=40,
        page_size=16,
        table_width=6,
    ),
    "verify": VERIFIED,
    "long-ring": Step(
        rows=(
            Row(1, 41, 29, source=9, snapshots=((2, 6), (19, 7))),
            Row(2, 2, 2, source=8, snapshots=((2, 10),)),
            Row(4, 5, 1, source=5),
        ),
        bucket_tokens=36,
        ring=11,
    ),
    "ring": Step(
        rows=(Row(1, 250, 9), Row(2, 600, 1)), bucket_tokens=10, page_size=8, table_width=3
    ),
}


def _case(
    name: str, step: Step, heads: int, kv_heads: int, dim: int, floor: int, dtype: torch.dtype
) -> Case:
    rel, width, tokens = 16, 2 * kv_heads * dim, step.bucket_tokens
    arguments = (
        normal(tokens, heads * dim + width + heads * rel, dtype=dtype),
        normal(width, 4, scale=0.5),
        1 + normal(dim, dtype=dtype, scale=0.1),
        1 + normal(dim, dtype=dtype, scale=0.1, seed=1),
        step.kv(2, kv_heads, dim, dtype),
        step.rings(2, 11, width, dtype),
        step.positions,
        step.token_rows,
        step.locations,
        step.slots,
        step.sources,
        step.starts,
        step.lengths,
        *step.destinations,
        1,
        heads,
        floor,
        0.1,
        1e-6,
    )
    label = f"{name}-{heads}x{dim}-kv{kv_heads}-{str(dtype).removeprefix('torch.')}"
    return Case(label, arguments, tolerance={torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype])


def cases() -> list[Case]:
    """One-token rows, short and resumed rows, snapshots, a ring of pages; with and without tau."""
    return [
        _case(name, step, heads, kv_heads, dim, floor, dtype)
        for name, step in _STEPS.items()
        for heads, kv_heads, dim, floor in ((8, 2, 32, 32), (4, 4, 20, 0))
        for dtype in (torch.float32, torch.bfloat16)
    ]
