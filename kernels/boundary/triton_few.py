# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
"""The boundary of few tokens, several a row: a program has one or few, and nothing but x is waited for.

The first R programs have a row's first token, or its first three if others would read old inputs that
the row overwrites, and keep its conv state; the others have a token each that no row program took. A program reads its residual, its old inputs and the taps before the launch
before has ended, then its inputs at once. State is kept last, since the next launch waits for norms.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inkling_engine.kernels._conv_triton import (
    clamp,
    entry,
    known_length,
    renew_row,
    renewal,
    ring_at,
    save_snapshots,
    turns,
    wants_snapshots,
)
from inkling_engine.kernels._triton import begin_next, follow_as
from inkling_engine.kernels.boundary.triton_walk import (
    keep,
    load_taps,
    old_input,
    partial_sums,
    split_taps,
    walked,
    with_new,
)


@triton.jit
def few_boundary_kernel(
    x, residual, conv_weight, norm_weight, conv_pool, token_rows, slots, sources, starts, lengths,
    destination_slots, destination_offsets, hidden, normed,
    tokens, rows, pool_slots, layer, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, DESTINATIONS: tl.constexpr,
    DESTINED: tl.constexpr, RING: tl.constexpr, HASTY: tl.constexpr,
):  # fmt: skip
    if HASTY:
        begin_next()
    channels = tl.arange(0, BLOCK)
    mask = channels < WIDTH
    program = tl.program_id(0)
    own = program < rows
    first = tl.maximum(program - rows, 0)
    row = tl.minimum(program, rows - 1)
    if program >= rows:
        row = clamp(tl.load(token_rows + first), 0, rows - 1)
    live = clamp(tl.load(starts + rows), 0, tokens)
    begin, stop = tl.load(starts + row), tl.load(starts + row + 1)
    source, slot = tl.load(sources + row), tl.load(slots + row)
    length = known_length(tl.load(lengths + row))
    taps = load_taps(conv_weight, channels, mask)
    gain = tl.load(norm_weight + channels, mask, other=0.0)
    eps = tl.cast(eps, tl.float32)  # a compiled program passes it in double precision
    begin = clamp(begin, 0, tokens)
    row_count = clamp(stop, begin, tokens) - begin
    walk = walked(row_count, 1, RING)
    index = 0
    left = False
    if own:
        first = begin
        count = tl.minimum(row_count, walk)
    else:
        index = first - begin
        known = first < live
        late = index >= walk
        count = ((~known) | late).to(tl.int32)
        left = known & late & turns(index, row_count, RING)
        if first >= live:
            length = -1
            index = 0
        row_count = 0
    moved = source != slot
    at = tl.cast(first, tl.int64) * WIDTH
    inputs = x + at
    old = ring_at(conv_pool, layer, pool_slots, source, RING, WIDTH)
    ring = ring_at(conv_pool, layer, pool_slots, slot, RING, WIDTH)
    wanted = wants_snapshots(destination_slots, row, DESTINATIONS, DESTINED)
    some = channels < tl.where(count > 0, WIDTH, 0)
    carried = tl.load(residual + at + channels, some, other=0.0)
    z0 = old_input(old, length, index, channels, RING, WIDTH)
    z1 = old_input(old, length, index + 1, channels, RING, WIDTH)
    z2 = old_input(old, length, index + 2, channels, RING, WIDTH)
    w0, w1, w2, w3 = split_taps(taps, BLOCK)
    follow_as(HASTY)
    if count == 0:
        return
    following = tl.load(inputs + channels, some, other=0.0)
    z0 = with_new(z0, length, index, inputs, first, 0, channels, WIDTH)
    z1 = with_new(z1, length, index + 1, inputs, first, 1, channels, WIDTH)
    z2 = with_new(z2, length, index + 2, inputs, first, 2, channels, WIDTH)
    n0 = renewal(old, length, inputs, 0, row_count, moved, channels, WIDTH, RING, WIDTH, WIDTH)
    n1 = renewal(old, length, inputs, 1, row_count, moved, channels, WIDTH, RING, WIDTH, WIDTH)
    n2 = renewal(old, length, inputs, 2, row_count, moved, channels, WIDTH, RING, WIDTH, WIDTH)
    s0, s1, s2 = partial_sums(z0, z1, z2, w0, w1, w2)
    for i in tl.range(0, count, num_stages=1):
        z, base = following.to(tl.float32), carried.to(tl.float32)
        ahead = channels < tl.where(i + 1 < count, WIDTH, 0)
        following = tl.load(inputs + (i + 1) * WIDTH + channels, ahead, other=0.0)
        carried = tl.load(residual + at + (i + 1) * WIDTH + channels, ahead, other=0.0)
        past = tl.where(first + i < live, s0, 0.0)
        y = z + w3 * z + past + base
        if RING > 3:
            kept = tl.where(own, turns(i, row_count, RING), left)
            if kept:
                to = ring + entry(length, index + i + 3, RING) * WIDTH
                tl.store(to + channels, z.to(x.dtype.element_ty), mask)
        keep(y, gain, eps, hidden, normed, at + i * WIDTH + channels, mask, WIDTH)
        s0, s1, s2 = s1 + w2 * z, s2 + w1 * z, w0 * z
    if row_count > 0:
        if wanted:
            save_snapshots(
                old, length, inputs, row_count, channels, WIDTH, RING, WIDTH, WIDTH, conv_pool,
                layer, pool_slots, destination_slots, destination_offsets, row, DESTINATIONS,
            )  # fmt: skip
        renew_row(
            ring, n0, n1, n2, length, row_count, moved, channels, WIDTH, RING, WIDTH
        )  # fmt: skip
