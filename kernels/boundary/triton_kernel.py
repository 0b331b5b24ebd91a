# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
"""The boundary in one launch: programs of rows and programs of strips of tokens.

A program holds whole rows of H channels in registers. The first R programs each walk the first
three tokens of a row, starting from its old window, and keep the conv state; the others walk a
strip of consecutive tokens, each for the tokens that no row program took. A step with a row a
token has row programs alone. The convolution is carried as three partial sums, so a strip reads
its weights and every input once. Loads stand in the order in which their addresses are known, and
taps are rearranged between threads last: that waits for all that was loaded before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels._conv_triton import (
    LAYER_UNIT,
    clamp,
    row_input,
    save_snapshots,
    wants_snapshots,
    window_at,
)
from inkling_engine.kernels._triton import CompileCase, follow, launchable, launches, meta


@dataclass(frozen=True)
class Config:
    """Channels of a program, tokens of a strip, whether taps stay in registers, warps, stages."""

    block: int
    strip: int
    hold: bool
    warps: int
    stages: int


def configure(tokens: int, width: int) -> Config:
    """Strips grow with the number of tokens, so that weights are read by fewer programs.

    At hidden 4096 on an H200: 512 tokens take 6.8 us in strips of 4 (14.3 of 16, 7.6 with copies in
    flight), 4096 take 40.9 us in strips of 32 with copies in flight (46.2 of 16 without). Taps that
    are not held would join those copies, in more shared memory than there is.
    """
    block = triton.next_power_of_2(width)
    hold = block <= 4096
    strip = 1 if tokens <= 256 else 4 if tokens <= 1024 else 16 if tokens <= 2048 else 32
    warps = max(1, min(16, block // 256))
    return Config(block, strip, hold, warps, stages=4 if hold and strip == 32 else 1)


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


@triton.jit
def boundary_kernel(
    x, residual, conv_weight, norm_weight, conv_pool, token_rows, slots, sources, starts, lengths,
    destination_slots, destination_offsets, hidden, normed,
    tokens, rows, pool_slots, layer, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, STRIP: tl.constexpr, HOLD: tl.constexpr,
    ALONE: tl.constexpr, STAGES: tl.constexpr, DESTINATIONS: tl.constexpr,
    DESTINED: tl.constexpr,
):  # fmt: skip
    channels = tl.arange(0, BLOCK)
    mask = channels < WIDTH
    if HOLD:
        taps = load_taps(conv_weight, channels, mask)
    gain = tl.load(norm_weight + channels, mask, other=0.0)
    eps = tl.cast(eps, tl.float32)  # a compiled program passes it in double precision
    program = tl.program_id(0)
    row = tl.minimum(program, rows - 1)
    live = clamp(tl.load(starts + rows), 0, tokens)
    begin, stop = tl.load(starts + row), tl.load(starts + row + 1)
    length, source, new_slot = tl.load(lengths + row), tl.load(sources + row), tl.load(slots + row)
    first = tl.maximum(program - rows, 0) * STRIP
    work = 7
    if not ALONE:
        follow()
        if program >= rows:
            work = strip_work(token_rows, starts, first, tokens, rows, live, STRIP)
        if work == 0:
            return

    count = tl.minimum(tokens - first, STRIP)
    held = -1
    row_count = 0
    if program < rows:
        first = clamp(begin, 0, tokens)
        row_count = clamp(stop, first, tokens) - first
        count = row_count if ALONE else tl.minimum(row_count, 3)
        held = tl.where(length > 0, 3, 0)
    at = tl.cast(first, tl.int64) * WIDTH
    inputs = x + at
    old = window_at(conv_pool, layer, pool_slots, source, WIDTH)
    wanted = wants_snapshots(destination_slots, row, DESTINATIONS, DESTINED)
    if ALONE:  # only x comes from the launch before
        some = channels < tl.where(count > 0, WIDTH, 0)
        carried = tl.load(residual + at + channels, some, other=0.0)
    z0 = history(old, held, inputs, first, 0, channels, WIDTH)
    z1 = history(old, held, inputs, first, 1, channels, WIDTH)
    z2 = history(old, held, inputs, first, 2, channels, WIDTH)
    if ALONE:
        if HOLD:
            w0, w1, w2, w3 = split_taps(taps, BLOCK)
            s0, s1, s2 = partial_sums(z0, z1, z2, w0, w1, w2)
        follow()
    kept = tl.where(row_count > 0, WIDTH, 0)
    n0 = row_input(old, held, inputs, row_count, channels, kept, WIDTH, WIDTH)
    n1 = row_input(old, held, inputs, row_count + 1, channels, kept, WIDTH, WIDTH)
    n2 = row_input(old, held, inputs, row_count + 2, channels, kept, WIDTH, WIDTH)
    if STAGES == 1:
        some = channels < tl.where(count > 0, WIDTH, 0)
        following = tl.load(inputs + channels, some, other=0.0)
        if not ALONE:
            carried = tl.load(residual + at + channels, some, other=0.0)
    if row_count > 0:
        if wanted:
            save_snapshots(
                old, held, inputs, row_count, channels, WIDTH, WIDTH, WIDTH, conv_pool, layer,
                pool_slots, destination_slots, destination_offsets, row, DESTINATIONS,
            )  # fmt: skip
        new = window_at(conv_pool, layer, pool_slots, new_slot, WIDTH) + channels
        tl.debug_barrier()  # every thread has read the old window, which may be the same slot's
        tl.store(new, n0, mask)
        tl.store(new + WIDTH, n1, mask)
        tl.store(new + 2 * WIDTH, n2, mask)
    if not HOLD:
        taps = load_taps(conv_weight, channels, mask)
    if not (ALONE and HOLD):
        w0, w1, w2, w3 = split_taps(taps, BLOCK)
        s0, s1, s2 = partial_sums(z0, z1, z2, w0, w1, w2)
    for i in tl.range(0, count, num_stages=STAGES):
        if STAGES == 1:
            z, base = following.to(tl.float32), carried.to(tl.float32)
            ahead = channels < tl.where(i + 1 < count, WIDTH, 0)
            following = tl.load(inputs + (i + 1) * WIDTH + channels, ahead, other=0.0)
            carried = tl.load(residual + at + (i + 1) * WIDTH + channels, ahead, other=0.0)
        else:
            z = tl.load(inputs + i * WIDTH + channels, mask, other=0.0).to(tl.float32)
            base = tl.load(residual + at + i * WIDTH + channels, mask, other=0.0).to(tl.float32)
        if not HOLD:
            w0, w1, w2, w3 = split_taps(load_taps(conv_weight, channels, mask), BLOCK)
        if True if ALONE else (work >> i) & 1:
            past = s0 if ALONE else tl.where(first + i < live, s0, 0.0)
            y = z + w3 * z + past + base
            keep(y, gain, eps, hidden, normed, at + i * WIDTH + channels, mask, WIDTH)
        s0, s1, s2 = s1 + w2 * z, s2 + w1 * z, w0 * z
    if ALONE:
        spare = live + rows - 1 - program  # inert rows take the padded tokens
        if spare < tokens:
            to = tl.cast(spare, tl.int64) * WIDTH + channels
            z = tl.load(x + to, mask, other=0.0).to(tl.float32)
            y = z + w3 * z + tl.load(residual + to, mask, other=0.0).to(tl.float32)
            keep(y, gain, eps, hidden, normed, to, mask, WIDTH)


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
    alone = tokens <= rows
    programs = rows if alone else rows + triton.cdiv(tokens, config.strip)
    launchable(boundary_kernel)[(programs,)](
        x, residual, conv_weight, norm_weight, conv_pool, token_rows, slots, sources, starts,
        lengths, destination_slots, destination_offsets, hidden, normed,
        tokens, rows, conv_pool.shape[1], LAYER_UNIT.value * layer, eps,
        WIDTH=width, BLOCK=config.block, STRIP=config.strip, HOLD=config.hold, ALONE=alone,
        STAGES=1 if alone else config.stages, DESTINATIONS=destination_slots.shape[1],
        DESTINED=triton.next_power_of_2(destination_slots.shape[1]),
        num_warps=config.warps,
    )  # fmt: skip
    return hidden, normed


def compile_cases() -> list[CompileCase]:
    """Decode and extend of inkling-small, whose hidden rows every rank holds whole."""
    width, i32 = 4096, torch.int32
    cases = []
    for tokens, rows in ((1, 1), (8, 8), (128, 128), (512, 8), (2048, 8), (4096, 8)):
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
