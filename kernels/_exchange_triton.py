# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
"""The exchange on a GPU (see `_exchange.py`): a launch publishes its part and reads those of all.

Flag i is program i's, and grids are the same on all ranks: a program publishes what the programs of
its number on other ranks read. Each publishes before it waits, and programs start in order, so that no
rank waits for one that cannot begin. One thread polls; what it sees all threads get through shared
memory, for they must leave the loop together. Peers' memory is read past the L1 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from inkling_engine.kernels._conv_triton import LAYER_UNIT, clamp
from inkling_engine.kernels._exchange import (
    CONTROL,
    ERROR,
    FLAGS,
    HEADER,
    LIMIT,
    LIMIT_MS,
    half_words,
)
from inkling_engine.kernels._triton import COMPILED, follow, launchable
from inkling_engine.kernels.rmsnorm.triton_kernel import row_config

_CONTROL, _ERROR, _LIMIT = tl.constexpr(CONTROL), tl.constexpr(ERROR), tl.constexpr(LIMIT)
_HEADER, _LIMIT_MS = tl.constexpr(HEADER), tl.constexpr(LIMIT_MS)
TRIES = tl.constexpr(64)  # polls between two looks at the clock


@triton.jit
def sequence_of(steps, call, CALLS: tl.constexpr):
    """The sequence of `call`, which a kernel is given in LAYER_UNIT."""
    return steps * CALLS + call // LAYER_UNIT + 1


@triton.jit
def part_at(block, sequence, HALF: tl.constexpr, kind: tl.constexpr):
    """Pointer of type `kind` to the half of the block at the address `block`."""
    at = block + (_HEADER + (sequence & 1) * HALF) * 8
    return tl.multiple_of(at.to(kind), 16)


@triton.jit
def nanoseconds(polls):
    """The device's clock; the interpreter has none, there a poll takes a millisecond."""
    if COMPILED:
        return globaltimer()
    return polls.to(tl.int64) * 1000000


@triton.jit
def arrived(exchange, flag, sequence, r):
    """Wait for rank r's `flag`; False, and noted, when time is over."""
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    polls = tl.full((), 0, tl.int32)
    begin = nanoseconds(polls)
    failed = tl.full((), 0, tl.int64)
    while (seen < sequence) & (failed == 0):
        stop = polls + TRIES
        while (seen < sequence) & (polls < stop):
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            polls += 1
        limit = tl.load(exchange + _LIMIT)
        late = nanoseconds(polls) - begin > tl.where(limit == 0, _LIMIT_MS, limit) * 1000000
        missing = tl.where(late & (seen < sequence), r + 1, 0).to(tl.int64)
        failed = tl.atomic_cas(exchange + _ERROR, tl.full((), 0, tl.int64), missing)
    return seen >= sequence


@triton.jit
def meet(peers, exchange, own, sequence, WORLD: tl.constexpr):
    """Publish what the program wrote to its half; a bit for each rank that has given its part."""
    program = tl.program_id(0)
    tl.debug_barrier()  # every thread has written its part
    tl.atomic_xchg(exchange + _CONTROL + program, sequence, sem="release", scope="sys")
    given = tl.full((), 0, tl.int32)
    for r in tl.static_range(WORLD):
        block = tl.where(r == own, exchange.to(tl.int64), tl.load(peers + r))
        if block != 0:
            flag = block.to(tl.pointer_type(tl.int64)) + _CONTROL + program
            given |= arrived(exchange, flag, sequence, r).to(tl.int32) << r
    return given


