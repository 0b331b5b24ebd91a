"""Commit of a step as one Triton program that holds all rows, and the tokens of each, in its lanes.

Which token ends a row is the least of the places where something ends it: nothing is walked.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels import table
from inkling_engine.kernels._triton import CompileCase, follow, launchable, launches, meta
from inkling_engine.kernels.table import Finish

LENGTH = tl.constexpr(table.LENGTH)
LAST_TOKEN = tl.constexpr(table.LAST_TOKEN)
GENERATED = tl.constexpr(table.GENERATED)
FINISH = tl.constexpr(table.FINISH)
STATE_WIDTH = tl.constexpr(table.STATE_WIDTH)
MAX_TOKENS = tl.constexpr(table.MAX_TOKENS)
FORCE_ACCEPT = tl.constexpr(table.FORCE_ACCEPT)
INT_HEADER = tl.constexpr(table.INT_HEADER)
RESULT_SLOT = tl.constexpr(table.RESULT_SLOT)
RESULT_COUNT = tl.constexpr(table.RESULT_COUNT)
RESULT_FINISH = tl.constexpr(table.RESULT_FINISH)
RESULT_LENGTH = tl.constexpr(table.RESULT_LENGTH)
RESULT_DRAFTED = tl.constexpr(table.RESULT_DRAFTED)
RESULT_HEADER = tl.constexpr(table.RESULT_HEADER)
TOP_BLOCK = 8192  # top logprobs of all rows that are copied at once

NOT_FINISHED = tl.constexpr(int(Finish.NONE))
STOPPED = tl.constexpr(int(Finish.STOP))
TOO_LONG = tl.constexpr(int(Finish.LENGTH))
NOT_FINITE = tl.constexpr(int(Finish.NON_FINITE))


@triton.jit
def ends_of(ints, tokens, logprobs, generated, mask, STOP_IDS: tl.constexpr):
    """Why each of the tokens [R, N] ends its row, if it does; `ints` [R] are table lines."""
    limit = tl.load(ints + MAX_TOKENS, mask=tl.max(mask.to(tl.int32), axis=1) != 0, other=0)
    ends = tl.where(generated >= limit[:, None], TOO_LONG, NOT_FINISHED)
    for i in tl.static_range(STOP_IDS):
        stop = tl.load(ints[:, None] + INT_HEADER + i, mask=mask, other=0)
        ends = tl.where(tokens == stop, STOPPED, ends)
    return tl.where(logprobs != logprobs, NOT_FINITE, ends)  # noqa: PLR0124


@triton.jit
def leading(is_one, place):
    """How many ones of is_one [R, N] are in front; `place` [1, N] counts from 0."""
    return tl.min(tl.where(is_one, place.shape[1], place), axis=1)


@triton.jit
def at_place(values, place, wanted):
    """The value [R] at place `wanted` [R] of values [R, N]; 0 where there is no such place."""
    return tl.sum(tl.where(place == wanted[:, None], values, 0), axis=1)


@triton.jit
def pass_grid(
    snapshot_slots, snapshot_lengths, destination_slots, destination_offsets, row, slot, live,
    known, length, SNAPSHOT_LINES: tl.constexpr, WAITING: tl.constexpr,
    DESTINATIONS: tl.constexpr, WAITING_LANES: tl.constexpr, DESTINATION_LANES: tl.constexpr,
):  # fmt: skip
    """Record the boundaries in (known, length], and take them off the slot's list."""
    j = tl.arange(0, DESTINATION_LANES)[None, :]
    mask = live[:, None] & (j < DESTINATIONS)
    cell = row[:, None] * DESTINATIONS + j
    offset = tl.load(destination_offsets + cell, mask=mask, other=0)
    passed = mask & (offset > 0) & (known[:, None] + offset <= length[:, None])
    target = tl.load(destination_slots + cell, mask=passed, other=0)
    recorded = passed & (target > 0) & (target < SNAPSHOT_LINES)
    tl.store(snapshot_lengths + target, known[:, None] + offset, mask=recorded)
    count = tl.sum(passed.to(tl.int32), axis=1)[:, None]
    column = tl.arange(0, WAITING_LANES)[None, :]
    line = snapshot_slots + slot.to(tl.int64)[:, None] * WAITING
    moved = live[:, None] & (count > 0) & (column < WAITING)
    left = tl.load(line + column + count, mask=moved & (column + count < WAITING), other=0)
    tl.debug_barrier()  # the list moves within itself
    tl.store(line + column, left, mask=moved)


