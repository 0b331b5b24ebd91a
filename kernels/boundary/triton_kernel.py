# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
"""The boundary in one launch, behind that of the sum over ranks if there are several.

There are programs of rows and programs of strips of tokens. A program holds whole rows of H channels
in registers. The first R programs each walk the first three tokens of a row, starting from its old
inputs, and keep the conv state; the others walk a strip of consecutive tokens, each for the tokens
that no row program took. A step with a row a token has row programs alone. The convolution is carried
as three partial sums, so a strip reads its weights and every input once. Loads stand in the order in
which their addresses are known, and taps are rearranged between threads last: that waits for all that
was loaded before.

A step of few tokens, several a row, has a kernel of its own (`triton_few.py`), and so has a step with a
row a token over ranks (`triton_ranks.py`).
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
    entry,
    known_length,
    renew_row,
    renewal,
    ring_at,
    save_snapshots,
    turns,
    wants_snapshots,
)
from inkling_engine.kernels._exchange import exchange_words
from inkling_engine.kernels._exchange_launches import layout, pushed, summed
from inkling_engine.kernels._exchange_poll import VECTOR
from inkling_engine.kernels._triton import (
    CompileCase,
    begin_next,
    follow,
    follow_as,
    launchable,
    launches,
    meta,
)
from inkling_engine.kernels.boundary.triton_few import few_boundary_kernel
from inkling_engine.kernels.boundary.triton_ranks import ranks_boundary_kernel
from inkling_engine.kernels.boundary.triton_walk import (
    history,
    keep,
    load_taps,
    partial_sums,
    split_taps,
    walked,
)


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


def few_warps(rows: int, most: int) -> int:
    """Of a program of `few_boundary_kernel`; a round of one row takes 29 us less in 8 warps than in 16."""
    return min(8, most) if rows == 1 else most


@dataclass(frozen=True)
class RanksConfig:
    """Warps, whether threads poll two vectors at once, whether a warp's last thread polls first."""

    warps: int
    pairs: bool
    scout: bool

    def sizes(self, row_bytes: int) -> dict[str, int]:
        """What the launch is told; rows of that many bytes may have no two vectors for a thread."""
        pairs = self.pairs and row_bytes > VECTOR.value * 32 * self.warps
        return {"PAIRS": pairs, "SCOUT": self.scout, "num_warps": self.warps}


def configure_ranks(rows: int, width: int) -> RanksConfig:
    """Of a step with a row a token, over ranks.

    On two H200, 4096 wide: 2.96, 3.72, 4.32 and 6.72 us at 1, 8, 32 and 128 rows. In 16 warps one row takes
    0.2 us more, with pairs 8 rows 0.4, with a scout 0.8; without one 32 rows take 0.6 more.
    """
    warps = 8 if rows <= 16 else 16
    most = triton.next_power_of_2(width) * warps // 4096
    return RanksConfig(max(1, min(warps, most)), pairs=rows == 1, scout=rows > 16)


@triton.jit
def strip_work(
    token_rows, starts, begin, tokens, rows, live, STRIP: tl.constexpr, RING: tl.constexpr
):
    """A bit for each token of the strip at `begin` that no row program computes, and one for each of
    these that the strip leaves in its row's ring."""
    i = tl.arange(0, STRIP)
    token, known = begin + i, begin + i < live
    row = clamp(tl.load(token_rows + token, known, other=0), 0, rows - 1)
    first = tl.load(starts + row, known, other=0)
    count = tl.load(starts + row + 1, known, other=0) - first
    late = token - first >= walked(count, STRIP, RING)
    wanted = (token < tokens) & ((token >= live) | late)
    left = known & late & turns(token - first, count, RING)
    return tl.sum(wanted.to(tl.int32) << i), tl.sum(left.to(tl.int32) << i)


