# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
"""The boundary of a step with a row a token, in one launch that sums over ranks.

A row's program reads all that it needs but its part before the launch before has ended, then pushes its
part to the other ranks, and computes with the sum while it is in registers. Rows whose sums others of its tokens need keep them where the hidden
rows will be. Inert rows take the padded tokens, and push them too, for the other ranks count on it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inkling_engine.kernels._conv_triton import (
    clamp,
    entry,
    known_length,
    last_turn,
    renew_row,
    renewed,
    ring_at,
    row_input,
    save_snapshots,
    turns,
    wants_snapshots,
)
from inkling_engine.kernels._exchange_triton import push, sequence_of, total
from inkling_engine.kernels._triton import follow
from inkling_engine.kernels.boundary.triton_walk import (
    history,
    keep,
    load_taps,
    partial_sums,
    split_taps,
)


@triton.jit
def token_of(i, first, count, spare):
    """The token that a row's program takes i-th: one of the row's, or a padded one."""
    return tl.where(i < count, first + i, spare)


@triton.jit
def renewal_of(
    z, old, length, sums, j, count, moved, channels, RING: tl.constexpr, WIDTH: tl.constexpr
):
    """What `renew` writes at the entry of z[j], where `z` is the row's first sum."""
    index = last_turn(j, count, RING)
    width = tl.where(index == 3, 0, renewed(length, j, count, moved, WIDTH, RING))
    kept = row_input(old, length, sums, index, channels, width, RING, WIDTH, WIDTH)
    return tl.where(index == 3, z, kept)


