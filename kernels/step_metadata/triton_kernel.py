"""Metadata of a step: one launch clears the counts of admitted slots, one program does the rest.

The program applies the one-shot lines, then holds all rows in its lanes, then walks the tokens.
What a later part reads was stored by other threads of the program: barriers stand between.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels import table
from inkling_engine.kernels._triton import CompileCase, follow, launchable, launches, meta

CLEAR_BLOCK = 16384
TOKEN_BLOCK = 256

LENGTH = tl.constexpr(table.LENGTH)
LAST_TOKEN = tl.constexpr(table.LAST_TOKEN)
GENERATED = tl.constexpr(table.GENERATED)
FINISH = tl.constexpr(table.FINISH)
DRAFTS_COLUMN = tl.constexpr(table.DRAFTS)
STATE_WIDTH = tl.constexpr(table.STATE_WIDTH)
PROMPT_LENGTH = tl.constexpr(table.PROMPT_LENGTH)
MAX_TOKENS = tl.constexpr(table.MAX_TOKENS)
PROMPT_SEEN = tl.constexpr(table.PROMPT_SEEN)
ADMIT_SLOT = tl.constexpr(table.ADMIT_SLOT)
ADMIT_LENGTH = tl.constexpr(table.ADMIT_LENGTH)
ADMIT_GENERATED = tl.constexpr(table.ADMIT_GENERATED)
ADMIT_HEADER = tl.constexpr(table.ADMIT_HEADER)
FULL_TABLE = tl.constexpr(table.FULL_TABLE)
WINDOW_TABLE = tl.constexpr(table.WINDOW_TABLE)
SAMPLE = tl.constexpr(table.SAMPLE)
FROM_TABLE = tl.constexpr(table.FROM_TABLE)
UPDATE = tl.constexpr(4)  # columns of a page update: table, slot, index, page


@triton.jit
def clear_kernel(
    admit_ints, token_counts, LINES: tl.constexpr, INTS: tl.constexpr, VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Zero a block of the counts of the slot that an admission line names."""
    follow()
    slot = tl.load(admit_ints + tl.program_id(1) * (ADMIT_HEADER + INTS) + ADMIT_SLOT)
    if (slot > 0) & (slot < LINES):
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        line = token_counts + slot.to(tl.int64) * VOCAB
        tl.store(line + token, tl.zeros((BLOCK,), tl.int32), mask=token < VOCAB)


@triton.jit
def copied(
    source, target, live, slot, SKIP: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr
):
    """Copy WIDTH columns, after SKIP, of each live line of `source` to line `slot` of `target`."""
    line, column = tl.arange(0, live.shape[0]), tl.arange(0, LANES)
    mask = live[:, None] & (column < WIDTH)[None, :]
    values = tl.load(source + line[:, None] * (SKIP + WIDTH) + SKIP + column[None, :], mask=mask)
    tl.store(target + slot[:, None].to(tl.int64) * WIDTH + column[None, :], values, mask=mask)