@triton.jit
def boundary_kernel(
    x, residual, conv_weight, norm_weight, conv_pool, token_rows, slots, sources, starts, lengths,
    destination_slots, destination_offsets, hidden, normed,
    tokens, rows, pool_slots, layer, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, STRIP: tl.constexpr, HOLD: tl.constexpr,
    ALONE: tl.constexpr, STAGES: tl.constexpr, DESTINATIONS: tl.constexpr,
    DESTINED: tl.constexpr, RING: tl.constexpr, HASTY: tl.constexpr,
):  # fmt: skip
    if HASTY:
        begin_next()
    channels = tl.arange(0, BLOCK)
    mask = channels < WIDTH
    if HOLD:
        taps = load_taps(conv_weight, channels, mask)
    gain = tl.load(norm_weight + channels, mask, other=0.0)
    eps = tl.cast(eps, tl.float32)  # a compiled program passes it in double precision
    program = tl.program_id(0)
    first = tl.maximum(program - rows, 0) * STRIP
    row = tl.minimum(program, rows - 1)
    if (STRIP == 1) & (not ALONE):
        of = clamp(tl.load(token_rows + first, first < tokens, other=0), 0, rows - 1)
        row = tl.where(program < rows, row, of)
    live = clamp(tl.load(starts + rows), 0, tokens)
    begin, stop = tl.load(starts + row), tl.load(starts + row + 1)
    source, slot = tl.load(sources + row), tl.load(slots + row)
    length = known_length(tl.load(lengths + row))
    work = 7
    left = 0
    if not ALONE:
        follow()
        if program >= rows:
            work, left = strip_work(token_rows, starts, first, tokens, rows, live, STRIP, RING)
        if work == 0:
            return

    count = tl.minimum(tokens - first, STRIP)
    row_count = 0
    index = 0
    if program < rows:
        first = clamp(begin, 0, tokens)
        row_count = clamp(stop, first, tokens) - first
        count = row_count if ALONE else tl.minimum(row_count, walked(row_count, STRIP, RING))
    elif (STRIP == 1) & (first < live):
        index = first - begin
    else:
        length = -1
    moved = source != slot
    at = tl.cast(first, tl.int64) * WIDTH
    inputs = x + at
    old = ring_at(conv_pool, layer, pool_slots, source, RING, WIDTH)
    ring = ring_at(conv_pool, layer, pool_slots, slot, RING, WIDTH)
    wanted = wants_snapshots(destination_slots, row, DESTINATIONS, DESTINED)
    if ALONE:  # only x comes from the launch before
        some = channels < tl.where(count > 0, WIDTH, 0)
        carried = tl.load(residual + at + channels, some, other=0.0)
    z0 = history(old, length, index, inputs, first, 0, channels, RING, WIDTH)
    z1 = history(old, length, index, inputs, first, 1, channels, RING, WIDTH)
    z2 = history(old, length, index, inputs, first, 2, channels, RING, WIDTH)
    if ALONE:
        if HOLD:
            w0, w1, w2, w3 = split_taps(taps, BLOCK)
            s0, s1, s2 = partial_sums(z0, z1, z2, w0, w1, w2)
        follow_as(HASTY)
    n0 = renewal(old, length, inputs, 0, row_count, moved, channels, WIDTH, RING, WIDTH, WIDTH)
    n1 = renewal(old, length, inputs, 1, row_count, moved, channels, WIDTH, RING, WIDTH, WIDTH)
    n2 = renewal(old, length, inputs, 2, row_count, moved, channels, WIDTH, RING, WIDTH, WIDTH)
    if STAGES == 1:
        some = channels < tl.where(count > 0, WIDTH, 0)
        following = tl.load(inputs + channels, some, other=0.0)
        if not ALONE:
            carried = tl.load(residual + at + channels, some, other=0.0)
    if row_count > 0:
        if wanted:
            save_snapshots(
                old, length, inputs, row_count, channels, WIDTH, RING, WIDTH, WIDTH, conv_pool,
                layer, pool_slots, destination_slots, destination_offsets, row, DESTINATIONS,
            )  # fmt: skip
        renew_row(
            ring, n0, n1, n2, length, row_count, moved, channels, WIDTH, RING, WIDTH
        )  # fmt: skip
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
        if RING > 3:
            own = program < rows
            if tl.where(own, turns(i, row_count, RING).to(tl.int32), (left >> i) & 1) != 0:
                of = tl.where(own, row, clamp(tl.load(token_rows + first + i), 0, rows - 1))
                to = ring_at(conv_pool, layer, pool_slots, tl.load(slots + of), RING, WIDTH)
                place = first + i - tl.load(starts + of) + 3
                to += entry(known_length(tl.load(lengths + of)), place, RING) * WIDTH
                tl.store(to + channels, z.to(x.dtype.element_ty), mask)
        s0, s1, s2 = s1 + w2 * z, s2 + w1 * z, w0 * z
    if ALONE:
        spare = live + rows - 1 - program  # inert rows take the padded tokens
        if spare < tokens:
            to = tl.cast(spare, tl.int64) * WIDTH + channels
            z = tl.load(x + to, mask, other=0.0).to(tl.float32)
            y = z + w3 * z + tl.load(residual + to, mask, other=0.0).to(tl.float32)
            keep(y, gain, eps, hidden, normed, to, mask, WIDTH)


