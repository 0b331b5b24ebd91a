# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
"""Launches that exchange and do nothing else: sums, and rows of an embedding.

Each has a form for parts that fit into a slot and one for larger parts, a sum two: of two ranks, and of
more (`_exchange_triton.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels._conv_triton import LAYER_UNIT, clamp
from inkling_engine.kernels._exchange import FLAGS, WORD, half_words, slot_words
from inkling_engine.kernels._exchange_poll import VECTOR
from inkling_engine.kernels._exchange_triton import (
    blocks_of,
    given_by,
    meet,
    part_at,
    publish,
    push,
    sequence_of,
    total,
)
from inkling_engine.kernels._triton import follow, launchable
from inkling_engine.kernels.rmsnorm.triton_kernel import row_config

MOST_PIECES = 4  # of a sum; each is a phase


@triton.jit
def push_sum_kernel(
    x, peers, exchange, step_counter, rank, y, count, call, CALLS: tl.constexpr,
    WORLD: tl.constexpr, HALF: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = the sum of all ranks' x, `count` elements that fit into a slot: fp32, in rank order, rounded once."""
    own, sequence = tl.load(rank), sequence_of(tl.load(step_counter), call, CALLS)
    follow()
    first = tl.program_id(0) * BLOCK
    at, width = first + tl.arange(0, BLOCK), tl.minimum(count - first, BLOCK)
    values = tl.load(x + at, at < count, other=0.0)
    push(values, first, width, peers, own, sequence, WORLD, HALF, SLOT)
    found = total(values, first, width, peers, exchange, own, sequence, WORLD, HALF, SLOT)
    tl.store(y + at, found.to(y.dtype.element_ty), at < count)


