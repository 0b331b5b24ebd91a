"""Commit of a step as one Triton program that holds all rows in its lanes."""
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
INT_HEADER = tl.constexpr(table.INT_HEADER)
RESULT_HEADER = tl.constexpr(table.RESULT_HEADER)
NOT_FINISHED = tl.constexpr(int(Finish.NONE))
STOPPED = tl.constexpr(int(Finish.STOP))
TOO_LONG = tl.constexpr(int(Finish.LENGTH))
NOT_FINITE = tl.constexpr(int(Finish.NON_FINITE))


@triton.jit
def finish_of(
    ints, token, logprob, generated, emit, STOP_IDS: tl.constexpr, STOP_LANES: tl.constexpr
):
    """Why each row that emits ends, if it does; `ints` are the rows' table lines."""
    stop = tl.arange(0, STOP_LANES)
    mask = emit[:, None] & (stop < STOP_IDS)[None, :]
    ids = tl.load(ints[:, None] + INT_HEADER + stop[None, :], mask=mask, other=0)
    stopped = tl.max((mask & (ids == token[:, None])).to(tl.int32), axis=1) != 0
    limit = tl.load(ints + MAX_TOKENS, mask=emit, other=0)
    finish = tl.where(generated >= limit, TOO_LONG, NOT_FINISHED)
    finish = tl.where(stopped, STOPPED, finish)
    return tl.where(logprob != logprob, NOT_FINITE, finish)  # noqa: PLR0124


@triton.jit
def commit_kernel(
    request_state, token_counts, results_int, results_float, step_counter, request_ints, tokens,
    logprobs, top_tokens, top_logprobs, slots, starts, emits, ROWS: tl.constexpr,
    LINES: tl.constexpr, INTS: tl.constexpr, VOCAB: tl.constexpr, RESULTS: tl.constexpr,
    MAX_ROWS: tl.constexpr, STOP_IDS: tl.constexpr, TOP: tl.constexpr, ROW_LANES: tl.constexpr,
    STOP_LANES: tl.constexpr, TOP_LANES: tl.constexpr,
):  # fmt: skip
    follow()
    row = tl.arange(0, ROW_LANES)
    within = row < ROWS
    slot = tl.load(slots + row, mask=within, other=0)
    live = (slot > 0) & (slot < LINES)
    emit = live & (tl.load(emits + row, mask=within, other=0) != 0)
    token = tl.load(tokens + row, mask=live, other=0)
    logprob = tl.load(logprobs + row, mask=live, other=0.0)
    begin = tl.load(starts + row, mask=live, other=0)
    count = tl.load(starts + row + 1, mask=live, other=0) - begin
    line = slot.to(tl.int64)
    state = request_state + line * STATE_WIDTH
    length = tl.load(state + LENGTH, mask=live, other=0) + count
    generated = tl.load(state + GENERATED, mask=live, other=0) + 1
    finish = tl.load(state + FINISH, mask=live, other=0)
    ended = finish_of(
        request_ints + line * INTS, token, logprob, generated, emit, STOP_IDS, STOP_LANES
    )
    finish = tl.where(emit, ended, finish)
    counted = emit & (token >= 0) & (token < VOCAB)
    cell = token_counts + line * VOCAB + token
    occurrences = tl.load(cell, mask=counted, other=0) + 1
    steps = tl.load(step_counter)
    tl.debug_barrier()  # every thread has read what is overwritten now
    tl.store(state + LENGTH, length, mask=live)
    tl.store(state + LAST_TOKEN, token, mask=emit)
    tl.store(state + GENERATED, generated, mask=emit)
    tl.store(state + FINISH, finish, mask=emit)
    tl.store(cell, occurrences, mask=counted)
    tl.store(step_counter, steps + 1)

    result = (steps % RESULTS) * MAX_ROWS + row
    ints = results_int + result * (RESULT_HEADER + TOP)
    tl.store(ints, tl.where(live, slot, 0), mask=within)
    tl.store(ints + 1, token, mask=within)
    tl.store(ints + 2, finish, mask=within)
    tl.store(ints + 3, length, mask=within)
    floats = results_float + result * (TOP)
    tl.store(floats, logprob, mask=within)
    if TOP > 0:
        place = tl.arange(0, TOP_LANES)
        cell = row[:, None] * TOP + place[None, :]
        mask = live[:, None] & (place < TOP)[None, :]
        best = tl.load(top_tokens + cell, mask=mask, other=0)
        values = tl.load(top_logprobs + cell, mask=mask, other=0.0)
        mask = within[:, None] & (place < TOP)[None, :]
        tl.store(ints[:, None] + RESULT_HEADER + place[None, :], best, mask=mask)
        tl.store(floats[:, None] + place[None, :], values, mask=mask)


def commit(
    request_state: Tensor,
    token_counts: Tensor,
    results_int: Tensor,
    results_float: Tensor,
    step_counter: Tensor,
    request_ints: Tensor,
    tokens: Tensor,
    logprobs: Tensor,
    top_tokens: Tensor,
    top_logprobs: Tensor,
    slots: Tensor,
    starts: Tensor,
    emits: Tensor,
    stop_ids: int,
) -> None:
    """Write the step's results; see the package docstring."""
    rows, top = top_tokens.shape
    (lines, ints), vocab = request_ints.shape, token_counts.shape[1]
    results, max_rows, _ = results_int.shape
    launchable(commit_kernel)[(1,)](
        request_state, token_counts, results_int, results_float, step_counter, request_ints,
        tokens, logprobs, top_tokens, top_logprobs, slots, starts, emits, ROWS=rows, LINES=lines,
        INTS=ints, VOCAB=vocab, RESULTS=results, MAX_ROWS=max_rows, STOP_IDS=stop_ids, TOP=top,
        ROW_LANES=triton.next_power_of_2(rows),
        STOP_LANES=triton.next_power_of_2(max(1, stop_ids)),
        TOP_LANES=triton.next_power_of_2(max(1, top)), num_warps=4,
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """Decode steps of inkling-small: 128 slots, a ring of 16 steps."""
    cases = []
    for rows in (1, 128):
        i32, f32 = {"dtype": torch.int32}, {"dtype": torch.float32}
        cases += launches(
            f"commit-{rows}", commit, meta(129, 4, **i32), meta(129, 200058, **i32),
            meta(16, 128, 24, **i32), meta(16, 128, 21, **f32), meta(4, dtype=torch.int64),
            meta(129, 48, **i32), meta(rows, **i32), meta(rows, **f32), meta(rows, 20, **i32),
            meta(rows, 20, **f32), meta(rows, **i32), meta(rows + 1, **i32), meta(rows, **i32), 8,
        )  # fmt: skip
    return cases