def sizes_of(config: Config, width: int, ring: int, destinations: int) -> dict[str, int]:
    """What all launches are told by name."""
    return {
        "WIDTH": width,
        "BLOCK": config.block,
        "RING": ring,
        "DESTINATIONS": destinations,
        "DESTINED": triton.next_power_of_2(destinations),
        "num_warps": config.warps,
    }


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
    exchange: Tensor,
    step_counter: Tensor,
    rank: Tensor,
    layer: int,
    call: int,
    calls: int,
    eps: float,
    world: int,
) -> tuple[Tensor, Tensor]:
    """Hidden state and its norm; see the package docstring."""
    (tokens, width), rows, (pool_slots, ring) = x.shape, slots.shape[0], conv_pool.shape[1:3]
    config, unit = configure(tokens, width), LAYER_UNIT.value
    sizes = sizes_of(config, width, ring, destination_slots.shape[1])
    hidden, normed = torch.empty_like(x), torch.empty_like(x)
    row_inputs = slots, sources, starts, lengths, destination_slots, destination_offsets
    ranks, alone = (peers, exchange, step_counter, rank), tokens <= rows
    few, hasty = config.hold and config.strip == 1 and not alone, rows == 1
    held, numbers = (residual, conv_weight, norm_weight, conv_pool), (tokens, rows, pool_slots)
    if world > 1 and alone and config.hold and pushed(x, exchange, world):
        sizes |= configure_ranks(rows, width).sizes(config.block * x.itemsize)
        launchable(ranks_boundary_kernel)[(rows,)](
            x, *held, *row_inputs, *ranks, hidden, normed, *numbers, unit * layer, unit * call,
            eps, **sizes, **layout(exchange, calls, world),
        )  # fmt: skip
        return hidden, normed
    if world > 1:
        x = summed(x, ranks, call, calls, world)
    programs = rows if alone else rows + triton.cdiv(tokens, config.strip)
    given = (x, *held, token_rows, *row_inputs, hidden, normed, *numbers, unit * layer, eps)
    if few:
        sizes |= {"HASTY": hasty, "num_warps": few_warps(rows, config.warps)}
        launchable(few_boundary_kernel)[(programs,)](*given, **sizes)
        return hidden, normed
    sizes |= {"STRIP": config.strip, "HOLD": config.hold, "ALONE": alone, "HASTY": alone and hasty}
    launchable(boundary_kernel)[(programs,)](*given, STAGES=1 if alone else config.stages, **sizes)
    return hidden, normed


def compile_cases() -> list[CompileCase]:
    """Decode, extend and verification of eight drafts of inkling-small, whose hidden rows every
    rank holds whole."""
    width, i32 = 4096, torch.int32
    i64, cases = {"dtype": torch.int64}, []
    sizes = ((1, 1), (8, 8), (128, 128), (512, 8), (2048, 8), (4096, 8))
    drafting = ((9, 1, 11), (72, 8, 11), (4096, 8, 11))
    worlds = (
        (1, 1, 3, 2),
        (1, 1, 3, 8),
        (8, 8, 3, 2),
        (32, 32, 3, 2),
        (128, 128, 3, 2),
        (72, 8, 11, 2),
        (4096, 8, 3, 2),
        (4096, 8, 3, 8),
    )
    alone = [(*size, 3, 1) for size in sizes] + [(*size, 1) for size in drafting]
    every = [(case, torch.bfloat16) for case in (*alone, *worlds)]
    for (tokens, rows, ring, world), dtype in (*every, ((4096, 8, 3, 2), torch.float32)):
        own = {"dtype": dtype}
        cases += launches(
            f"boundary-t{tokens}"
            + (f"-ring{ring}" if ring > 3 else "")
            + (f"-tp{world}" if world > 1 else "")
            + ("-fp32" if dtype == torch.float32 else ""),
            boundary,
            meta(tokens, width, **own),
            meta(tokens, width, **own),
            meta(width, 4, dtype=torch.float32),
            meta(width, **own),
            meta(42, 160, ring, width, **own),
            meta(tokens, dtype=i32),
            *(meta(rows, dtype=i32) for _ in range(2)),
            meta(rows + 1, dtype=i32),
            meta(rows, dtype=i32),
            *(meta(rows, 1 + tokens // 512, dtype=i32) for _ in range(2)),
            meta(8, **i64),
            meta(exchange_words(dtype.itemsize * tokens * width, world if world > 1 else 0), **i64),
            meta(4, **i64),
            meta(4, dtype=i32),
            *(3, 7, 86, 1e-6, world),
        )
    return cases
