"""Metadata of a draft phase as one Triton program: rows in its lanes, then tokens by blocks."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels import table
from inkling_engine.kernels._draft_rows import behind
from inkling_engine.kernels._triton import CompileCase, follow, launchable, launches, meta
from inkling_engine.kernels.step_metadata.triton_kernel import location

BLOCK = 256

LENGTH = tl.constexpr(table.LENGTH)
LAST_TOKEN = tl.constexpr(table.LAST_TOKEN)
FINISH = tl.constexpr(table.FINISH)
STATE_WIDTH = tl.constexpr(table.STATE_WIDTH)


@triton.jit
def row_of(index, upto, ROWS: tl.constexpr):
    """Which row each index [BLOCK] belongs to; `upto` [lanes] is where each row ends."""
    ended = (upto[None, :] <= index[:, None]) & (tl.arange(0, upto.shape[0]) < ROWS)[None, :]
    return tl.sum(ended.to(tl.int32), axis=1)


@triton.jit
def fill_ids(
    first, upto, request_state, recent_tokens, step_tokens, slots, sources, starts, lengths,
    sampled_rows, ids, draft_starts, draft_lengths, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    SLOTS: tl.constexpr, DRAFTS: tl.constexpr, BEHIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Entries first .. first + BLOCK of ids; each row has DRAFTS more of them than tokens."""
    entry = first + tl.arange(0, BLOCK)
    parts = upto + (tl.arange(0, upto.shape[0]) + 1) * DRAFTS
    row = row_of(entry, parts, ROWS)
    within = row < ROWS
    row = tl.where(within, row, 0)
    slot = tl.load(slots + row, mask=within, other=0)
    live = within & (slot > 0)
    known = tl.load(lengths + row, mask=live, other=0)
    begin = tl.load(draft_starts + row, mask=live, other=0) + row * DRAFTS
    position = tl.load(draft_lengths + row, mask=live, other=0) + 1 + entry - begin
    state = request_state + slot.to(tl.int64) * STATE_WIDTH
    end = tl.load(state + LENGTH, mask=live, other=0)
    source = tl.load(sources + row, mask=live, other=0)
    old = live & (position < known) & (source >= 0) & (source < SLOTS)
    recent = recent_tokens + source.to(tl.int64) * DRAFTS + position % DRAFTS
    token = tl.load(recent, mask=old, other=0)
    packed = tl.load(starts + row, mask=live, other=0) + position - known
    fed = live & (position >= known) & (position < end) & (packed < TOKENS)
    token = tl.where(fed, tl.load(step_tokens + packed, mask=fed, other=0), token)
    is_last = live & (position == end)
    is_last = is_last & (tl.load(sampled_rows + row, mask=is_last, other=0) != 0)
    token = tl.where(is_last, tl.load(state + LAST_TOKEN, mask=is_last, other=0), token)
    tl.store(ids + entry, token, mask=entry < TOKENS + ROWS * (BEHIND + DRAFTS))