@triton.jit
def before_sum(
    taps, old, length, x, residual, first, count, at, some, channels, RING: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What a row's first token needs but its sum: residual, last tap, what old inputs add."""
    carried = tl.load(residual + at + channels, some, other=0.0)
    z0 = history(old, length, 0, x, first, 0, channels, RING, WIDTH)
    z1 = history(old, length, 0, x, first, 1, channels, RING, WIDTH)
    z2 = history(old, length, 0, x, first, 2, channels, RING, WIDTH)
    w0, w1, w2, w3 = split_taps(taps, BLOCK)
    past, _, _ = partial_sums(z0, z1, z2, w0, w1, w2)
    return carried, w3, tl.where(count > 0, past, 0.0)


@triton.jit
def one_of_many(
    i, token, count, old, ring, length, residual, conv_weight, norm_weight, eps, hidden, normed,
    mask, channels, RING: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The i-th token that a program takes: its sum and those before it stand among the hidden rows."""
    at = token * WIDTH + channels
    sums = hidden + token * WIDTH
    z = tl.load(sums + channels, mask, other=0.0)
    z0 = history(old, length, i, sums, token, 0, channels, RING, WIDTH)
    z1 = history(old, length, i, sums, token, 1, channels, RING, WIDTH)
    z2 = history(old, length, i, sums, token, 2, channels, RING, WIDTH)
    base = tl.load(residual + at, mask, other=0.0).to(tl.float32)
    tap = conv_weight + channels * 4  # few registers: these tokens are rare
    w0, w1 = tl.load(tap, mask, other=0.0), tl.load(tap + 1, mask, other=0.0)
    w2, w3 = tl.load(tap + 2, mask, other=0.0), tl.load(tap + 3, mask, other=0.0)
    past, _, _ = partial_sums(z0, z1, z2, w0, w1, w2)
    past = tl.where(i < count, past, 0.0)
    gain = tl.load(norm_weight + channels, mask, other=0.0)
    tl.debug_barrier()  # every thread has read the sum
    value = z.to(tl.float32)
    keep(value + w3 * value + past + base, gain, eps, hidden, normed, at, mask, WIDTH)
    if (RING > 3) & turns(i, count, RING):
        tl.store(ring + entry(length, i + 3, RING) * WIDTH + channels, z, mask)


@triton.jit
def ranks_boundary_kernel(
    x, residual, conv_weight, norm_weight, conv_pool, slots, sources, starts, lengths,
    destination_slots, destination_offsets, peers, exchange, step_counter, rank, hidden, normed,
    tokens, rows, pool_slots, layer, call, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, DESTINATIONS: tl.constexpr, DESTINED: tl.constexpr,
    RING: tl.constexpr, CALLS: tl.constexpr, WORLD: tl.constexpr, HALF: tl.constexpr,
    SLOT: tl.constexpr, PAIRS: tl.constexpr, SCOUT: tl.constexpr,
):  # fmt: skip
    channels = tl.arange(0, BLOCK)
    mask = channels < WIDTH
    taps = load_taps(conv_weight, channels, mask)
    gain = tl.load(norm_weight + channels, mask, other=0.0)
    eps = tl.cast(eps, tl.float32)  # a compiled program passes it in double precision
    row = tl.program_id(0)
    live = clamp(tl.load(starts + rows), 0, tokens)
    begin, stop = tl.load(starts + row), tl.load(starts + row + 1)
    source, slot = tl.load(sources + row), tl.load(slots + row)
    length = known_length(tl.load(lengths + row))
    own, sequence = tl.load(rank), sequence_of(tl.load(step_counter), call, CALLS)
    first = clamp(begin, 0, tokens)
    count = clamp(stop, first, tokens) - first
    spare = live + rows - 1 - row  # inert rows take the padded tokens
    taken = count + (spare < tokens).to(tl.int32)
    moved = source != slot
    old = ring_at(conv_pool, layer, pool_slots, source, RING, WIDTH)
    ring = ring_at(conv_pool, layer, pool_slots, slot, RING, WIDTH)
    wanted = wants_snapshots(destination_slots, row, DESTINATIONS, DESTINED)
    at = token_of(0, first, count, spare) * WIDTH
    width = tl.where(taken > 0, WIDTH, 0)
    some = channels < width
    carried, w3, past = before_sum(
        taps, old, length, x, residual, first, count, at, some, channels, RING, WIDTH, BLOCK
    )
    follow()
    values = tl.load(x + at + channels, some, other=0.0)
    push(values, at, width, peers, own, sequence, WORLD, HALF, SLOT)
    for i in range(1, taken):
        to = token_of(i, first, count, spare) * WIDTH
        more = tl.load(x + to + channels, mask, other=0.0)
        push(more, to, WIDTH, peers, own, sequence, WORLD, HALF, SLOT)
    z = total(
        values, at, width, peers, exchange, own, sequence, WORLD, HALF, SLOT, PAIRS, SCOUT
    ).to(x.dtype.element_ty)  # fmt: skip
    sums = hidden + first * WIDTH
    if (taken > 1) | wanted:
        tl.store(hidden + at + channels, z, some)
        for i in range(1, taken):
            to = token_of(i, first, count, spare) * WIDTH
            more = tl.load(x + to + channels, mask, other=0.0)
            found = total(more, to, WIDTH, peers, exchange, own, sequence, WORLD, HALF, SLOT)
            tl.store(hidden + to + channels, found.to(hidden.dtype.element_ty), mask)
        tl.debug_barrier()
    n0 = renewal_of(z, old, length, sums, 0, count, moved, channels, RING, WIDTH)
    n1 = renewal_of(z, old, length, sums, 1, count, moved, channels, RING, WIDTH)
    n2 = renewal_of(z, old, length, sums, 2, count, moved, channels, RING, WIDTH)
    if wanted & (count > 0):
        save_snapshots(
            old, length, sums, count, channels, WIDTH, RING, WIDTH, WIDTH, conv_pool, layer,
            pool_slots, destination_slots, destination_offsets, row, DESTINATIONS,
        )  # fmt: skip
        tl.debug_barrier()  # every thread has read the sum, whose place the hidden row takes
    if taken > 1:
        for back in range(taken):  # from the last on: a hidden row takes the place of its sum
            i = taken - 1 - back
            one_of_many(
                i, token_of(i, first, count, spare), count, old, ring, length, residual,
                conv_weight, norm_weight, eps, hidden, normed, mask, channels, RING, WIDTH, BLOCK,
            )  # fmt: skip
        renew_row(ring, n0, n1, n2, length, count, moved, channels, WIDTH, RING, WIDTH)
    else:  # norms come last: state is on its way meanwhile
        renew_row(ring, n0, n1, n2, length, count, moved, channels, WIDTH, RING, WIDTH)
        if (RING > 3) & turns(0, count, RING):
            tl.store(ring + entry(length, 3, RING) * WIDTH + channels, z, mask)
        value, base = z.to(tl.float32), carried.to(tl.float32)
        to = at + channels
        keep(value + w3 * value + past + base, gain, eps, hidden, normed, to, some, WIDTH)
