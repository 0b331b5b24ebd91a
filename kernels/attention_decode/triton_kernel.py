# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
"""Decode attention, split over keys.

A program takes one row, one kv head and a run of key blocks; the kv head's query heads share its
tile, padded to the 16 rows of a tensor-core product. The distances of a block of consecutive keys
are consecutive too, so its relative bias is r times a slice of the bank, for all heads at once.
With several splits a second launch merges them (`combine_kernel`); a window is one program's work.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels._conv_triton import LAYER_UNIT, clamp
from inkling_engine.kernels._triton import CompileCase, launchable, launches, meta
from inkling_engine.kernels.attention_extend.triton_kernel import (
    PROCESSORS,
    combine,
    key_pointers,
    page_of,
    relative_scores,
    softmax_step,
    table_line,
    two_parts,
)

RESIDENT = 2  # programs that share a processor
MOST_SPLITS = 128


@dataclass(frozen=True)
class Config:
    """Splits of a row's keys, keys a split has at least, keys of a block, warps, stages."""

    splits: int
    least: int
    block: int
    warps: int
    stages: int


def configure(tokens: int, kv_heads: int, capacity: int, window: int, wide: bool) -> Config:
    """One full wave of programs; more when rows can be so long that one would straggle."""
    programs = tokens * kv_heads
    if wide:
        block, warps, stages = 64, 4, 2  # a part's product needs 16 keys
    elif window:
        block, warps, stages = 128, 8, 4
    else:
        block, warps, stages = 64, 4, 4
    if window:
        return Config(1, 1, block, warps, stages)
    least = 256 if programs < PROCESSORS else 512
    splits = max(RESIDENT * PROCESSORS // programs, capacity // 16384)
    splits = max(1, min(splits, triton.cdiv(capacity, least), MOST_SPLITS))
    return Config(splits, least // block, block, warps, stages)


@triton.jit
def bank_slice(rel_proj, distance, REL: tl.constexpr, RELS: tl.constexpr, EXTENT: tl.constexpr):
    """rel_proj at `distance` [PARTS, N], [PARTS, RELS, N]; anything outside the extent."""
    c = tl.arange(0, RELS)[None, :, None]
    inside = tl.minimum(tl.maximum(distance, 0), EXTENT - 1)[:, None, :]
    return tl.load(rel_proj + (tl.minimum(c, REL - 1) * EXTENT + inside))


@triton.jit
def decode_kernel(
    q, r, rel_proj, kv_pool, page_table, slots, starts, lengths, out, partial, stats,
    tokens, rows, lines, pages, layer,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    DIM: tl.constexpr, DIMS: tl.constexpr, REL: tl.constexpr, RELS: tl.constexpr,
    EXTENT: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, TABLE: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = KV_HEADS * GROUP
    SOME: tl.constexpr = BLOCK // PARTS
    SCALE: tl.constexpr = 1.4426950408889634 / DIM
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # All loads of one depth are issued together: a short step waits for nothing else.
    of = tl.minimum(row, rows - 1)
    token = clamp(tl.load(starts + of), 0, tokens)
    count = clamp(tl.load(starts + of + 1), token, tokens) - token
    live = tl.load(starts + rows)
    position = clamp(tl.load(lengths + of), 0, (2**30 if WINDOW > 0 else TABLE * PAGE) - 1)
    table = table_line(page_table, tl.load(slots + of), lines, TABLE)
    low = tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else 0
    first = low // BLOCK
    last = position // BLOCK + 1
    share = tl.maximum(tl.cdiv(last - first, SPLITS), LEAST)
    first += split * share
    last = tl.minimum(first + share, last)
    # Keys descend, so that their distances ascend and slices of the bank are read forwards.
    n = BLOCK - 1 - (tl.arange(0, PARTS)[:, None] * SOME + tl.arange(0, SOME)[None, :])
    anchor = n
    if PAGE % SOME == 0:  # one page a part
        anchor = BLOCK - SOME - tl.arange(0, PARTS)[:, None] * SOME
    page = page_of(table, first, anchor, PAGE, TABLE, BLOCK)

    g = tl.arange(0, GROUPS)
    d = tl.arange(0, DIMS)
    heads = (g < GROUP)[:, None] & (d < DIM)[None, :]
    at = (head * GROUP + g)[:, None] * DIM + d[None, :]
    if (row >= live) & (SPLITS == 1):  # the program also clears the padded token of its number
        nothing = tl.zeros((GROUPS, DIMS), out.dtype.element_ty)
        tl.store(out + tl.cast(row, tl.int64) * (HEADS * DIM) + at, nothing, heads)
    if (row >= rows) | (count == 0):
        return
    line = tl.cast(token, tl.int64) * HEADS
    if (first >= last) & (SPLITS > 1):
        stat = stats + ((line + head * GROUP + g) * SPLITS + split) * 2
        tl.store(stat, float("-inf"), g < GROUP)
        tl.store(stat + 1, 0.0, g < GROUP)
        return

    query = tl.load(q + line * DIM + at, heads, other=0.0)
    c = tl.arange(0, RELS)
    relative = r + (line + head * GROUP + g)[:, None] * REL + c[None, :]
    relative = tl.load(relative, (g < GROUP)[:, None] & (c < REL)[None, :], other=0.0)
    following = bank_slice(rel_proj, position - first * BLOCK - n, REL, RELS, EXTENT)
    query = tl.broadcast_to(query[None, :, :], (PARTS, GROUPS, DIMS))
    relative = tl.broadcast_to(relative[None, :, :], (PARTS, GROUPS, RELS))
    r_high, r_low = two_parts(relative * DIM, rel_proj.dtype.element_ty)
    maximum = tl.full((PARTS, GROUPS), -1e30, tl.float32)
    total = tl.zeros((PARTS, GROUPS), tl.float32)
    output = tl.zeros((PARTS, GROUPS, DIMS), tl.float32)
    for block in range(first, last):
        bank = following
        distance = position - block * BLOCK - n
        following = bank_slice(rel_proj, distance - BLOCK, REL, RELS, EXTENT)
        seen = distance >= 0
        if WINDOW > 0:
            seen &= distance < WINDOW
        where = key_pointers(
            kv_pool, page, block, n, d, layer, pages, head, KV_HEADS, PAGE, BLOCK, DIM
        )
        page = page_of(table, block + 1, anchor, PAGE, TABLE, BLOCK)
        k = tl.load(where, (d < DIM)[None, None, :], other=0.0)
        scores = relative_scores(r_high, r_low, bank)
        if (WINDOW == 0) | (WINDOW > EXTENT):
            scores = tl.where(distance[:, None, :] < EXTENT, scores, 0.0)
        scores = tl.dot(query, tl.trans(k, 0, 2, 1), scores, input_precision="ieee")
        scores = tl.where(seen[:, None, :], scores, float("-inf"))
        read = seen[:, :, None] & (d < DIM)[None, None, :]
        v = tl.load(where + KV_HEADS * PAGE * DIM, read, other=0.0)
        maximum, total, output = softmax_step(scores, SCALE, maximum, total, output, v)
    if GROUP * 2 <= GROUPS:  # half of the tile is padding
        HALF: tl.constexpr = GROUPS // 2
        maximum, _ = tl.split(tl.permute(tl.reshape(maximum, (PARTS, 2, HALF)), (0, 2, 1)))
        total, _ = tl.split(tl.permute(tl.reshape(total, (PARTS, 2, HALF)), (0, 2, 1)))
        output = tl.permute(tl.reshape(output, (PARTS, 2, HALF, DIMS)), (0, 2, 3, 1))
        output, _ = tl.split(output)
        g = tl.arange(0, HALF)
        heads = (g < GROUP)[:, None] & (d < DIM)[None, :]
        at = (head * GROUP + g)[:, None] * DIM + d[None, :]
    stat = stats + ((line + head * GROUP + g) * SPLITS + split) * 2
    highest = tl.max(maximum, 0)
    weight = tl.exp2(maximum - highest[None, :])
    all_parts = tl.sum(total * weight, 0)
    result = tl.sum(output * weight[:, :, None], 0)
    if SPLITS == 1:
        result = (result / all_parts[:, None]).to(out.dtype.element_ty)
        tl.store(out + line * DIM + at, result, heads)
    else:
        tl.store(stat, highest, g < GROUP)
        tl.store(stat + 1, all_parts, g < GROUP)
        to = (line + head * GROUP + g) * SPLITS + split
        tl.store(partial + to[:, None] * DIM + d[None, :], result, heads)


def attention_decode(
    q: Tensor,
    r: Tensor,
    rel_proj: Tensor,
    kv_pool: Tensor,
    page_table: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    layer: int,
    window: int,
) -> Tensor:
    """Attention output [T, Nq * D]; see the package docstring."""
    (tokens, heads, dim), (rel, extent), rows = q.shape, rel_proj.shape, slots.shape[0]
    (lines, table), (pages, _, kv_heads, page) = page_table.shape, kv_pool.shape[1:5]
    group, wide = heads // kv_heads, q.dtype == torch.float32
    config = configure(tokens, kv_heads, table * page, window, wide)
    out = torch.empty((tokens, heads * dim), dtype=q.dtype, device=q.device)
    share = (tokens, heads, config.splits) if config.splits > 1 else (1, 1, 1)
    partial = torch.empty((*share, dim), dtype=torch.float32, device=q.device)
    stats = torch.empty((*share, 2), dtype=torch.float32, device=q.device)
    launchable(decode_kernel)[(config.splits, kv_heads, tokens)](
        q, r, rel_proj, kv_pool, page_table, slots, starts, lengths, out, partial, stats,
        tokens, rows, lines, pages, LAYER_UNIT.value * layer,
        KV_HEADS=kv_heads, GROUP=group, GROUPS=max(16, triton.next_power_of_2(group)),
        DIM=dim, DIMS=max(16, triton.next_power_of_2(dim)),
        REL=rel, RELS=max(16, triton.next_power_of_2(rel)),
        EXTENT=extent, WINDOW=window, PAGE=page, TABLE=table,
        SPLITS=config.splits, LEAST=config.least, BLOCK=config.block, PARTS=config.warps,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    if config.splits > 1:
        combine(partial, stats, starts, out)
    return out


def compile_cases() -> list[CompileCase]:
    """Full and window layers of one rank of eight of inkling-small, and eight kv heads."""
    dim, rel, page, i32 = 128, 16, 64, torch.int32
    cases = []
    for rows, kv_heads, window, table in (
        (1, 1, 0, 1024),
        (8, 1, 0, 1024),
        (128, 1, 0, 1024),
        (1, 8, 0, 1024),
        (1, 1, 512, 42),
        (128, 1, 512, 42),
    ):
        heads = 4 * kv_heads
        cases += launches(
            f"decode-r{rows}-kv{kv_heads}-w{window}",
            attention_decode,
            meta(rows, heads, dim),
            meta(rows, heads, rel, dtype=torch.float32),
            meta(rel, window or 1024),
            meta(7, 8192, 2, kv_heads, page, dim),
            meta(129, table, dtype=i32),
            meta(rows, dtype=i32),
            meta(rows + 1, dtype=i32),
            meta(rows, dtype=i32),
            3,
            window,
        )
    return cases
