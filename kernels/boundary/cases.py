"""Shapes, inputs and tolerances of the boundary."""

import torch

from inkling_engine.kernels._case_rows import INERT, VERIFIED, Row, Step
from inkling_engine.kernels._cases import Case, Ranks, normal

_STEPS = {
    "decode": Step(rows=(Row(1, 9), INERT, Row(3, 1), Row(2, 300)), bucket_tokens=4),
    "inert": Step(rows=(INERT, INERT), bucket_tokens=2),
    "padded": Step(rows=(Row(1, 0, 1), Row(2, 5, 2), INERT, Row(3, 1, 3)), bucket_tokens=9),
    "snapshots": Step(
        rows=(
            Row(1, 3, 17, snapshots=((1, 5), (2, 6), (17, 7))),
            Row(4, 8, 2, source=9, snapshots=((1, 8),)),
            Row(2, 0, 11, snapshots=((3, 10), (11, 11))),
        ),
        bucket_tokens=32,
    ),
    "verify": VERIFIED,
    "long-ring": Step(
        rows=(
            Row(1, 41, 29, source=9, snapshots=((2, 6), (19, 7))),
            Row(2, 2, 2, source=8, snapshots=((2, 10),)),
            Row(3, 0, 12),
            Row(4, 5, 1, source=11),
        ),
        bucket_tokens=48,
        ring=11,
    ),
    "long-ring-decode": Step(
        rows=(Row(1, 9), INERT, Row(3, 1, source=8), Row(2, 300)), bucket_tokens=4, ring=5
    ),
    "crowded": Step(
        rows=(Row(1, 3, 4, snapshots=((2, 5),)), INERT, Row(2, 1, 2), INERT, INERT, INERT, INERT),
        bucket_tokens=7,
    ),
    "crowded-long-ring": Step(
        rows=(Row(1, 3, 4), INERT, Row(2, 1, 2, source=8), INERT, INERT, INERT, INERT),
        bucket_tokens=7,
        ring=6,
    ),
    "strips": Step(
        rows=(Row(1, 3, 270, snapshots=((2, 5),)), INERT, Row(2, 0, 30)), bucket_tokens=310
    ),
    "strips-long-ring": Step(
        rows=(Row(1, 41, 8), Row(4, 8, 262, source=9, snapshots=((4, 6),)), INERT),
        bucket_tokens=275,
        ring=11,
    ),
    "swapped": Step(rows=(Row(1, 4, 2, source=2), Row(2, 6, 5, source=1)), bucket_tokens=8),
}
ALONE = Ranks()


def _case(name: str, step: Step, width: int, dtype: torch.dtype, ranks: Ranks = ALONE) -> Case:
    arguments = (
        normal(step.bucket_tokens, width, dtype=dtype),
        normal(step.bucket_tokens, width, dtype=dtype, seed=1),
        normal(width, 4, scale=0.5),
        1 + normal(width, dtype=dtype, scale=0.1),
        step.rings(3, 12, width, dtype),
        step.token_rows,
        step.slots,
        step.sources,
        step.starts,
        step.lengths,
        *step.destinations,
        *ranks.tensors,
        *(1, 3, 7, 1e-6, ranks.world),
    )
    label = f"{name}-{width}-{str(dtype).removeprefix('torch.')}"
    return Case(label, arguments, tolerance={torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype])


def cases() -> list[Case]:
    """Inert, short, resumed and snapshotting rows; more tokens in some than rows; rows that start from
    each other's slots; a rank whose peers are absent."""
    alone = [
        _case(name, step, width, dtype)
        for name, step in _STEPS.items()
        for width in ((192, 37) if step.bucket_tokens < 256 else (37,))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    absent = [
        _case(f"{name}-rank", _STEPS[name], 192, dtype, Ranks(4, 2))
        for name in ("decode", "padded", "crowded", "crowded-long-ring")
        for dtype in (torch.float32, torch.bfloat16)
    ]
    return alone + absent
