"""Target hidden states of a draft phase as one Triton program a row."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels._triton import CompileCase, follow, launchable, launches, meta
from inkling_engine.kernels.rmsnorm.triton_kernel import row_config


@triton.jit
def draft_gather_kernel(
    hidden, draft_hidden, token_rows, hidden_rows, sources, starts, gathered, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, DRAFTS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    follow()
    i = tl.program_id(0).to(tl.int64)
    live = i < tl.load(starts + ROWS)
    row = tl.minimum(tl.maximum(tl.load(token_rows + i), 0), ROWS - 1)
    slot = tl.minimum(tl.maximum(tl.load(sources + row), 0), SLOTS - 1).to(tl.int64)
    entry = tl.minimum(tl.maximum(tl.load(hidden_rows + i), 0), TOKENS + DRAFTS - 1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask, stashed = (column < WIDTH) & live, entry >= TOKENS
    stash = draft_hidden + (slot * DRAFTS + entry - TOKENS) * WIDTH + column
    values = tl.load(stash, mask=mask & stashed, other=0.0)
    new = tl.load(hidden + entry * WIDTH + column, mask=mask & (entry < TOKENS), other=0.0)
    tl.store(gathered + i * WIDTH + column, tl.where(stashed, values, new), mask=column < WIDTH)


def draft_gather(
    hidden: Tensor,
    draft_hidden: Tensor,
    token_rows: Tensor,
    hidden_rows: Tensor,
    sources: Tensor,
    starts: Tensor,
) -> Tensor:
    """Collect hidden states; see the package docstring."""
    (slots, drafts, width), count = draft_hidden.shape, token_rows.shape[0]
    gathered = hidden.new_empty(count, width)
    block, warps = row_config(width)
    launchable(draft_gather_kernel)[(count,)](
        hidden, draft_hidden, token_rows, hidden_rows, sources, starts, gathered,
        TOKENS=hidden.shape[0], ROWS=sources.shape[0], SLOTS=slots, DRAFTS=drafts, WIDTH=width,
        BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return gathered


def compile_cases() -> list[CompileCase]:
    """A verify step of inkling-small: 8 rows, 8 drafts."""
    i32 = {"dtype": torch.int32}
    return launches(
        "draft_gather", draft_gather, meta(72, 4096), meta(257, 8, 4096), meta(128, **i32),
        meta(128, **i32), meta(8, **i32), meta(9, **i32),
    )  # fmt: skip