@triton.jit
def commit_kernel(
    request_state, token_counts, results_int, results_float, step_counter, snapshot_slots,
    snapshot_lengths, request_ints, tokens, logprobs, top_tokens, top_logprobs, step_tokens, slots,
    starts, lengths, emits, destination_slots, destination_offsets, ROWS: tl.constexpr,
    LINES: tl.constexpr, INTS: tl.constexpr, VOCAB: tl.constexpr, RESULTS: tl.constexpr,
    MAX_ROWS: tl.constexpr, STOP_IDS: tl.constexpr, TOP: tl.constexpr, MOST: tl.constexpr,
    DRAFTS: tl.constexpr, SNAPSHOT_LINES: tl.constexpr, WAITING: tl.constexpr,
    DESTINATIONS: tl.constexpr, ROW_LANES: tl.constexpr, MOST_LANES: tl.constexpr,
    TOP_LANES: tl.constexpr, WAITING_LANES: tl.constexpr, DESTINATION_LANES: tl.constexpr,
):  # fmt: skip
    follow()
    row, place = tl.arange(0, ROW_LANES), tl.arange(0, MOST_LANES)[None, :]
    within = row < ROWS
    slot = tl.load(slots + row, mask=within, other=0)
    live = (slot > 0) & (slot < LINES)
    begin = tl.load(starts + row, mask=live, other=0)
    given = tl.load(starts + row + 1, mask=live, other=0) - begin
    first, guessed = row, tl.zeros_like(row)
    if DRAFTS > 0:
        first, guessed = begin, tl.minimum(tl.maximum(given - 1, 0), DRAFTS)
    emit = live & (tl.load(emits + first, mask=live, other=0) != 0)
    line, steps = slot.to(tl.int64), tl.load(step_counter)
    ints, state = request_ints + line * INTS, request_state + line * STATE_WIDTH
    mask = emit[:, None] & (place <= guessed[:, None])
    token = tl.load(tokens + first[:, None] + place, mask=mask, other=0)
    logprob = tl.load(logprobs + first[:, None] + place, mask=mask, other=0.0)
    accepted = tl.zeros_like(row)
    if DRAFTS > 0:
        drafted = emit[:, None] & (place < guessed[:, None])
        guess = tl.load(step_tokens + begin[:, None] + 1 + place, mask=drafted, other=0)
        forced = tl.load(ints + FORCE_ACCEPT, mask=emit, other=0)
        chosen = ((forced - 1) >> (4 * (steps % 2).to(tl.int32))) & 15
        accepted = leading(drafted & (guess == token), place)
        accepted = tl.where(forced != 0, tl.minimum(chosen, guessed), accepted)
        token = tl.where(place < accepted[:, None], guess, token)
    generated = tl.load(state + GENERATED, mask=emit, other=0)
    ends = ends_of(ints, token, logprob, generated[:, None] + 1 + place, mask, STOP_IDS)
    last = tl.minimum(accepted, leading(ends == NOT_FINISHED, place))
    emitted = tl.where(emit, last + 1, 0)
    finish = tl.load(state + FINISH, mask=live, other=0)
    finish = tl.where(emit, at_place(ends, place, last), finish)
    length = tl.load(state + LENGTH, mask=live, other=0)
    if DRAFTS > 0:
        given = tl.where(emit, emitted, given)
    length += given
    kept = place < emitted[:, None]
    counted = kept & (token >= 0) & (token < VOCAB)
    tl.debug_barrier()  # every thread has read what is overwritten now
    tl.store(state + LENGTH, length, mask=live)
    tl.store(state + LAST_TOKEN, at_place(token, place, last), mask=emit)
    tl.store(state + GENERATED, generated + emitted, mask=emit)
    tl.store(state + FINISH, finish, mask=emit)
    one = tl.zeros_like(token) + 1
    tl.atomic_add(token_counts + line[:, None] * VOCAB + token, one, mask=counted, sem="relaxed")
    tl.store(step_counter, steps + 1)
    if DRAFTS > 0:
        pass_grid(
            snapshot_slots, snapshot_lengths, destination_slots, destination_offsets, row, slot,
            live, tl.load(lengths + row, mask=live, other=0), length, SNAPSHOT_LINES, WAITING,
            DESTINATIONS, WAITING_LANES, DESTINATION_LANES,
        )  # fmt: skip

    result = (steps % RESULTS) * MAX_ROWS + row
    out = results_int + result * (RESULT_HEADER + MOST * (1 + TOP))
    tl.store(out + RESULT_SLOT, tl.where(live, slot, 0), mask=within)
    tl.store(out + RESULT_COUNT, emitted, mask=within)
    tl.store(out + RESULT_FINISH, finish, mask=within)
    tl.store(out + RESULT_LENGTH, length, mask=within)
    tl.store(out + RESULT_DRAFTED, guessed, mask=within)
    out = out[:, None] + RESULT_HEADER
    floats = (results_float + result * (MOST * (1 + TOP)))[:, None]
    laid = within[:, None] & (place < MOST)
    tl.store(out + place, tl.where(kept, token, 0), mask=laid)
    tl.store(floats + place, tl.where(kept, logprob, 0.0), mask=laid)
    for i in range(0, MOST * TOP, TOP_LANES):
        column = i + tl.arange(0, TOP_LANES)[None, :]
        cell, known = first[:, None] * TOP + column, column < emitted[:, None] * TOP
        best = tl.load(top_tokens + cell, mask=known, other=0)
        values = tl.load(top_logprobs + cell, mask=known, other=0.0)
        room = within[:, None] & (column < MOST * TOP)
        tl.store(out + MOST + column, best, mask=room)
        tl.store(floats + MOST + column, values, mask=room)


