# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
"""The short convolution's window on a GPU (see `_conv.py`): z = old window ++ new inputs.

One program a row and block of channels reads the row's old window, computes the row's first three
tokens (no other token needs the window) and then writes the new window and the snapshots; programs
of later tokens read inputs alone. So no order between programs matters as long as no row starts
from a slot that another row of the step writes. Indices read from memory are clamped, for a
kernel may be run on garbage when a program is compiled. Loads of what an address depends on stand
in the kernels themselves: PyTorch's analysis of mutation follows addresses into calls, and would
take the loaded tensors for written ones.
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
def window_at(pool, layer, slots, slot, WIDTH: tl.constexpr):
    """Pointer to the window [3, WIDTH] of `slot` in `pool` [layers, slots, 3, WIDTH]."""
    line = tl.cast(layer // LAYER_UNIT, tl.int64) * slots + clamp(slot, 0, slots - 1)
    return pool + line * (3 * WIDTH)


@triton.jit
def row_input(old, held, inputs, index, channels, width, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    """z[index] of a row, index a scalar: its old window, of which the first `held` entries may be
    read (3, or 0 for zeros), then its inputs [n, STRIDE]; `width` channels from `channels`[0]."""
    i = tl.arange(0, channels.shape[0])
    known = i < tl.where(index < held, width, 0)
    before = tl.load(old + index * WIDTH + channels, known, other=0.0)
    later = i < tl.where(index < 3, 0, width)
    after = tl.load(inputs + (index - 3) * STRIDE + channels, later, other=0.0)
    return tl.where(index < 3, before, after)


@triton.jit
def wants_snapshots(destination_slots, row, DESTINATIONS: tl.constexpr, DESTINED: tl.constexpr):
    """Whether any of the row's DESTINATIONS slots is not 0; DESTINED is a power of 2."""
    j = tl.arange(0, DESTINED)
    lines = destination_slots + row * DESTINATIONS + j
    return tl.max(tl.load(lines, j < DESTINATIONS, other=0)) != 0


@triton.jit
def save_snapshots(
    old, held, inputs, count, channels, width, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    pool, layer, slots, destination_slots, destination_offsets, row, DESTINATIONS: tl.constexpr,
):  # fmt: skip
    """Copy z[offset : offset + 3] to every destination slot of `row` that is not 0."""
    mask = tl.arange(0, channels.shape[0]) < width
    for j in range(DESTINATIONS):
        slot = tl.load(destination_slots + row * DESTINATIONS + j)
        if slot != 0:
            offset = clamp(tl.load(destination_offsets + row * DESTINATIONS + j), 0, count)
            to = window_at(pool, layer, slots, slot, WIDTH) + channels
            for i in tl.static_range(3):
                z = row_input(old, held, inputs, offset + i, channels, width, WIDTH, STRIDE)
                tl.store(to + i * WIDTH, z, mask)
