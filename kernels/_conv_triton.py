# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
"""The short convolution's ring on a GPU (see `_conv.py`): z = three old inputs ++ new ones.

One program a row and block of channels reads the row's old inputs, computes the row's first three
tokens (no other token needs old inputs) and then writes the three ring entries where old inputs
lay and the snapshots. The other entries are written by whoever computes their tokens, which read
new inputs alone. So no order between programs matters as long as no row starts from a slot that
another row of the step writes. Indices read from memory are clamped, for a kernel may be run on
garbage when a program is compiled. Loads of what an address depends on stand in the kernels
themselves: PyTorch's analysis of mutation follows addresses into calls, and would take the loaded
tensors for written ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Kernels take LAYER_UNIT times the layer: Triton and Inductor specialise integers on being 1 or
# divisible by 16, and one kernel has to serve all layers.
LAYER_UNIT = tl.constexpr(16)


@triton.jit
def clamp(value, low, high):
    """`value` held in [low, high]."""
    return tl.minimum(tl.maximum(value, low), high)


@triton.jit
def ring_at(pool, layer, slots, slot, RING: tl.constexpr, WIDTH: tl.constexpr):
    """Pointer to the ring [RING, WIDTH] of `slot` in `pool` [layers, slots, RING, WIDTH]."""
    line = tl.cast(layer // LAYER_UNIT, tl.int64) * slots + clamp(slot, 0, slots - 1)
    return pool + line * (RING * WIDTH)


@triton.jit
def known_length(length):
    """A row's length as it may be counted with."""
    return clamp(length, 0, 2**30)


@triton.jit
def entry(length, index, RING: tl.constexpr):
    """The ring entry of z[index] of a row that starts at position `length`."""
    return (length + index + (RING - 3)) % RING


@triton.jit
def last_turn(j, count, RING: tl.constexpr):
    """Index of the last z of a row of `count` tokens that has the ring entry of z[j], j < 3."""
    return j + (count + 2 - j) // RING * RING


@triton.jit
def turns(index, count, RING: tl.constexpr):
    """Whether a row's token `index` is left in the ring by the program that computes it."""
    return (index >= 0) & (index >= count - RING) & (index < count) & (index % RING < RING - 3)


@triton.jit
def row_input(
    old, length, inputs, index, channels, width, RING: tl.constexpr, WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """z[index] of a row, index a scalar: from the ring `old` or zeros before position 0, then the
    row's inputs [n, STRIDE]; `width` channels from `channels`[0]."""
    i = tl.arange(0, channels.shape[0])
    known = i < tl.where((index < 3) & (length + index >= 3), width, 0)
    before = tl.load(old + entry(length, index, RING) * WIDTH + channels, known, other=0.0)
    later = i < tl.where(index < 3, 0, width)
    after = tl.load(inputs + (index - 3) * STRIDE + channels, later, other=0.0)
    return tl.where(index < 3, before, after)


@triton.jit
def renewed(length, j, count, moved, width, RING: tl.constexpr):
    """`width` if the last z at the entry of z[j] is new there, else 0: an input of the row, or an
    old one of a row that has `moved` to another slot."""
    old = moved & (length + j >= 3)
    return tl.where(((last_turn(j, count, RING) >= 3) | old) & (count > 0), width, 0)


@triton.jit
def renewal(
    old, length, inputs, j, count, moved, channels, width, RING: tl.constexpr,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """What `renew` writes at the entry of z[j]."""
    width = renewed(length, j, count, moved, width, RING)
    index = last_turn(j, count, RING)
    return row_input(old, length, inputs, index, channels, width, RING, WIDTH, STRIDE)


@triton.jit
def renew(
    ring, z, length, j, count, moved, channels, width, RING: tl.constexpr, WIDTH: tl.constexpr
):
    """Write `z` at the entry of z[j] of the row's ring, if it is new there."""
    mask = tl.arange(0, channels.shape[0]) < renewed(length, j, count, moved, width, RING)
    tl.store(ring + entry(length, j, RING) * WIDTH + channels, z, mask)


@triton.jit
def renew_row(
    ring, n0, n1, n2, length, count, moved, channels, width, RING: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """`renew` the row's three entries, once every thread has read the old inputs, which may lie there."""
    tl.debug_barrier()
    renew(ring, n0, length, 0, count, moved, channels, width, RING, WIDTH)
    renew(ring, n1, length, 1, count, moved, channels, width, RING, WIDTH)
    renew(ring, n2, length, 2, count, moved, channels, width, RING, WIDTH)


@triton.jit
def wants_snapshots(destination_slots, row, DESTINATIONS: tl.constexpr, DESTINED: tl.constexpr):
    """Whether any of the row's DESTINATIONS slots is not 0; DESTINED is a power of 2."""
    j = tl.arange(0, DESTINED)
    lines = destination_slots + row * DESTINATIONS + j
    return tl.max(tl.load(lines, j < DESTINATIONS, other=0)) != 0


@triton.jit
def save_snapshots(
    old, length, inputs, count, channels, width, RING: tl.constexpr, WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    pool, layer, slots, destination_slots, destination_offsets, row, DESTINATIONS: tl.constexpr,
):  # fmt: skip
    """Copy z[offset : offset + 3] to the ring of every destination slot of `row` that is not 0."""
    i = tl.arange(0, channels.shape[0])
    for j in range(DESTINATIONS):
        slot = tl.load(destination_slots + row * DESTINATIONS + j)
        if slot != 0:
            offset = clamp(tl.load(destination_offsets + row * DESTINATIONS + j), 0, count)
            to = ring_at(pool, layer, slots, slot, RING, WIDTH) + channels
            for k in tl.static_range(3):
                index = offset + k
                z = row_input(old, length, inputs, index, channels, width, RING, WIDTH, STRIDE)
                mask = i < tl.where(length + index >= 3, width, 0)
                tl.store(to + entry(length, index, RING) * WIDTH, z, mask)