@triton.jit
def sum_kernel(
    x, peers, exchange, step_counter, rank, y, count, call, CALLS: tl.constexpr,
    WORLD: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """y = the sum of all ranks' x, `count` elements: fp32, in rank order, rounded once."""
    follow()
    own, sequence = tl.load(rank), sequence_of(tl.load(step_counter), call, CALLS)
    kind: tl.constexpr = x.dtype
    mine = part_at(exchange.to(tl.int64), sequence, HALF, kind)
    first, step = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    for i in range(ROUNDS):
        at = first + i * step + tl.arange(0, BLOCK)
        tl.store(mine + at, tl.load(x + at, at < count, other=0.0), at < count)
    given = meet(peers, exchange, own, sequence, WORLD)
    for i in range(ROUNDS):
        at = first + i * step + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for r in tl.static_range(WORLD):
            block = tl.where(r == own, exchange.to(tl.int64), tl.load(peers + r))
            known = at < tl.where((given >> r) & 1 != 0, count, 0)
            part = part_at(block, sequence, HALF, kind) + at
            total += tl.load(part, known, other=0.0, cache_modifier=".cg").to(tl.float32)
        tl.store(y + at, total.to(y.dtype.element_ty), at < count)


@triton.jit
def gather_kernel(
    logits, unsure, peers, exchange, step_counter, rank, whole, count, call, CALLS: tl.constexpr,
    WORLD: tl.constexpr, HALF: tl.constexpr, SAMPLES: tl.constexpr, LANES: tl.constexpr,
    COLUMNS: tl.constexpr, VOCAB: tl.constexpr, ABSENT: tl.constexpr, BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """whole [S, VOCAB] out of the columns [S, COLUMNS] of every rank, `count` elements each. If no
    sample is unsure the ranks only meet, by their first programs: the next call starts behind them."""
    follow()
    own, sequence = tl.load(rank), sequence_of(tl.load(step_counter), call, CALLS)
    lane = tl.arange(0, LANES)
    if tl.max(tl.load(unsure + lane, lane < SAMPLES, other=0), axis=0) == 0:
        if tl.program_id(0) == 0:
            meet(peers, exchange, own, sequence, WORLD)
        return
    kind: tl.constexpr = logits.dtype
    mine = part_at(exchange.to(tl.int64), sequence, HALF, kind)
    first, step = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    for i in range(ROUNDS):
        at = first + i * step + tl.arange(0, BLOCK)
        tl.store(mine + at, tl.load(logits + at, at < count, other=0.0), at < count)
    given = meet(peers, exchange, own, sequence, WORLD)
    for i in range(ROUNDS):
        at = first + i * step + tl.arange(0, BLOCK)
        row, column = (at // COLUMNS).to(tl.int64), at % COLUMNS
        for r in tl.static_range(WORLD):
            block = tl.where(r == own, exchange.to(tl.int64), tl.load(peers + r))
            known = at < tl.where((given >> r) & 1 != 0, count, 0)
            part = part_at(block, sequence, HALF, kind) + at
            values = tl.load(part, known, other=ABSENT, cache_modifier=".cg")
            real = (at < count) & (column < VOCAB - r * COLUMNS)
            tl.store(whole + row * VOCAB + (r * COLUMNS + column), values, real)


@triton.jit
def embed_kernel(
    ids, token_rows, starts, table, peers, exchange, step_counter, rank, y, count, depth, call,
    IDS: tl.constexpr, ROWS: tl.constexpr, DRAFTS: tl.constexpr, DRAFTED: tl.constexpr,
    VOCAB: tl.constexpr, CALLS: tl.constexpr, WORLD: tl.constexpr, HALF: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """y [count, WIDTH] = the tokens' rows of the table that the ranks hold together. Token t is
    ids[t], or if DRAFTED that of draft row t (see `draft_input`); zeros if its rank gives nothing."""
    follow()
    own, sequence = tl.load(rank), sequence_of(tl.load(step_counter), call, CALLS)
    kind: tl.constexpr = table.dtype
    mine = part_at(exchange.to(tl.int64), sequence, HALF, kind)
    column = tl.arange(0, BLOCK)
    for i in range(ROUNDS):
        t = tl.program_id(0) + i * tl.num_programs(0)
        at = t
        if DRAFTED:
            row = clamp(tl.load(token_rows + t, t < count, other=0), 0, ROWS - 1)
            at = tl.minimum(t + row * DRAFTS + depth // LAYER_UNIT, IDS - 1)
        token = tl.load(ids + at, t < count, other=0) - own * VOCAB
        held = (token >= 0) & (token < VOCAB)
        rows = table + clamp(token, 0, VOCAB - 1).to(tl.int64) * WIDTH
        values = tl.load(rows + column, column < tl.where(held, WIDTH, 0), other=0.0)
        to = mine + t.to(tl.int64) * WIDTH
        tl.store(to + column, values, column < tl.where(t < count, WIDTH, 0))
    given = meet(peers, exchange, own, sequence, WORLD)
    for i in range(ROUNDS):
        t = tl.program_id(0) + i * tl.num_programs(0)
        at = t
        live = t < count
        if DRAFTED:
            row = clamp(tl.load(token_rows + t, t < count, other=0), 0, ROWS - 1)
            at = tl.minimum(t + row * DRAFTS + depth // LAYER_UNIT, IDS - 1)
            live = t < tl.load(starts + ROWS)
        owner = clamp(tl.load(ids + at, t < count, other=0) // VOCAB, 0, WORLD - 1)
        block = tl.where(owner == own, exchange.to(tl.int64), tl.load(peers + owner))
        known = live & ((given >> owner) & 1 != 0)
        part = part_at(block, sequence, HALF, kind) + t.to(tl.int64) * WIDTH
        width = tl.where(known, WIDTH, 0)
        values = tl.load(part + column, column < width, other=0.0, cache_modifier=".cg")
        to = y + t.to(tl.int64) * WIDTH
        tl.store(to + column, values, column < tl.where(t < count, WIDTH, 0))


def blocks_of(count: int, largest: int) -> tuple[int, int, int, int]:
    """Elements of a block, warps, programs and blocks of each, for `count` elements."""
    block = 1024 if count <= FLAGS * 1024 else largest
    blocks = max(1, triton.cdiv(count, block))
    programs = min(FLAGS, blocks)
    return block, block // 256, programs, triton.cdiv(blocks, programs)


def summed(
    x: Tensor,
    peers: Tensor,
    exchange: Tensor,
    step_counter: Tensor,
    rank: Tensor,
    call: int,
    calls: int,
    world: int,
) -> Tensor:
    """The sum of all ranks' `x`."""
    y, count = torch.empty_like(x), x.numel()
    block, warps, programs, rounds = blocks_of(count, 4096)
    launchable(sum_kernel)[(programs,)](
        x, peers, exchange, step_counter, rank, y, count, LAYER_UNIT.value * call, CALLS=calls,
        WORLD=world, HALF=half_words(exchange.shape[0]), BLOCK=block, ROUNDS=rounds,
        num_warps=warps, num_stages=1,
    )  # fmt: skip
    return y


def embedded(
    ids: Tensor,
    rows: tuple[Tensor, Tensor] | None,
    count: int,
    table: Tensor,
    ranks: tuple[Tensor, Tensor, Tensor, Tensor],
    depth: int,
    drafts: int,
    call: int,
    calls: int,
    world: int,
) -> Tensor:
    """Rows [count, H] of the table of which `table` [V, H] is this rank's part, for the tokens `ids`,
    or if `rows` (token_rows, starts) are given those of draft rows. `ranks`: peers, exchange,
    step_counter, rank."""
    vocab, width = table.shape
    y = table.new_empty(count, width)
    block, warps = row_config(width)
    programs = min(FLAGS, count)
    token_rows, starts = rows or (ids, ids)
    launchable(embed_kernel)[(programs,)](
        ids, token_rows, starts, table, *ranks, y, count, LAYER_UNIT.value * depth,
        LAYER_UNIT.value * call, IDS=ids.shape[0], ROWS=starts.shape[0] - 1, DRAFTS=drafts,
        DRAFTED=rows is not None, VOCAB=vocab, CALLS=calls, WORLD=world,
        HALF=half_words(ranks[1].shape[0]), WIDTH=width, BLOCK=block,
        ROUNDS=triton.cdiv(count, programs), num_warps=warps, num_stages=1,
    )  # fmt: skip
    return y