def commit(
    request_state: Tensor,
    token_counts: Tensor,
    results_int: Tensor,
    results_float: Tensor,
    step_counter: Tensor,
    snapshot_slots: Tensor,
    snapshot_lengths: Tensor,
    request_ints: Tensor,
    tokens: Tensor,
    logprobs: Tensor,
    top_tokens: Tensor,
    top_logprobs: Tensor,
    step_tokens: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    emits: Tensor,
    destination_slots: Tensor,
    destination_offsets: Tensor,
    stop_ids: int,
    drafts: int,
) -> None:
    """Write the step's results; see the package docstring."""
    rows, top = slots.shape[0], top_tokens.shape[1]
    (lines, ints), vocab = request_ints.shape, token_counts.shape[1]
    results, max_rows, width = results_float.shape
    most, lanes = width // (1 + top), triton.next_power_of_2
    top_lanes = min(lanes(max(1, most * top)), max(16, TOP_BLOCK // lanes(rows)))
    launchable(commit_kernel)[(1,)](
        request_state, token_counts, results_int, results_float, step_counter, snapshot_slots,
        snapshot_lengths, request_ints, tokens, logprobs, top_tokens, top_logprobs, step_tokens,
        slots, starts, lengths, emits, destination_slots, destination_offsets, ROWS=rows,
        LINES=lines, INTS=ints, VOCAB=vocab, RESULTS=results, MAX_ROWS=max_rows, STOP_IDS=stop_ids,
        TOP=top, MOST=most, DRAFTS=drafts, SNAPSHOT_LINES=snapshot_lengths.shape[0],
        WAITING=snapshot_slots.shape[1], DESTINATIONS=destination_slots.shape[1],
        ROW_LANES=lanes(rows), MOST_LANES=lanes(most), TOP_LANES=top_lanes,
        WAITING_LANES=lanes(snapshot_slots.shape[1]),
        DESTINATION_LANES=lanes(destination_slots.shape[1]), num_warps=4,
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """Decode and verify steps of inkling-small: 128 slots, a ring of 16 steps."""
    cases = []
    for rows, drafts in ((1, 0), (128, 0), (8, 8)):
        i32, f32, most = {"dtype": torch.int32}, {"dtype": torch.float32}, 1 + drafts
        samples = rows * most
        name = f"commit-{rows}" + (f"-verify{drafts}" if drafts else "")
        cases += launches(
            name, commit, meta(129, 8, **i32), meta(129, 200058, **i32),
            meta(16, 128, 5 + 21 * most, **i32), meta(16, 128, 21 * most, **f32),
            meta(4, dtype=torch.int64), meta(129, 16, **i32), meta(257, **i32),
            meta(129, 52, **i32), meta(samples, **i32), meta(samples, **f32),
            meta(samples, 20, **i32), meta(samples, 20, **f32), meta(samples, **i32),
            meta(rows, **i32), meta(rows + 1, **i32), meta(rows, **i32), meta(samples, **i32),
            meta(rows, 1, **i32), meta(rows, 1, **i32), 8, drafts,
        )  # fmt: skip
    return cases
