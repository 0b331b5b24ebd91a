"""Shapes, inputs and tolerances of a draft depth's input."""

import torch

from inkling_engine.kernels._case_drafts import ROUNDS, VOCAB
from inkling_engine.kernels._cases import Case, Ranks, normal

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 8e-3}


def _case(
    name: str, depth: int, width: int, dtype: torch.dtype, ranks: int = 1, backbone: bool = True
) -> Case:
    spec = ROUNDS[name]
    meta = spec.meta
    norms = [1 + normal(width, dtype=dtype, scale=0.1, seed=seed) for seed in range(3)]
    arguments = (
        normal(len(meta.token_rows), width, dtype=dtype),
        meta.ids,
        normal(VOCAB // ranks, width, dtype=dtype),
        *norms,
        *(meta.token_rows, meta.starts),
        *Ranks(ranks, 1 if ranks > 1 else 0).tensors,
        *(depth, spec.drafts, 3, 7, 1e-6, ranks, backbone),
    )
    kind = str(dtype).removeprefix("torch.")
    label = f"{name}-{depth}-{width}-{kind}" + ("" if backbone else "-plain")
    return Case(label, arguments, TOLERANCES[dtype])


def cases() -> list[Case]:
    """First and last depths, odd widths, a rank's part of the vocabulary, no backbone norm."""
    bf16, f32 = torch.bfloat16, torch.float32
    return [
        _case("verify", 0, 192, bf16),
        _case("verify", 2, 37, f32),
        _case("extend", 0, 37, f32),
        _case("extend", 3, 192, bf16),
        _case("extend", 1, 192, bf16, backbone=False),
        _case("one-draft", 0, 64, f32, backbone=False),
        _case("verify-one", 7, 64, bf16, ranks=5),
        _case("inert", 1, 64, f32),
    ]