@triton.jit
def apply_lines(
    request_state, request_ints, request_floats, full_table, window_table, snapshot_slots,
    admit_ints, admit_floats, page_updates, snapshot_updates, ROWS: tl.constexpr,
    UPDATES: tl.constexpr, LINES: tl.constexpr, INTS: tl.constexpr, FLOATS: tl.constexpr,
    WAITING: tl.constexpr, FULL_WIDTH: tl.constexpr, RING: tl.constexpr, ROW_LANES: tl.constexpr,
    UPDATE_LANES: tl.constexpr, INT_LANES: tl.constexpr, FLOAT_LANES: tl.constexpr,
    WAITING_LANES: tl.constexpr,
):  # fmt: skip
    """Apply admissions, page updates and snapshot updates, and clear their slots."""
    row = tl.arange(0, ROW_LANES)
    admission = admit_ints + row * (ADMIT_HEADER + INTS)
    slot = tl.load(admission + ADMIT_SLOT, mask=row < ROWS, other=0)
    live = (slot > 0) & (slot < LINES)
    copied(admit_ints, request_ints, live, slot, ADMIT_HEADER, INTS, INT_LANES)
    copied(admit_floats, request_floats, live, slot, 0, FLOATS, FLOAT_LANES)
    length = tl.load(admission + ADMIT_LENGTH, mask=live, other=0)
    generated = tl.load(admission + ADMIT_GENERATED, mask=live, other=0)
    state, zero = request_state + slot.to(tl.int64) * STATE_WIDTH, tl.zeros_like(slot)
    for i in tl.static_range(STATE_WIDTH):
        value = length if i == LENGTH else generated if i == GENERATED else zero
        tl.store(state + i, value, mask=live)
    column = tl.arange(0, WAITING_LANES)
    waiting = snapshot_slots + slot.to(tl.int64)[:, None] * WAITING + column[None, :]
    cleared = live[:, None] & (column < WAITING)[None, :]
    tl.store(waiting, tl.zeros((ROW_LANES, WAITING_LANES), tl.int32), mask=cleared)

    update = tl.arange(0, UPDATE_LANES)
    change = page_updates + update * UPDATE
    owner = tl.load(change + 1, mask=update < UPDATES, other=0)
    changed = (owner > 0) & (owner < LINES)
    kind = tl.load(change, mask=changed, other=0)
    index = tl.load(change + 2, mask=changed, other=0)
    page = tl.load(change + 3, mask=changed, other=0)
    full = changed & (kind == FULL_TABLE) & (index >= 0) & (index < FULL_WIDTH)
    tl.store(full_table + owner.to(tl.int64) * FULL_WIDTH + index, page, mask=full)
    window = changed & (kind == WINDOW_TABLE) & (index >= 0) & (index < RING)
    tl.store(window_table + owner.to(tl.int64) * RING + index, page, mask=window)

    tl.debug_barrier()  # an admission clears a list that a snapshot update then sets
    arrival = snapshot_updates + row * (1 + WAITING)
    target = tl.load(arrival, mask=row < ROWS, other=0)
    arrived = (target > 0) & (target < LINES)
    copied(snapshot_updates, snapshot_slots, arrived, target, 1, WAITING, WAITING_LANES)
    tl.debug_barrier()  # every thread has read the slots
    tl.store(admission + ADMIT_SLOT, zero, mask=live)
    tl.store(change + 1, tl.zeros_like(owner), mask=update < UPDATES)
    tl.store(arrival, zero, mask=arrived)


@triton.jit
def cross_grid(
    snapshot_slots, snapshot_lengths, destination_slots, destination_offsets, live, slot, length,
    count, ROWS: tl.constexpr, SNAPSHOT_LINES: tl.constexpr, WAITING: tl.constexpr,
    GRID: tl.constexpr, DESTINATIONS: tl.constexpr, ROW_LANES: tl.constexpr,
    WAITING_LANES: tl.constexpr, DESTINATION_LANES: tl.constexpr, TAKEN: tl.constexpr,
):  # fmt: skip
    """Destinations of the boundaries in (length, length + count], TAKEN off the slot's list."""
    row, j = tl.arange(0, ROW_LANES), tl.arange(0, DESTINATION_LANES)
    passed = length // GRID
    crossed = (length + count) // GRID - passed
    line = snapshot_slots + slot.to(tl.int64) * WAITING
    waits = (live[:, None]) & (j[None, :] < crossed[:, None]) & (j < WAITING)[None, :]
    target = tl.load(line[:, None] + j[None, :], mask=waits, other=0)
    taken = waits & (j < DESTINATIONS)[None, :] & (target > 0) & (target < SNAPSHOT_LINES)
    boundary = (passed[:, None] + 1 + j[None, :]) * GRID
    cell = row[:, None] * DESTINATIONS + j[None, :]
    within = (row < ROWS)[:, None] & (j < DESTINATIONS)[None, :]
    tl.store(destination_slots + cell, tl.where(taken, target, 0), mask=within)
    passes = taken if TAKEN else live[:, None] & (j[None, :] < crossed[:, None])
    offset = tl.where(passes, boundary - length[:, None], 0)
    tl.store(destination_offsets + cell, offset, mask=within)
    if TAKEN:
        tl.store(snapshot_lengths + target, boundary, mask=taken)
        column = tl.arange(0, WAITING_LANES)
        moved = live[:, None] & (crossed > 0)[:, None] & (column < WAITING)[None, :]
        source = column[None, :] + crossed[:, None]
        left = tl.load(line[:, None] + source, mask=moved & (source < WAITING), other=0)
        tl.debug_barrier()  # the list moves within itself
        tl.store(line[:, None] + column[None, :], left, mask=moved)


