"""Shapes, inputs and tolerances of attention over several tokens a row."""

from dataclasses import dataclass

import torch

from inkling_engine.kernels._case_rows import INERT, Row, Step
from inkling_engine.kernels._cases import Case, normal


@dataclass(frozen=True)
class Heads:
    """Geometry of a layer: `window` 0 is full attention."""

    heads: int
    kv_heads: int
    dim: int
    extent: int
    window: int
    rel: int = 16


FULL = Heads(heads=8, kv_heads=2, dim=32, extent=256, window=0)
LOCAL = Heads(heads=8, kv_heads=4, dim=32, extent=128, window=128)
BIG = Heads(heads=8, kv_heads=1, dim=128, extent=96, window=0)
SMALL = Heads(heads=3, kv_heads=1, dim=20, extent=12, window=8, rel=4)


def make_case(
    name: str, step: Step, shape: Heads, dtype: torch.dtype, first: int = 0, *most: int
) -> Case:
    """A call of attention; the pool holds NaN wherever no token may look, as before position
    `first`; `most` for the op of few tokens a row."""
    tokens, pool = step.bucket_tokens, step.kv(2, shape.kv_heads, shape.dim, dtype)
    for position in range(first):
        pages = step.page_table[:, position // step.page_size].long()
        pool[:, pages, :, :, position % step.page_size] = torch.nan
    arguments = (
        normal(tokens, shape.heads, shape.dim, dtype=dtype, scale=3),
        normal(tokens, shape.heads, shape.rel),
        normal(shape.rel, shape.extent, dtype=dtype, scale=0.5),
        pool,
        step.page_table,
        step.slots,
        step.starts,
        step.lengths,
        1,
        shape.window,
        first,
        *most,
    )
    label = f"{name}-{shape.heads}x{shape.dim}-w{shape.window}-{str(dtype).removeprefix('torch.')}"
    return Case(label, arguments, tolerance={torch.float32: 1e-5, torch.bfloat16: 8e-3}[dtype])


_MIXED = (Row(1, 0, 70), Row(4, 290, 20), INERT, Row(3, 63, 1), Row(2, 126, 5), Row(6, 0, 1))
_STEPS = (
    ("mixed", Step(_MIXED, bucket_tokens=112), FULL),
    ("mixed", Step(_MIXED, bucket_tokens=112), LOCAL),
    ("ring", Step((Row(1, 500, 9), Row(2, 127, 66)), bucket_tokens=75, table_width=4), LOCAL),
    ("beyond", Step((Row(2, 150, 17), Row(1, 94, 4)), bucket_tokens=21), BIG),
    ("pages", Step((Row(1, 6, 11), Row(2, 61, 5)), 20, page_size=4, table_width=7), SMALL),
    ("inert", Step((INERT, INERT), bucket_tokens=4), FULL),
)
_DRAFTS = (Row(1, 8, 17), Row(3, 340, 9), INERT, Row(2, 70, 3), Row(4, 130, 1), Row(5, 9, 1))


def cases() -> list[Case]:
    """Full and window layers past extent and window, rings of pages, small pages, big heads, keys
    that begin later."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        found += [make_case(*step, dtype) for step in _STEPS]
        for shape in (FULL, LOCAL):
            step = Step(_DRAFTS, bucket_tokens=34)
            found.append(make_case("first", step, shape, dtype, 8))
    return found
