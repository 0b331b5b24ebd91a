# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
"""The boundary in one launch: programs of rows and programs of strips of tokens.

A program holds whole rows of H channels in registers. The first R programs each walk the first
three tokens of a row, starting from its old window, and keep the conv state; the others walk a
strip of consecutive tokens, each for the tokens that no row program took. The last inputs slide
through registers, so a strip reads its weights and every input once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels._conv_triton import LAYER_UNIT, clamp, save_snapshots, window_at
from inkling_engine.kernels._triton import CompileCase, launchable, launches, meta


@dataclass(frozen=True)
class Config:
    """Channels of a program, tokens of a strip, whether taps stay in registers, warps."""

    block: int
    strip: int
    hold: bool
    warps: int


def configure(tokens: int, width: int) -> Config:
    """Strips grow with the number of tokens, so that weights are read by fewer programs."""
    block = triton.next_power_of_2(width)
    strip = 1 if tokens <= 256 else 4 if tokens <= 1024 else 8
    return Config(block, strip, hold=block <= 4096, warps=max(1, min(16, block // 256)))


@triton.jit
def conv_taps(conv_weight, channels, mask, BLOCK: tl.constexpr):
    """The four taps of every channel, [BLOCK] each, from `conv_weight` [H, 4] read in one piece."""
    each = tl.arange(0, 4)
    taps = tl.load(conv_weight + channels[:, None] * 4 + each[None, :], mask[:, None], other=0.0)
    even, odd = tl.split(tl.reshape(taps, (BLOCK, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def strip_work(token_rows, starts, begin, tokens, rows, live, STRIP: tl.constexpr):
    """A bit for each token of the strip at `begin` that no row program computes."""
    i = tl.arange(0, STRIP)
    token = begin + i
    row = tl.load(token_rows + token, token < live, other=0)
    first = tl.load(starts + clamp(row, 0, rows - 1), token < live, other=0)
    wanted = (token < tokens) & ((token >= live) | (token - first >= 3))
    return tl.sum(wanted.to(tl.int32) << i)


@triton.jit
def history(old, held, inputs, first, j, channels, WIDTH: tl.constexpr):
    """z[j] before the first token: a row's old window (held 3), or the inputs before a strip."""
    known = channels < tl.where(held == 3, WIDTH, 0)
    window = tl.load(old + j * WIDTH + channels, known, other=0.0)
    known = channels < tl.where((held < 0) & (first + j >= 3), WIDTH, 0)
    before = tl.load(inputs + (j - 3) * WIDTH + channels, known, other=0.0)
    return tl.where(held < 0, before, window)