@triton.jit
def pulled_sum(
    x, peers, own, sequence, given, at, count, WORLD: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """fp32 sum in rank order of the elements `at` of `x` and of the parts of those that have `given`."""
    found = tl.zeros(at.shape, tl.float32)
    for r in tl.static_range(WORLD):
        block = tl.where(r == own, x.to(tl.int64), tl.load(peers + r))
        part = tl.where(r == own, x, part_at(block, sequence, HALF, x.dtype))
        known = at < tl.where((given >> r) & 1 != 0, count, 0)
        found += tl.load(part + at, known, other=0.0, cache_modifier=".cg").to(tl.float32)
    return found


@triton.jit
def crossed_sum_kernel(
    x, peers, exchange, step_counter, rank, y, count, call, CALLS: tl.constexpr,
    WORLD: tl.constexpr, HALF: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """y = the sum of two ranks' x, `count` elements: fp32, in rank order, rounded once. Each writes its
    part into the other's half, and a piece of ROUNDS blocks before it sums the one ahead of it."""
    follow()
    own, sequence = tl.load(rank), sequence_of(tl.load(step_counter), call, CALLS)
    block = tl.load(peers + clamp(1 - own, 0, 1))
    mine = part_at(exchange.to(tl.int64), sequence, HALF, x.dtype)
    theirs = part_at(tl.where(block == 0, exchange.to(tl.int64), block), sequence, HALF, x.dtype)
    step = tl.num_programs(0) * BLOCK
    for piece in range(PIECES + 1):
        first = tl.program_id(0) * BLOCK + piece * ROUNDS * step
        if piece < PIECES:
            for i in range(ROUNDS):
                at = first + i * step + tl.arange(0, BLOCK)
                tl.store(theirs + at, tl.load(x + at, at < count, other=0.0), at < count)
            publish(exchange, sequence, piece)
        if piece > 0:
            known = tl.full((), 0, tl.int32)
            if block != 0:
                given = given_by(exchange, block, sequence, piece - 1, 1 - own)
                known = tl.where(given, count, 0)
            for i in range(-ROUNDS, 0):
                at = first + i * step + tl.arange(0, BLOCK)
                found = tl.load(x + at, at < count, other=0.0).to(tl.float32) + 0.0
                found += tl.load(mine + at, at < known, other=0.0, cache_modifier=".cg").to(
                    tl.float32
                )
                tl.store(y + at, found.to(y.dtype.element_ty), at < count)


@triton.jit
def scatter_sum_kernel(
    x, peers, exchange, step_counter, rank, y, count, call, CALLS: tl.constexpr,
    WORLD: tl.constexpr, HALF: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """The sum of many ranks: each sums a segment and leaves it where its own part of it was, where the
    others fetch it. A segment whose rank gives nothing is summed by all."""
    follow()
    own, sequence = tl.load(rank), sequence_of(tl.load(step_counter), call, CALLS)
    mine = part_at(exchange.to(tl.int64), sequence, HALF, x.dtype)
    segment = tl.cdiv(count, WORLD * BLOCK) * BLOCK
    first, step = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    for i in range(ROUNDS * WORLD):
        begin = first + i // WORLD * step
        at = i % WORLD * segment + begin + tl.arange(0, BLOCK)
        end = tl.where(begin < segment, count, 0)
        tl.store(mine + at, tl.load(x + at, at < end, other=0.0), at < end)
    given = meet(peers, exchange, own, sequence, WORLD)
    for i in range(ROUNDS):
        begin = first + i * step
        at = own * segment + begin + tl.arange(0, BLOCK)
        end = tl.where(begin < segment, count, 0)
        found = pulled_sum(x, peers, own, sequence, given, at, end, WORLD, HALF)
        tl.store(mine + at, found.to(y.dtype.element_ty), at < end)
        tl.store(y + at, found.to(y.dtype.element_ty), at < end)
    summed = meet(peers, exchange, own, sequence, WORLD, 1)
    for i in range(ROUNDS * WORLD):
        of, begin = i % WORLD, first + i // WORLD * step
        at = of * segment + begin + tl.arange(0, BLOCK)
        end = tl.where((begin < segment) & (of != own), count, 0)
        if (summed >> of) & 1 != 0:
            ready = part_at(tl.load(peers + of), sequence, HALF, x.dtype) + at
            found = tl.load(ready, at < end, other=0.0, cache_modifier=".cg")
        else:
            found = pulled_sum(x, peers, own, sequence, given, at, end, WORLD, HALF).to(
                y.dtype.element_ty
            )
        tl.store(y + at, found, at < end)


@triton.jit
def token_at(
    ids, token_rows, t, count, depth, IDS: tl.constexpr, ROWS: tl.constexpr, DRAFTS: tl.constexpr,
    DRAFTED: tl.constexpr,
):  # fmt: skip
    """Token t of a step: ids[t], or if DRAFTED that of draft row t (see `draft_input`)."""
    at = t
    if DRAFTED:
        row = clamp(tl.load(token_rows + t, t < count, other=0), 0, ROWS - 1)
        at = tl.minimum(t + row * DRAFTS + depth // LAYER_UNIT, IDS - 1)
    return tl.load(ids + at, t < count, other=0)


@triton.jit
def push_embed_kernel(
    ids, token_rows, starts, table, peers, exchange, step_counter, rank, y, count, depth, call,
    IDS: tl.constexpr, ROWS: tl.constexpr, DRAFTS: tl.constexpr, DRAFTED: tl.constexpr,
    VOCAB: tl.constexpr, CALLS: tl.constexpr, WORLD: tl.constexpr, HALF: tl.constexpr,
    SLOT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`embed_kernel` of rows that fit into a slot: the sum of what the ranks have of a token's row."""
    follow()
    own, sequence = tl.load(rank), sequence_of(tl.load(step_counter), call, CALLS)
    t, column = tl.program_id(0), tl.arange(0, BLOCK)
    mask = column < WIDTH
    token = token_at(ids, token_rows, t, count, depth, IDS, ROWS, DRAFTS, DRAFTED) - own * VOCAB
    held = (token >= 0) & (token < VOCAB)
    if DRAFTED:
        held = held & (t < tl.load(starts + ROWS))
    row = table + clamp(token, 0, VOCAB - 1).to(tl.int64) * WIDTH
    values = tl.load(row + column, column < tl.where(held, WIDTH, 0), other=0.0)
    first = t * WIDTH
    push(values, first, WIDTH, peers, own, sequence, WORLD, HALF, SLOT)
    found = total(values, first, WIDTH, peers, exchange, own, sequence, WORLD, HALF, SLOT)
    tl.store(y + first + column, found.to(y.dtype.element_ty), mask)


@triton.jit
def embed_kernel(
    ids, token_rows, starts, table, peers, exchange, step_counter, rank, y, count, depth, call,
    IDS: tl.constexpr, ROWS: tl.constexpr, DRAFTS: tl.constexpr, DRAFTED: tl.constexpr,
    VOCAB: tl.constexpr, CALLS: tl.constexpr, WORLD: tl.constexpr, HALF: tl.constexpr,
    SLOT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
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
        token = token_at(ids, token_rows, t, count, depth, IDS, ROWS, DRAFTS, DRAFTED) - own * VOCAB
        held = (token >= 0) & (token < VOCAB)
        rows = table + clamp(token, 0, VOCAB - 1).to(tl.int64) * WIDTH
        values = tl.load(rows + column, column < tl.where(held, WIDTH, 0), other=0.0)
        to = mine + t.to(tl.int64) * WIDTH
        tl.store(to + column, values, column < tl.where(t < count, WIDTH, 0))
    given = meet(peers, exchange, own, sequence, WORLD)
    for i in range(ROUNDS):
        t = tl.program_id(0) + i * tl.num_programs(0)
        token = token_at(ids, token_rows, t, count, depth, IDS, ROWS, DRAFTS, DRAFTED)
        live = t < count
        if DRAFTED:
            live = t < tl.load(starts + ROWS)
        owner = clamp(token // VOCAB, 0, WORLD - 1)
        block = tl.where(owner == own, exchange.to(tl.int64), tl.load(peers + owner))
        known = live & ((given >> owner) & 1 != 0)
        part = part_at(block, sequence, HALF, kind) + t.to(tl.int64) * WIDTH
        width = tl.where(known, WIDTH, 0)
        values = tl.load(part + column, column < width, other=0.0, cache_modifier=".cg")
        to = y + t.to(tl.int64) * WIDTH
        tl.store(to + column, values, column < tl.where(t < count, WIDTH, 0))


Ranks = tuple[Tensor, Tensor, Tensor, Tensor]  # peers, exchange, step_counter, rank


def pushed(part: Tensor, exchange: Tensor, world: int) -> bool:
    """Whether a part [T, H] fits into a slot, and its rows are whole vectors, as a thread takes them."""
    words, size = exchange.shape[0], part.nbytes
    assert size <= WORD * half_words(words, world), f"a part of {size} bytes"
    whole = part.shape[1] * part.itemsize % VECTOR.value == 0
    return whole and size <= WORD * slot_words(words, world)


def layout(exchange: Tensor, calls: int, world: int) -> dict[str, int]:
    """What kernels are told of the block, and of how many calls a step has."""
    words = exchange.shape[0]
    half, slot = half_words(words, world), slot_words(words, world)
    return {"CALLS": calls, "WORLD": world, "HALF": half, "SLOT": slot}


def summed(x: Tensor, ranks: Ranks, call: int, calls: int, world: int) -> Tensor:
    """The sum of all ranks' `x`."""
    y, count = torch.empty_like(x), x.numel()
    arguments = x, *ranks, y, count, LAYER_UNIT.value * call
    known = layout(ranks[1], calls, world)
    if pushed(x, ranks[1], world):
        block = 1024 if count <= 132 * 1024 else 2048
        launchable(push_sum_kernel)[(triton.cdiv(count, block),)](
            *arguments, **known, BLOCK=block, num_warps=block // 256, num_stages=1
        )
        return y
    if world > 2:  # what each rank reads of the others is less in segments
        block, warps, programs, rounds = blocks_of(count // world, 4096)
        launchable(scatter_sum_kernel)[(programs,)](
            *arguments, **known, BLOCK=block, ROUNDS=rounds, num_warps=warps, num_stages=1
        )
        return y
    # 4096 x 4096 takes 104 us in four pieces, 107 in eight of half the blocks; its writes alone take 94
    block, warps, programs, rounds = blocks_of(count, 16384 if count > FLAGS * 32768 else 8192)
    each = triton.cdiv(rounds, MOST_PIECES)
    pieces = triton.cdiv(rounds, each)
    launchable(crossed_sum_kernel)[(programs,)](
        *arguments,
        **known,
        BLOCK=block,
        ROUNDS=each,
        PIECES=pieces,
        num_warps=warps,
        num_stages=1,
    )
    return y


def embedded(
    ids: Tensor,
    rows: tuple[Tensor, Tensor] | None,
    count: int,
    table: Tensor,
    ranks: Ranks,
    depth: int,
    drafts: int,
    call: int,
    calls: int,
    world: int,
) -> Tensor:
    """Rows [count, H] of the table of which `table` [V, H] is this rank's part, for the tokens `ids`,
    or if `rows` (token_rows, starts) are given those of draft rows."""
    vocab, width = table.shape
    y = table.new_empty(count, width)
    block, warps = row_config(width)
    token_rows, starts = rows or (ids, ids)
    unit = LAYER_UNIT.value
    arguments = ids, token_rows, starts, table, *ranks, y, count, unit * depth, unit * call
    known: dict[str, int] = {
        **layout(ranks[1], calls, world),
        "IDS": ids.shape[0],
        "ROWS": starts.shape[0] - 1,
        "DRAFTS": drafts,
        "DRAFTED": rows is not None,
        "VOCAB": vocab,
        "WIDTH": width,
        "BLOCK": block,
    }
    if pushed(y, ranks[1], world):
        launchable(push_embed_kernel)[(count,)](*arguments, **known, num_warps=warps, num_stages=1)
        return y
    programs = min(FLAGS, count)
    launchable(embed_kernel)[(programs,)](
        *arguments, **known, ROUNDS=triton.cdiv(count, programs), num_warps=warps, num_stages=1
    )
    return y