@triton.jit
def place_rows(
    first, upto, full_table, window_table, slots, starts, lengths, draft_starts, draft_lengths,
    token_rows, positions, hidden_rows, full_locations, window_locations, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, DRAFTS: tl.constexpr, BEHIND: tl.constexpr, FULL_WIDTH: tl.constexpr,
    RING: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows first .. first + BLOCK of the phase."""
    t = first + tl.arange(0, BLOCK)
    within = t < TOKENS + ROWS * BEHIND
    row = row_of(t, upto, ROWS)
    live = within & (row < ROWS)
    row = tl.where(live, row, 0)
    slot = tl.load(slots + row, mask=live, other=0)
    known = tl.load(lengths + row, mask=live, other=0)
    offset = t - tl.load(draft_starts + row, mask=live, other=0)
    position = tl.load(draft_lengths + row, mask=live, other=0) + tl.where(live, offset, 0)
    packed = tl.load(starts + row, mask=live, other=0) + position - known
    hidden = tl.where(position < known, TOKENS + position % DRAFTS, packed)
    tl.store(token_rows + t, row, mask=within)
    tl.store(positions + t, position, mask=within)
    tl.store(hidden_rows + t, tl.where(live, hidden, 0), mask=within)
    full = location(full_table, slot, position + DRAFTS, live, FULL_WIDTH, PAGE_SIZE)
    tl.store(full_locations + t, full, mask=within)
    window = location(window_table, slot, position + DRAFTS, live, RING, PAGE_SIZE)
    tl.store(window_locations + t, window, mask=within)


@triton.jit
def draft_metadata_kernel(
    request_state, full_table, window_table, recent_tokens, step_tokens, slots, sources, starts,
    lengths, destination_slots, destination_offsets, emits, ids, token_rows, positions,
    hidden_rows, full_locations, window_locations, draft_slots, draft_sources, draft_starts,
    draft_lengths, kv_lengths, draft_destination_slots, draft_destination_offsets, frontier_rows,
    draft_emits, sampled_rows, TOKENS: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr,
    SLOTS: tl.constexpr, DRAFTS: tl.constexpr, BEHIND: tl.constexpr, VERIFY: tl.constexpr,
    FULL_WIDTH: tl.constexpr, RING: tl.constexpr, PAGE_SIZE: tl.constexpr,
    DESTINATIONS: tl.constexpr, ROW_LANES: tl.constexpr, DESTINATION_LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    follow()
    row = tl.arange(0, ROW_LANES)
    within = row < ROWS
    slot = tl.load(slots + row, mask=within, other=0)
    live = (slot > 0) & (slot < LINES)
    known = tl.load(lengths + row, mask=live, other=0)
    state = request_state + slot.to(tl.int64) * STATE_WIDTH
    end = tl.load(state + LENGTH, mask=live, other=0)
    finish = tl.load(state + FINISH, mask=live, other=1)
    begin = tl.maximum(known - BEHIND, 0)
    own = tl.where(live, end - begin, 0)
    upto = tl.cumsum(own, axis=0)
    at = row
    if VERIFY:
        at = tl.load(starts + row, mask=live, other=0)
    sampled = live & (tl.load(emits + at, mask=live, other=0) != 0)
    goes_on = sampled & (finish == 0)
    tl.store(draft_slots + row, tl.where(live, slot, 0), mask=within)
    tl.store(draft_sources + row, tl.load(sources + row, mask=live, other=0), mask=within)
    tl.store(draft_starts, 0)
    tl.store(draft_starts + 1 + row, upto, mask=within)
    tl.store(draft_lengths + row, begin, mask=within)
    tl.store(kv_lengths + row, tl.where(live, begin + DRAFTS, 0), mask=within)
    tl.store(frontier_rows + row, tl.where(goes_on, upto - 1, 0), mask=within)
    tl.store(draft_emits + row, goes_on.to(tl.int32), mask=within)
    tl.store(sampled_rows + row, sampled.to(tl.int32), mask=within)

    j = tl.arange(0, DESTINATION_LANES)[None, :]
    cell, mask = row[:, None] * DESTINATIONS + j, live[:, None] & (j < DESTINATIONS)
    target = tl.load(destination_slots + cell, mask=mask, other=0)
    boundary = known[:, None] + tl.load(destination_offsets + cell, mask=mask, other=0)
    passed = mask & (target > 0) & (boundary <= end[:, None])
    mask = within[:, None] & (j < DESTINATIONS)
    tl.store(draft_destination_slots + cell, tl.where(passed, target, 0), mask=mask)
    offset = tl.where(passed, boundary - DRAFTS - begin[:, None], 0)
    tl.store(draft_destination_offsets + cell, offset, mask=mask)
    tl.debug_barrier()  # what other threads wrote of the rows is read now
    for first in range(0, TOKENS + ROWS * (BEHIND + DRAFTS), BLOCK):
        fill_ids(
            first, upto, request_state, recent_tokens, step_tokens, draft_slots, sources, starts,
            lengths, sampled_rows, ids, draft_starts, draft_lengths, TOKENS, ROWS, SLOTS, DRAFTS,
            BEHIND, BLOCK,
        )  # fmt: skip
        place_rows(
            first, upto, full_table, window_table, draft_slots, starts, lengths, draft_starts,
            draft_lengths, token_rows, positions, hidden_rows, full_locations, window_locations,
            TOKENS, ROWS, DRAFTS, BEHIND, FULL_WIDTH, RING, PAGE_SIZE, BLOCK,
        )  # fmt: skip


def draft_metadata(
    request_state: Tensor,
    full_table: Tensor,
    window_table: Tensor,
    recent_tokens: Tensor,
    step_tokens: Tensor,
    slots: Tensor,
    sources: Tensor,
    starts: Tensor,
    lengths: Tensor,
    destination_slots: Tensor,
    destination_offsets: Tensor,
    emits: Tensor,
    page_size: int,
    drafts: int,
    most: int,
) -> tuple[Tensor, ...]:
    """Resolve a draft phase; see the package docstring."""
    tokens, (rows, destinations) = step_tokens.shape[0], destination_slots.shape
    again = behind(drafts, most)
    results = _results(slots, rows, tokens + rows * again, destinations, drafts)
    launchable(draft_metadata_kernel)[(1,)](
        request_state, full_table, window_table, recent_tokens, step_tokens, slots, sources,
        starts, lengths, destination_slots, destination_offsets, emits, *results,
        slots.new_empty(rows), TOKENS=tokens, ROWS=rows, LINES=request_state.shape[0],
        SLOTS=recent_tokens.shape[0], DRAFTS=drafts, BEHIND=again, VERIFY=most > 0,
        FULL_WIDTH=full_table.shape[1], RING=window_table.shape[1], PAGE_SIZE=page_size,
        DESTINATIONS=destinations, ROW_LANES=triton.next_power_of_2(rows),
        DESTINATION_LANES=triton.next_power_of_2(destinations),
        BLOCK=min(BLOCK, triton.next_power_of_2(tokens + rows * (again + drafts))), num_warps=8,
    )  # fmt: skip
    return results


def _results(
    like: Tensor, rows: int, packed: int, destinations: int, drafts: int
) -> tuple[Tensor, ...]:
    """What the op returns, in order."""
    ids = like.new_empty(packed + rows * drafts)
    per_token = [like.new_empty(packed) for _ in range(3)]
    locations = [like.new_empty(packed, dtype=torch.int64) for _ in range(2)]
    per_row = [like.new_empty(rows + extra) for extra in (0, 0, 1, 0, 0)]
    snapshots = [like.new_empty(rows, destinations) for _ in range(2)]
    frontier, emits = like.new_empty(rows), like.new_empty(rows)
    return ids, *per_token, *locations, *per_row, *snapshots, frontier, emits


def compile_cases() -> list[CompileCase]:
    """Verify and extend steps of inkling-small with 8 drafts: 128 slots and 128 snapshots."""
    cases = []
    for rows, tokens, destinations, most in ((1, 9, 1, 9), (8, 72, 1, 9), (8, 2048, 8, 0)):
        shapes = [(129, 8), (129, 2048), (129, 20), (257, 8), (tokens,), (rows,), (rows,)]
        shapes += [(rows + 1,), (rows,), (rows, destinations), (rows, destinations)]
        shapes.append((tokens if most else rows,))
        arguments = [meta(*shape, dtype=torch.int32) for shape in shapes]
        name = f"draft_metadata-{rows}x{tokens}"
        cases += launches(name, draft_metadata, *arguments, 64, 8, most)
    return cases