@triton.jit
def boundary_kernel(
    x, residual, conv_weight, norm_weight, conv_pool, token_rows, slots, sources, starts, lengths,
    destination_slots, destination_offsets, hidden, normed,
    tokens, rows, pool_slots, layer, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, STRIP: tl.constexpr, HOLD: tl.constexpr,
    DESTINATIONS: tl.constexpr,
):  # fmt: skip
    eps = tl.cast(eps, tl.float32)  # a compiled program passes it in double precision
    program = tl.program_id(0)
    live = clamp(tl.load(starts + rows), 0, tokens)
    first = tl.maximum(program - rows, 0) * STRIP
    work = 7
    if program >= rows:
        work = strip_work(token_rows, starts, first, tokens, rows, live, STRIP)
    if work == 0:
        return

    channels = tl.arange(0, BLOCK)
    mask = channels < WIDTH
    if HOLD:  # weights first: they wait for nothing
        w0, w1, w2, w3 = conv_taps(conv_weight, channels, mask, BLOCK)
    gain = tl.load(norm_weight + channels, mask, other=0.0)
    row = tl.minimum(program, rows - 1)
    count = tl.minimum(tokens - first, STRIP)
    held = -1
    source, new_slot, row_count = 0, 0, 0
    if program < rows:
        first = clamp(tl.load(starts + row), 0, tokens)
        row_count = clamp(tl.load(starts + row + 1), first, tokens) - first
        count = tl.minimum(row_count, 3)
        held = tl.where(tl.load(lengths + row) > 0, 3, 0)
        source = tl.load(sources + row)
        new_slot = tl.load(slots + row)
    at = tl.cast(first, tl.int64) * WIDTH
    inputs = x + at
    old = window_at(conv_pool, layer, pool_slots, source, WIDTH)
    z0 = history(old, held, inputs, first, 0, channels, WIDTH)
    z1 = history(old, held, inputs, first, 1, channels, WIDTH)
    z2 = history(old, held, inputs, first, 2, channels, WIDTH)
    any_token = channels < tl.where(count > 0, WIDTH, 0)
    following = tl.load(inputs + channels, any_token, other=0.0)
    carried = tl.load(residual + at + channels, any_token, other=0.0)
    if row_count > 0:
        save_snapshots(
            old, held, inputs, row_count, channels, WIDTH, WIDTH, WIDTH, conv_pool, layer,
            pool_slots, destination_slots, destination_offsets, row, DESTINATIONS,
        )  # fmt: skip
    for i in range(count):
        z3 = following
        y = z3.to(tl.float32)
        base = carried.to(tl.float32)
        ahead = channels < tl.where(i + 1 < count, WIDTH, 0)
        following = tl.load(inputs + (i + 1) * WIDTH + channels, ahead, other=0.0)
        carried = tl.load(residual + at + (i + 1) * WIDTH + channels, ahead, other=0.0)
        if (work >> i) & 1:
            if not HOLD:
                w0, w1, w2, w3 = conv_taps(conv_weight, channels, mask, BLOCK)
            y += w3 * y
            if first + i < live:
                y += w0 * z0.to(tl.float32) + w1 * z1.to(tl.float32) + w2 * z2.to(tl.float32)
            y += base
            scale = tl.rsqrt(tl.sum(y * y) / WIDTH + eps)
            to = at + i * WIDTH + channels
            tl.store(hidden + to, y.to(hidden.dtype.element_ty), mask)
            y *= scale * gain.to(tl.float32)
            tl.store(normed + to, y.to(normed.dtype.element_ty), mask)
        z0, z1, z2 = z1, z2, z3
    if row_count > 0:
        later = row_count > 3
        late = channels < tl.where(later, WIDTH, 0)
        last = inputs + (row_count - 3) * WIDTH + channels
        new = window_at(conv_pool, layer, pool_slots, new_slot, WIDTH) + channels
        tl.debug_barrier()  # every thread has read the old window, which may be the same slot's
        tl.store(new, tl.where(later, tl.load(last, late, other=0.0), z0), mask)
        tl.store(new + WIDTH, tl.where(later, tl.load(last + WIDTH, late, other=0.0), z1), mask)
        last += 2 * WIDTH
        tl.store(new + 2 * WIDTH, tl.where(later, tl.load(last, late, other=0.0), z2), mask)


def boundary(
    x: Tensor,
    residual: Tensor,
    conv_weight: Tensor,
    norm_weight: Tensor,
    conv_pool: Tensor,
    token_rows: Tensor,
    slots: Tensor,
    sources: Tensor,
    starts: Tensor,
    lengths: Tensor,
    destination_slots: Tensor,
    destination_offsets: Tensor,
    peers: Tensor,
    rank: Tensor,
    layer: int,
    eps: float,
    world: int,
) -> tuple[Tensor, Tensor]:
    """Hidden state and its norm; see the package docstring."""
    (tokens, width), rows = x.shape, slots.shape[0]
    config = configure(tokens, width)
    hidden, normed = torch.empty_like(x), torch.empty_like(x)
    launchable(boundary_kernel)[(rows + triton.cdiv(tokens, config.strip),)](
        x, residual, conv_weight, norm_weight, conv_pool, token_rows, slots, sources, starts,
        lengths, destination_slots, destination_offsets, hidden, normed,
        tokens, rows, conv_pool.shape[1], LAYER_UNIT.value * layer, eps,
        WIDTH=width, BLOCK=config.block, STRIP=config.strip, HOLD=config.hold,
        DESTINATIONS=destination_slots.shape[1], num_warps=config.warps,
    )  # fmt: skip
    return hidden, normed


def compile_cases() -> list[CompileCase]:
    """Decode and extend of inkling-small, whose hidden rows every rank holds whole."""
    width, i32 = 4096, torch.int32
    cases = []
    for tokens, rows in ((1, 1), (8, 8), (128, 128), (2048, 8)):
        cases += launches(
            f"boundary-t{tokens}",
            boundary,
            meta(tokens, width),
            meta(tokens, width),
            meta(width, 4, dtype=torch.float32),
            meta(width),
            meta(42, 160, 3, width),
            meta(tokens, dtype=i32),
            *(meta(rows, dtype=i32) for _ in range(2)),
            meta(rows + 1, dtype=i32),
            meta(rows, dtype=i32),
            *(meta(rows, 1 + tokens // 512, dtype=i32) for _ in range(2)),
            meta(8, dtype=torch.int64),
            meta(4, dtype=i32),
            3,
            1e-6,
            1,
        )
    return cases
