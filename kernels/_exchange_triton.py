# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
"""The exchange inside a kernel (see `_exchange.py`): parts that are pushed, and parts that are pulled.

A small part is pushed: written into the other ranks' slots, where each element tells by its bits
that it has come. So a receiver polls memory of its own, and there is no flag and no fence between. It
zeroes what it has taken. Whoever pushes call s + 2 has had all ranks' call s + 1, which they
gave in a launch after that which zeroed call s: two slots a rank are enough.

A large part stays at home and is pulled, but for a sum's of two ranks. Flag i is program i's, and grids are the same on all ranks: a
program publishes what the programs of its number on other ranks read. A flag is PHASES * sequence + phase:
a program may publish its part piece by piece, a piece a phase. One thread polls; what it sees all threads
get through shared memory, for they must leave the loop together. Peers' memory is read past the L1 cache.

A large part of a sum of two ranks is written into the other's half, and published likewise: stores fill a
link better than loads. Who writes call s + 2 has had call s + 1 of the other, which has then read s.

In all forms a program gives before it waits, and programs start in order, so that no rank waits for one
that cannot begin. Nothing is given before `follow()`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from inkling_engine.kernels._conv_triton import LAYER_UNIT
from inkling_engine.kernels._exchange import CONTROL, ERROR, FLAGS, HEADER, LIMIT, LIMIT_MS, PHASES
from inkling_engine.kernels._exchange_poll import TRIES, awaited
from inkling_engine.kernels._triton import COMPILED, follow

_CONTROL, _ERROR, _LIMIT = tl.constexpr(CONTROL), tl.constexpr(ERROR), tl.constexpr(LIMIT)
_HEADER, _LIMIT_MS, _PHASES = tl.constexpr(HEADER), tl.constexpr(LIMIT_MS), tl.constexpr(PHASES)


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
def publish(exchange, sequence, phase):
    """Let the other ranks read what the program has written to its half, as `phase` of the call."""
    tl.debug_barrier()  # every thread has written its part
    flag = exchange + _CONTROL + tl.program_id(0)
    tl.atomic_xchg(flag, sequence * _PHASES + phase, sem="release", scope="sys")


@triton.jit
def given_by(exchange, block, sequence, phase, r):
    """Wait until rank r, whose block is at the address `block`, has published `phase` of the call."""
    flag = block.to(tl.pointer_type(tl.int64)) + _CONTROL + tl.program_id(0)
    return arrived(exchange, flag, sequence * _PHASES + phase, r)


@triton.jit
def meet(peers, exchange, own, sequence, WORLD: tl.constexpr, phase: tl.constexpr = 0):
    """Publish `phase`, and wait for the other ranks'; a bit for each rank that has given it."""
    publish(exchange, sequence, phase)
    given = tl.full((), 0, tl.int32)
    for r in range(WORLD):
        block = tl.where(r == own, exchange.to(tl.int64), tl.load(peers + r))
        if block != 0:
            given |= given_by(exchange, block, sequence, phase, r).to(tl.int32) << r
    return given


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
def slot_at(block, sequence, source, kind: tl.constexpr, WORLD: tl.constexpr, HALF: tl.constexpr,
    SLOT: tl.constexpr,
):  # fmt: skip
    """Pointer to the slot of rank `source` in the block at the address `block`, elements as wide as
    those of type `kind`."""
    line = (sequence & 1) * WORLD + source
    at = block + (_HEADER + 2 * HALF + line * SLOT) * 8
    if kind.primitive_bitwidth == 16:
        return tl.multiple_of(at.to(tl.pointer_type(tl.int16)), 16)
    else:
        return tl.multiple_of(at.to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def push(
    values, first, width, peers, own, sequence, WORLD: tl.constexpr, HALF: tl.constexpr,
    SLOT: tl.constexpr,
):  # fmt: skip
    """Write the first `width` of `values` at the elements from `first` of this rank's slot in every other
    block. No element has zero bits: the receiver knows by them what has come. A zero is sent as -0,
    which adds the same."""
    if values.dtype.primitive_bitwidth == 16:
        bits = values.to(tl.int16, bitcast=True)
        bits = tl.where(bits == 0, -(2**15), bits).to(tl.int16)
    else:
        bits = values.to(tl.int32, bitcast=True)
        bits = tl.where(bits == 0, -(2**31), bits).to(tl.int32)
    at = tl.arange(0, values.shape[0])
    for r in range(WORLD):
        block = tl.load(peers + r)
        if (block != 0) & (r != own):
            slot = slot_at(block, sequence, own, values.dtype, WORLD, HALF, SLOT)
            tl.store(slot + first + at, bits, at < width)


@triton.jit
def take(
    exchange, slot, width, r, kind: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr,
    SCOUT: tl.constexpr,
):  # fmt: skip
    """fp32 of what rank r pushes to the first `width` elements of `kind` at the pointer `slot`, once it
    has come; what has not come when time is over is zero, and noted. The slot is zeroed for the call
    after the next. The interpreter polls by programs."""
    if COMPILED:
        return awaited(exchange, slot, width, r, BLOCK, PAIRS, SCOUT)
    else:
        at = tl.arange(0, BLOCK)
        bits = tl.load(slot + at, at < width, other=1, volatile=True)
        polls = tl.full((), 0, tl.int32)
        failed = tl.load(exchange + _ERROR)
        while (tl.sum((bits == 0).to(tl.int32)) != 0) & (failed == 0):
            bits = tl.load(slot + at, at < width, other=1, volatile=True)
            polls += 1
            late = polls > tl.load(exchange + _LIMIT)
            noted = tl.where(late, r + 1, 0).to(tl.int64)
            failed = tl.atomic_cas(exchange + _ERROR, tl.full((), 0, tl.int64), noted)
        whole = tl.sum((bits == 0).to(tl.int32)) == 0
        tl.store(slot + at, tl.zeros_like(bits), at < width)
        bits = tl.where(whole & (at < width), bits, 0).to(bits.dtype)
        return bits.to(kind, bitcast=True).to(tl.float32)


@triton.jit
def total(
    values, first, width, peers, exchange, own, sequence, WORLD: tl.constexpr, HALF: tl.constexpr,
    SLOT: tl.constexpr, PAIRS: tl.constexpr = False, SCOUT: tl.constexpr = False,
):  # fmt: skip
    """fp32 sum in rank order of `values` and what the other ranks push at the same elements. PAIRS and
    SCOUT are `awaited`'s."""
    kind: tl.constexpr = values.dtype
    found = tl.zeros_like(values).to(tl.float32)
    for r in range(WORLD):
        if r == own:
            found += values.to(tl.float32)
        elif tl.load(peers + r) != 0:
            slot = slot_at(exchange.to(tl.int64), sequence, r, kind, WORLD, HALF, SLOT)
            found += take(
                exchange, slot + first, width, r, kind, values.shape[0], PAIRS, SCOUT
            )  # fmt: skip
    return found


def blocks_of(count: int, largest: int) -> tuple[int, int, int, int]:
    """Elements of a block, warps, programs and blocks of each, for `count` elements."""
    block = 1024 if count <= FLAGS * 1024 else largest
    blocks = max(1, triton.cdiv(count, block))
    programs = min(FLAGS, blocks)
    return block, min(16, block // 256), programs, triton.cdiv(blocks, programs)
