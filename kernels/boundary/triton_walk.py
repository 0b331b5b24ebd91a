# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
"""What the boundary's launches share: taps, old inputs, partial sums of a walk, a token's results."""

from __future__ import annotations

import triton
import triton.language as tl

from inkling_engine.kernels._conv_triton import entry


@triton.jit
def walked(count, STRIP: tl.constexpr, RING: tl.constexpr):
    """How many tokens the program of a row with `count` walks: all that read old inputs, or the first
    if none but it reads an entry that the row overwrites and every token has a program."""
    return tl.where((STRIP == 1) & (count <= RING - 2), 1, 3)


@triton.jit
def load_taps(conv_weight, channels, mask):
    """The four taps [BLOCK, 4] of every channel, from `conv_weight` [H, 4] read in one piece."""
    taps = channels[:, None] * 4 + tl.arange(0, 4)[None, :]
    return tl.load(conv_weight + taps, mask[:, None], other=0.0)


@triton.jit
def split_taps(taps, BLOCK: tl.constexpr):
    """The four taps, [BLOCK] each."""
    even, odd = tl.split(tl.reshape(taps, (BLOCK, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def history(
    old, length, index, inputs, first, j, channels, RING: tl.constexpr, WIDTH: tl.constexpr
):
    """z[j] before the first token, which is the row's `index`-th: an old input or one of the row's,
    or what is before a strip of several rows (length < 0)."""
    place = index + j
    new = (length < 0) | (place >= 3)
    held = old + entry(length, place, RING) * WIDTH
    where = tl.where(new, inputs + (j - 3) * WIDTH, held)
    known = tl.where(new, first + j >= 3, length + place >= 3)
    return tl.load(where + channels, channels < tl.where(known, WIDTH, 0), other=0.0)


@triton.jit
def old_input(old, length, place, channels, RING: tl.constexpr, WIDTH: tl.constexpr):
    """z[place] of a row if it is an old input, zeros otherwise (length < 0: there are none)."""
    known = (place < 3) & (length >= 0) & (length + place >= 3)
    held = old + entry(tl.maximum(length, 0), place, RING) * WIDTH
    return tl.load(held + channels, channels < tl.where(known, WIDTH, 0), other=0.0)


@triton.jit
def with_new(z, length, place, inputs, first, j, channels, WIDTH: tl.constexpr):
    """`z` of `old_input`, or the input before the first token that lies there instead."""
    new = (length < 0) | (place >= 3)
    mask = channels < tl.where(new & (first + j >= 3), WIDTH, 0)
    value = tl.load(inputs + (j - 3) * WIDTH + channels, mask, other=0.0)
    return tl.where(new, value, z)


@triton.jit
def partial_sums(z0, z1, z2, w0, w1, w2):
    """What the last three inputs add to the next three outputs, summed as the walk sums."""
    s0 = w0 * z0.to(tl.float32) + w1 * z1.to(tl.float32) + w2 * z2.to(tl.float32)
    s1 = w0 * z1.to(tl.float32) + w1 * z2.to(tl.float32)
    return s0, s1, w0 * z2.to(tl.float32)


@triton.jit
def keep(y, gain, eps, hidden, normed, to, mask, WIDTH: tl.constexpr):
    """Store a token's sum and its norm."""
    tl.store(hidden + to, y.to(hidden.dtype.element_ty), mask)
    y *= tl.rsqrt(tl.sum(y * y) / WIDTH + eps) * gain.to(tl.float32)
    tl.store(normed + to, y.to(normed.dtype.element_ty), mask)