@triton.jit
def location(pages, slot, position, live, WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Physical location of a position: logical pages go round the table's width."""
    entry = slot.to(tl.int64) * WIDTH + position // PAGE_SIZE % WIDTH
    page = tl.load(pages + entry, mask=live, other=0)
    return tl.where(live, page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE, 0)


@triton.jit
def place_tokens(
    first, request_state, request_ints, token_counts, full_table, window_table, draft_tokens,
    row_flags, token_ids, tokens, positions, token_rows, full_locations, window_locations, slots,
    starts, lengths, sample_rows, emits, fed_starts, upto, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, LINES: tl.constexpr,
    INTS: tl.constexpr, VOCAB: tl.constexpr, FULL_WIDTH: tl.constexpr, RING: tl.constexpr,
    PAGE_SIZE: tl.constexpr, DRAFTS: tl.constexpr, ROW_LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tokens first .. first + BLOCK of the step; `upto` [ROW_LANES] is where each row ends."""
    t = first + tl.arange(0, BLOCK)
    within = t < TOKENS
    ended = (upto[None, :] <= t[:, None]) & (tl.arange(0, ROW_LANES) < ROWS)[None, :]
    row = tl.sum(ended.to(tl.int32), axis=1)
    live = within & (row < ROWS)
    row = tl.where(live, row, 0)
    slot = tl.load(slots + row, mask=live, other=0)
    offset = t - tl.load(starts + row, mask=live, other=0)
    position = tl.load(lengths + row, mask=live, other=0) + offset
    flags = tl.load(row_flags + row, mask=live, other=0)
    known = live & ((flags & FROM_TABLE) != 0)
    fed_index = tl.load(fed_starts + row, mask=live, other=0) + offset
    fed = live & (known == 0) & (fed_index >= 0) & (fed_index < TOKENS)
    state = request_state + slot.to(tl.int64) * STATE_WIDTH
    token = tl.load(state + LAST_TOKEN, mask=known & (offset == 0), other=0)
    if DRAFTS > 0:
        drafted = known & (offset > 0) & (offset <= DRAFTS)
        guess = draft_tokens + slot.to(tl.int64) * DRAFTS + offset - 1
        token = tl.where(drafted, tl.load(guess, mask=drafted, other=0), token)
        samples = live & ((flags & SAMPLE) != 0)
        tl.store(sample_rows + t, tl.where(samples, t, 0), mask=within)
        tl.store(emits + t, samples.to(tl.int32), mask=within)
    token = tl.where(fed, tl.load(token_ids + fed_index, mask=fed, other=0), token)
    tl.store(tokens + t, token, mask=within)
    tl.store(positions + t, tl.where(live, position, 0), mask=within)
    tl.store(token_rows + t, row, mask=within)
    full = location(full_table, slot, position, live, FULL_WIDTH, PAGE_SIZE)
    tl.store(full_locations + t, full, mask=within)
    window = location(window_table, slot, position, live, RING, PAGE_SIZE)
    tl.store(window_locations + t, window, mask=within)
    counted = fed & (token >= 0) & (token < VOCAB)
    ints = request_ints + slot.to(tl.int64) * INTS
    prompt = position < tl.load(ints + PROMPT_LENGTH, mask=counted, other=0)
    cell = token_counts + slot.to(tl.int64) * VOCAB + token
    seen = tl.zeros_like(token)
    tl.atomic_or(cell, seen + PROMPT_SEEN, mask=counted & prompt, sem="relaxed")
    tl.atomic_add(cell, seen + 1, mask=counted & (prompt == 0), sem="relaxed")


@triton.jit
def metadata_kernel(
    request_state, request_ints, request_floats, token_counts, full_table, window_table,
    snapshot_slots, snapshot_lengths, draft_tokens, row_slots, row_counts, row_sources, row_flags,
    token_ids, admit_ints, admit_floats, page_updates, snapshot_updates, tokens, positions,
    token_rows,
    full_locations, window_locations, slots, sources, starts, lengths, destination_slots,
    destination_offsets, sample_rows, emits, fed_starts, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    UPDATES: tl.constexpr, LINES: tl.constexpr, INTS: tl.constexpr, FLOATS: tl.constexpr,
    VOCAB: tl.constexpr, FULL_WIDTH: tl.constexpr, RING: tl.constexpr, WAITING: tl.constexpr,
    SNAPSHOT_LINES: tl.constexpr, PAGE_SIZE: tl.constexpr, GRID: tl.constexpr,
    DESTINATIONS: tl.constexpr, ROW_LANES: tl.constexpr, UPDATE_LANES: tl.constexpr,
    INT_LANES: tl.constexpr, FLOAT_LANES: tl.constexpr, WAITING_LANES: tl.constexpr,
    DESTINATION_LANES: tl.constexpr, TOKEN_BLOCK: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    follow()
    apply_lines(
        request_state, request_ints, request_floats, full_table, window_table, snapshot_slots,
        admit_ints, admit_floats, page_updates, snapshot_updates, ROWS, UPDATES, LINES, INTS,
        FLOATS, WAITING, FULL_WIDTH, RING, ROW_LANES, UPDATE_LANES, INT_LANES, FLOAT_LANES,
        WAITING_LANES,
    )  # fmt: skip
    row = tl.arange(0, ROW_LANES)
    within = row < ROWS
    slot = tl.load(row_slots + row, mask=within, other=0)
    count = tl.maximum(tl.load(row_counts + row, mask=within, other=0), 0)
    valid = (slot > 0) & (slot < LINES)
    state = request_state + slot.to(tl.int64) * STATE_WIDTH
    finish = tl.load(state + FINISH, mask=valid, other=1)
    live = valid & (count > 0) & (finish == 0)
    length = tl.load(state + LENGTH, mask=live, other=0)
    own, flags = tl.where(live, count, 0), tl.load(row_flags + row, mask=live, other=0)
    samples = live & ((flags & SAMPLE) != 0)
    if DRAFTS > 0:
        guessed = samples & ((flags & FROM_TABLE) != 0)
        limit = request_ints + slot.to(tl.int64) * INTS + MAX_TOKENS
        left = tl.load(limit, mask=guessed, other=0) - 1
        left -= tl.load(state + GENERATED, mask=guessed, other=0)
        valid = tl.load(state + DRAFTS_COLUMN, mask=guessed, other=0)
        own += tl.maximum(tl.minimum(tl.minimum(valid, DRAFTS), left), 0)
    upto = tl.cumsum(own, axis=0)
    slot = tl.where(live, slot, 0)
    source = tl.load(row_sources + row, mask=live, other=0)
    tl.store(slots + row, slot, mask=within)
    tl.store(sources + row, tl.where(source != 0, source, slot), mask=within)
    tl.store(lengths + row, length, mask=within)
    tl.store(starts + 1 + row, upto, mask=within)
    tl.store(starts, 0)
    tl.store(fed_starts + row, tl.cumsum(count, axis=0) - count, mask=within)
    if DRAFTS == 0:
        tl.store(sample_rows + row, tl.where(samples, upto - 1, 0), mask=within)
        tl.store(emits + row, samples.to(tl.int32), mask=within)
    cross_grid(
        snapshot_slots, snapshot_lengths, destination_slots, destination_offsets, live, slot,
        length, own, ROWS, SNAPSHOT_LINES, WAITING, GRID, DESTINATIONS, ROW_LANES, WAITING_LANES,
        DESTINATION_LANES, DRAFTS == 0,
    )  # fmt: skip
    tl.debug_barrier()
    for first in range(0, TOKENS, TOKEN_BLOCK):
        place_tokens(
            first, request_state, request_ints, token_counts, full_table, window_table,
            draft_tokens, row_flags, token_ids, tokens, positions, token_rows, full_locations,
            window_locations, slots, starts, lengths, sample_rows, emits, fed_starts, upto, TOKENS,
            ROWS, LINES, INTS, VOCAB, FULL_WIDTH, RING, PAGE_SIZE, DRAFTS, ROW_LANES, TOKEN_BLOCK,
        )  # fmt: skip


def step_metadata(
    request_state: Tensor,
    request_ints: Tensor,
    request_floats: Tensor,
    token_counts: Tensor,
    full_table: Tensor,
    window_table: Tensor,
    snapshot_slots: Tensor,
    snapshot_lengths: Tensor,
    draft_tokens: Tensor,
    row_slots: Tensor,
    row_counts: Tensor,
    row_sources: Tensor,
    row_flags: Tensor,
    token_ids: Tensor,
    admit_ints: Tensor,
    admit_floats: Tensor,
    page_updates: Tensor,
    snapshot_updates: Tensor,
    page_size: int,
    snapshot_grid: int,
    destinations: int,
    drafts: int,
) -> tuple[Tensor, ...]:
    """Resolve a step; see the package docstring."""
    rows, tokens, updates = row_slots.shape[0], token_ids.shape[0], page_updates.shape[0]
    (lines, ints), floats = request_ints.shape, request_floats.shape[1]
    vocab, waiting = token_counts.shape[1], snapshot_slots.shape[1]
    clear = min(CLEAR_BLOCK, triton.next_power_of_2(vocab))
    launchable(clear_kernel)[(triton.cdiv(vocab, clear), rows)](
        admit_ints, token_counts, LINES=lines, INTS=ints, VOCAB=vocab, BLOCK=clear, num_warps=8
    )
    results = _results(row_slots, rows, tokens, destinations, tokens if drafts else rows)
    lanes = triton.next_power_of_2
    launchable(metadata_kernel)[(1,)](
        request_state, request_ints, request_floats, token_counts, full_table, window_table,
        snapshot_slots, snapshot_lengths, draft_tokens, row_slots, row_counts, row_sources,
        row_flags, token_ids, admit_ints, admit_floats, page_updates, snapshot_updates, *results,
        row_slots.new_empty(rows), ROWS=rows, TOKENS=tokens, UPDATES=updates, LINES=lines,
        INTS=ints, FLOATS=floats, VOCAB=vocab, FULL_WIDTH=full_table.shape[1],
        RING=window_table.shape[1], WAITING=waiting, SNAPSHOT_LINES=snapshot_lengths.shape[0],
        PAGE_SIZE=page_size, GRID=snapshot_grid, DESTINATIONS=destinations, ROW_LANES=lanes(rows),
        UPDATE_LANES=lanes(updates), INT_LANES=lanes(ints), FLOAT_LANES=lanes(floats),
        WAITING_LANES=lanes(waiting), DESTINATION_LANES=lanes(destinations),
        TOKEN_BLOCK=min(TOKEN_BLOCK, lanes(tokens)), DRAFTS=drafts, num_warps=8,
    )  # fmt: skip
    return results


def _results(
    like: Tensor, rows: int, tokens: int, destinations: int, samples: int
) -> tuple[Tensor, ...]:
    """What the op returns, in order."""
    per_token = [like.new_empty(tokens) for _ in range(3)]
    locations = [like.new_empty(tokens, dtype=torch.int64) for _ in range(2)]
    per_row = [like.new_empty(rows + extra) for extra in (0, 0, 1, 0)]
    snapshots = [like.new_empty(rows, destinations) for _ in range(2)]
    return (
        *per_token,
        *locations,
        *per_row,
        *snapshots,
        like.new_empty(samples),
        like.new_empty(samples),
    )


def compile_cases() -> list[CompileCase]:
    """Decode, extend and verify steps of inkling-small: 128 slots, 131,072 tokens of context."""
    cases = []
    for rows, tokens, destinations, drafts in (
        (1, 1, 1, 0),
        (128, 128, 1, 0),
        (8, 2048, 8, 0),
        (8, 72, 1, 8),
    ):
        lines, updates = 129, 2 * (tokens // 64 + 2 * rows)
        tables = [(lines, width) for width in (8, 52, 40, 200058, 2048, 17, 16)]
        row_inputs = [(rows,)] * 4 + [(tokens,)]
        one_shot = [(rows, 56), (rows, 40), (updates, 4), (rows, 17)]
        shapes = [*tables, (lines + 128,), (lines, max(1, drafts)), *row_inputs, *one_shot]
        arguments = [
            meta(*shape, dtype=torch.float32 if i in (2, 15) else torch.int32)
            for i, shape in enumerate(shapes)
        ]
        name = f"step_metadata-{rows}x{tokens}"
        cases += launches(name, step_metadata, *arguments, 64, 256, destinations, drafts)
    return cases
