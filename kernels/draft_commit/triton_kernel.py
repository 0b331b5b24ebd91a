"""End of a draft phase as one Triton program for each row that is kept, of a slot or a snapshot."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels import table
from inkling_engine.kernels._triton import CompileCase, follow, launchable, launches, meta
from inkling_engine.kernels.rmsnorm.triton_kernel import row_config

DRAFTS_COLUMN = tl.constexpr(table.DRAFTS)
STATE_WIDTH = tl.constexpr(table.STATE_WIDTH)
DRAFT_LIMIT = tl.constexpr(table.DRAFT_LIMIT)


@triton.jit
def draft_commit_kernel(
    request_state, draft_hidden, recent_tokens, request_ints, hidden, ids, slots, starts, lengths,
    destination_slots, destination_offsets, emits, LINES: tl.constexpr, SLOTS: tl.constexpr,
    PACKED: tl.constexpr, ROWS: tl.constexpr, INTS: tl.constexpr, DRAFTS: tl.constexpr,
    DESTINATIONS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The k-th last row and token of a slot, or before a boundary that it has passed."""
    follow()
    k, kept, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + row)
    if (slot <= 0) | (slot >= LINES):
        return
    begin, first = tl.load(starts + row), tl.load(lengths + row)
    target, end = slot, first + tl.load(starts + row + 1) - begin
    if kept > 0:
        cell = row * DESTINATIONS + kept - 1
        target = tl.load(destination_slots + cell)
        end = first + DRAFTS + tl.load(destination_offsets + cell)
    elif k == 0:
        limit = tl.load(request_ints + slot.to(tl.int64) * INTS + DRAFT_LIMIT)
        drafts = tl.where(tl.load(emits + row) != 0, tl.minimum(limit, DRAFTS), 0)
        tl.store(request_state + slot.to(tl.int64) * STATE_WIDTH + DRAFTS_COLUMN, drafts)
    position = end - 1 - k
    at = begin + position - first
    if (target > 0) & (target < SLOTS) & (position >= first) & (at < PACKED):
        entry = target.to(tl.int64) * DRAFTS + position % DRAFTS
        column = tl.arange(0, BLOCK)
        mask = column < WIDTH
        values = tl.load(hidden + at.to(tl.int64) * WIDTH + column, mask=mask, other=0.0)
        tl.store(draft_hidden + entry * WIDTH + column, values, mask=mask)
        known = (position > first) & (k < DRAFTS - 1)
        token = tl.load(ids + at + row * DRAFTS - 1, mask=known, other=0)
        tl.store(recent_tokens + entry, token, mask=known)


def draft_commit(
    request_state: Tensor,
    draft_hidden: Tensor,
    recent_tokens: Tensor,
    request_ints: Tensor,
    hidden: Tensor,
    ids: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    destination_slots: Tensor,
    destination_offsets: Tensor,
    emits: Tensor,
    drafts: int,
) -> None:
    """Store what the next round needs; see the package docstring."""
    (packed, width), (rows, destinations) = hidden.shape, destination_slots.shape
    block, warps = row_config(width)
    launchable(draft_commit_kernel)[(drafts, 1 + destinations, rows)](
        request_state, draft_hidden, recent_tokens, request_ints, hidden, ids, slots, starts,
        lengths, destination_slots, destination_offsets, emits, LINES=request_state.shape[0],
        SLOTS=draft_hidden.shape[0], PACKED=packed, ROWS=rows, INTS=request_ints.shape[1],
        DRAFTS=drafts, DESTINATIONS=destinations, WIDTH=width, BLOCK=block, num_warps=warps,
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """Verify and extend steps of inkling-small with 8 rows and 8 drafts."""
    i32, cases = {"dtype": torch.int32}, []
    for packed, destinations in ((128, 1), (2112, 8)):
        cases += launches(
            f"draft_commit-{packed}", draft_commit, meta(129, 8, **i32), meta(257, 8, 4096),
            meta(257, 8, **i32), meta(129, 52, **i32), meta(packed, 4096),
            meta(packed + 64, **i32), meta(8, **i32), meta(9, **i32), meta(8, **i32),
            meta(8, destinations, **i32), meta(8, destinations, **i32), meta(8, **i32), 8,
        )  # fmt: skip
    return cases
