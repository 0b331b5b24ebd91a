# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
"""Extend attention over paged keys on tensor cores, with the relative bias made inside.

A program takes one kv head and a tile of consecutive tokens of one row; the kv head's query heads
are folded into the tile. Inside a tile the bias is a sheared matrix: R = r @ rel_proj has a column
a distance, the scores a column a key. So each program first writes R for its tile to a scratch
strip, every row shifted by its position, and then reads a block of the strip like a block of keys.
Keys descend within a block, so that keys, distances and the strip run the same way. Blocks beyond
the extent have no bias, blocks outside the window are not visited.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels._conv_triton import LAYER_UNIT, clamp
from inkling_engine.kernels._triton import CompileCase, follow, launchable, launches, meta, prefetch

PROCESSORS = 132  # of an H200


@triton.jit
def table_line(page_table, slot, lines, TABLE: tl.constexpr):
    """Pointer to the page table of `slot` in `page_table` [lines, TABLE]."""
    return page_table + tl.cast(clamp(slot, 0, lines - 1), tl.int64) * TABLE


@triton.jit
def page_of(table, block, n, PAGE: tl.constexpr, TABLE: tl.constexpr, BLOCK: tl.constexpr):
    """Physical page of a block of keys, or of each of its keys block * BLOCK + `n`."""
    if PAGE % BLOCK == 0:
        page = tl.load(table + (block * BLOCK // PAGE) % TABLE)
    else:
        page = tl.load(table + ((block * BLOCK + n) // PAGE) % TABLE)
    return page


@triton.jit
def key_pointers(
    kv_pool, page, block, n, d, layer, pages, head,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Pointers [.., N, D] to the keys block * BLOCK + `n` of a kv head, on `page`."""
    place = tl.cast(layer // LAYER_UNIT, tl.int64) * pages + clamp(page, 0, pages - 1)
    line = (place * (2 * KV_HEADS) + head) * PAGE
    axis: tl.constexpr = len(n.shape)
    if PAGE % BLOCK == 0:
        start = kv_pool + (line + block * BLOCK % PAGE) * DIM
        pointers = start + (tl.expand_dims(n, axis) * DIM + d)
    else:
        line += (block * BLOCK + n) % PAGE
        pointers = kv_pool + (tl.expand_dims(line, axis) * DIM + d)
    return pointers


@triton.jit
def prefetch_keys(
    kv_pool, page, block, n, layer, pages, head, KV_HEADS: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Fetch the keys block * BLOCK + `n` and their values to L2."""
    SPAN: tl.constexpr = 1024 // kv_pool.dtype.element_ty.primitive_bitwidth
    d = tl.minimum(tl.arange(0, (DIMS + SPAN - 1) // SPAN) * SPAN, DIM - 1)
    keys = key_pointers(kv_pool, page, block, n, d, layer, pages, head, KV_HEADS, PAGE, BLOCK, DIM)
    prefetch(keys)
    prefetch(keys + KV_HEADS * PAGE * DIM)


@triton.jit
def two_parts(x, dtype: tl.constexpr):
    """`x` as a sum of two values of `dtype`; products of both with a `dtype` are all but fp32."""
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)


@triton.jit
def relative_scores(high, low, bank):
    """r [.., M, c] in two parts times `bank` [.., c, N], fp32."""
    scores = tl.dot(high, bank, input_precision="ieee")
    if bank.dtype != tl.float32:
        scores = tl.dot(low, bank, scores, input_precision="ieee")
    return scores


@triton.jit
def softmax_step(scores, scale, maximum, total, output, values):
    """One block of keys in the running softmax of scores * scale (base 2); -inf is not seen.

    Returns the new maximum, total and output. A finite first maximum keeps a block without a
    visible key out of the result.
    """
    axis: tl.constexpr = len(scores.shape) - 1
    higher = tl.maximum(maximum, tl.max(scores, axis) * scale)
    decay = tl.exp2(maximum - higher)
    weights = tl.exp2(scores * scale - tl.expand_dims(higher, axis))
    total = total * decay + tl.sum(weights, axis)
    output = output * tl.expand_dims(decay, axis)
    output = tl.dot(weights.to(values.dtype), values, output, input_precision="ieee")
    return higher, total, output


@triton.jit
def find_tile(counts, tile, TOKENS: tl.constexpr):
    """Row of the `tile`-th tile of TOKENS, its place in the row, and how many tiles there are."""
    tiles = tl.cdiv(counts, TOKENS)
    past = tl.cumsum(tiles) <= tile
    return tl.sum(past.to(tl.int32)), tile - tl.sum(tl.where(past, tiles, 0)), tl.sum(tiles)


@triton.jit
def write_strip(
    strip, r, rel_proj, mask, shift, distances, columns,
    REL: tl.constexpr, RELS: tl.constexpr, EXTENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write R (base 2, zeros outside the extent) for [0, distances) to a strip of `columns`.

    `strip` and `r`, [M, 1] each, point to a line's first column and vector; a distance is in
    column distance + `shift`.
    """
    c = tl.arange(0, RELS)
    vectors = tl.load(r + c[None, :], mask & (c < REL)[None, :], other=0.0)
    high, low = two_parts(vectors * 1.4426950408889634, rel_proj.dtype.element_ty)
    for first in range(0, distances, BLOCK):
        distance = first + tl.arange(0, BLOCK)
        line = tl.minimum(c, REL - 1)[:, None] * EXTENT
        bank = tl.load(rel_proj + line + tl.minimum(distance, EXTENT - 1)[None, :])
        values = relative_scores(high, low, bank)
        values = tl.where((distance < EXTENT)[None, :], values, 0.0).to(strip.dtype.element_ty)
        column = shift + distance[None, :]
        tl.store(strip + column, values, mask & (column < columns))


@triton.jit
def extend_kernel(
    q, r, rel_proj, kv_pool, page_table, slots, starts, lengths, out, strips, partial, stats,
    tokens, rows, lines, pages, layer,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    DIM: tl.constexpr, DIMS: tl.constexpr, REL: tl.constexpr, RELS: tl.constexpr,
    EXTENT: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, TABLE: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    STRIP: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    follow()
    HEADS: tl.constexpr = KV_HEADS * GROUP
    LINES: tl.constexpr = TOKENS * GROUPS
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if WINDOW == 0:
        tile = tl.num_programs(0) - 1 - tile  # a row's last tiles see most keys: they begin first
    of = tl.arange(0, ROWS)
    begins = clamp(tl.load(starts + of, of < rows, other=0), 0, tokens)
    counts = clamp(tl.load(starts + of + 1, of < rows, other=0), begins, tokens) - begins
    row, place, tiles = find_tile(counts, tile, TOKENS)
    m = tl.arange(0, LINES)
    i, g = m // GROUPS, m % GROUPS
    d = tl.arange(0, DIMS)
    heads = (i * HEADS + head * GROUP + g)[:, None]  # lines of q, r and out
    if tile >= tiles:  # programs without a tile clear the padded tokens
        first = clamp(tl.load(starts + rows), 0, tokens) + (tile - tiles) * TOKENS
        exists = (g < GROUP)[:, None] & (first + i < tokens)[:, None] & (d < DIM)[None, :]
        to = out + tl.cast(first, tl.int64) * (HEADS * DIM) + heads * DIM + d[None, :]
        if SPLITS == 1:
            tl.store(to, tl.zeros((LINES, DIMS), out.dtype.element_ty), exists)
        return

    first = tl.sum(tl.where(of == row, begins, 0)) + place * TOKENS
    count = tl.sum(tl.where(of == row, counts, 0)) - place * TOKENS
    line = tl.cast(first, tl.int64) * HEADS
    exists = ((i < count) & (g < GROUP))[:, None]
    MOST: tl.constexpr = 2**30 if WINDOW > 0 else TABLE * PAGE
    start = clamp(tl.load(lengths + row) + place * TOKENS, 0, MOST - 1)
    last = tl.minimum(start + tl.minimum(count, TOKENS), MOST) - 1
    position = (start + i)[:, None]
    low = tl.maximum(start - WINDOW + 1, FIRST) if WINDOW > 0 else FIRST
    begin, end = low // BLOCK, last // BLOCK + 1
    edge = end * BLOCK - 1  # the key of the strip's column 0
    near = tl.maximum(end - ((edge - start + EXTENT - 1) // BLOCK + 1), begin)
    share = tl.maximum(tl.cdiv(end - begin, SPLITS), LEAST)
    begin = tl.minimum(begin + split * share, near)
    if split < SPLITS - 1:
        near = tl.minimum(begin + share, near)
        end = near
    if (begin >= end) & (SPLITS > 1):
        stat = stats + (line * SPLITS + split) * 2 + heads * (SPLITS * 2)
        tl.store(stat, tl.full((LINES, 1), float("-inf"), tl.float32), exists)
        tl.store(stat + 1, tl.zeros((LINES, 1), tl.float32), exists)
        return

    if strips.dtype.element_ty == tl.bfloat16:  # the same bytes hold R three bits finer
        strips = strips.to(tl.pointer_type(tl.float16), bitcast=True)
    strip = strips + (tl.cast(tile, tl.int64) * KV_HEADS + head) * (LINES * STRIP)
    strip += m[:, None] * STRIP
    if near < end:
        distances = last + 1 - near * BLOCK
        if (WINDOW > 0) & (WINDOW <= EXTENT):
            distances = tl.minimum(distances, WINDOW)
        write_strip(
            strip, r + line * REL + heads * REL, rel_proj, exists, edge - position, distances,
            (end - near) * BLOCK, REL, RELS, EXTENT, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()
    inside, at = (d < DIM)[None, :], heads * DIM + d[None, :]
    query = tl.load(q + line * DIM + at, exists & inside, other=0.0)
    table = table_line(page_table, tl.load(slots + row), lines, TABLE)
    maximum, total = tl.full((LINES,), -1e30, tl.float32), tl.zeros((LINES,), tl.float32)
    output = tl.zeros((LINES, DIMS), tl.float32)
    n = BLOCK - 1 - tl.arange(0, BLOCK)
    SCALE: tl.constexpr = 1.4426950408889634 / DIM
    page = page_of(table, begin, n, PAGE, TABLE, BLOCK)
    if (WINDOW == 0) | (WINDOW > EXTENT):
        for block in range(begin, near):
            where = key_pointers(
                kv_pool, page, block, n, d, layer, pages, head, KV_HEADS, PAGE, BLOCK, DIM
            )
            page = page_of(table, block + 1, n, PAGE, TABLE, BLOCK)
            k = tl.load(where, inside, other=0.0)
            scores = tl.dot(query, tl.trans(k), input_precision="ieee")
            real = inside
            if WINDOW > 0:
                seen = position - block * BLOCK - n[None, :] < WINDOW
                scores = tl.where(seen, scores, float("-inf"))
            if FIRST > 0:
                scores = tl.where((block * BLOCK + n >= FIRST)[None, :], scores, float("-inf"))
            if (WINDOW > 0) | (FIRST > 0):
                real &= (block * BLOCK + n >= low)[:, None]
            v = tl.load(where + KV_HEADS * PAGE * DIM, real, other=0.0)
            maximum, total, output = softmax_step(scores, SCALE, maximum, total, output, v)
    for block in range(near, end):
        where = key_pointers(
            kv_pool, page, block, n, d, layer, pages, head, KV_HEADS, PAGE, BLOCK, DIM
        )
        page = page_of(table, block + 1, n, PAGE, TABLE, BLOCK)
        k = tl.load(where, inside, other=0.0)
        bias = tl.load(strip + ((end - 1 - block) * BLOCK + tl.arange(0, BLOCK))[None, :])
        scores = tl.dot(query, tl.trans(k), input_precision="ieee")
        scores = scores * SCALE + bias.to(tl.float32)
        distance = position - block * BLOCK - n[None, :]
        seen = distance.to(tl.uint32) < WINDOW if WINDOW > 0 else distance >= 0
        keys = block * BLOCK + n
        if FIRST > 0:
            seen &= (keys >= FIRST)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        real = ((keys >= low) & (keys <= last))[:, None]
        v = tl.load(where + KV_HEADS * PAGE * DIM, real & inside, other=0.0)
        maximum, total, output = softmax_step(scores, 1.0, maximum, total, output, v)
    if SPLITS == 1:
        output = (output / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + line * DIM + at, output, exists & inside)
    else:
        stat = stats + (line * SPLITS + split) * 2 + heads * (SPLITS * 2)
        tl.store(stat, maximum[:, None], exists)
        tl.store(stat + 1, total[:, None], exists)
        to = partial + (line * SPLITS + split) * DIM + (heads * (SPLITS * DIM) + d[None, :])
        tl.store(to, output, exists & inside)


@triton.jit
def combine_kernel(
    partial, stats, starts, out, rows,
    HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of COLUMNS values of one (token, head); zeros for a padded token."""
    follow()
    token, head = tl.program_id(0), tl.program_id(1)
    line = tl.cast(token, tl.int64) * HEADS + head
    d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    s = tl.arange(0, PADDED)
    stat = stats + (line * SPLITS + s) * 2
    peak = tl.load(stat, s < SPLITS, other=float("-inf"))
    total = tl.load(stat + 1, s < SPLITS, other=0.0)
    weight = tl.exp2(peak - tl.max(peak))
    held = (peak > float("-inf"))[:, None] & (d < DIM)[None, :]
    at = partial + (line * SPLITS + s)[:, None] * DIM + d[None, :]
    output = tl.sum(weight[:, None] * tl.load(at, held, other=0.0), 0) / tl.sum(weight * total)
    live = token < tl.load(starts + rows)
    output = tl.where(live, output, 0.0).to(out.dtype.element_ty)
    tl.store(out + line * DIM + d, output, d < DIM)


def combine(partial: Tensor, stats: Tensor, starts: Tensor, out: Tensor) -> None:
    """Launch the merge of `partial` [T, Nq, splits, D] into `out`."""
    tokens, heads, splits, dim = partial.shape
    padded = triton.next_power_of_2(splits)
    columns = min(triton.next_power_of_2(dim), max(32, 4096 // padded))
    launchable(combine_kernel)[(tokens, heads, triton.cdiv(dim, columns))](
        partial, stats, starts, out, starts.shape[0] - 1,
        HEADS=heads, DIM=dim, SPLITS=splits, PADDED=padded, COLUMNS=columns, num_warps=4,
    )  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Lines (tokens x heads) of a tile, keys of a block, splits, blocks a split has at least."""

    lines: int
    block: int
    splits: int
    least: int
    warps: int
    stages: int


def configure(
    tokens: int, kv_heads: int, groups: int, capacity: int, window: int, wide: bool
) -> Config:
    """Tiles of 128 lines where they fill the device, else of 64; splits where even those do not.

    Two splits at least where one would leave no program for a processor whose tile sees few keys.
    H200, full attention of 2048 and 4096 tokens that end at 8192: 124 and 175 us, without 129 and 195.
    """
    full = tokens * groups * kv_heads >= 96 * PROCESSORS
    lines = max(groups, 32 if wide else 128 if full else 64)
    programs = triton.cdiv(tokens * groups, lines) * kv_heads
    splits = 1
    if not window and programs <= PROCESSORS:
        splits = min(max(2, PROCESSORS // programs), triton.cdiv(capacity, 256), 8)
    if wide:
        return Config(lines, 32, splits, 32, warps=4, stages=2)
    return Config(lines, 64, splits, 16, warps=lines // 16, stages=3)


def attention_extend(
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
    first: int,
) -> Tensor:
    """Attention output [T, Nq * D]; see the package docstring."""
    (tokens, heads, dim), (rel, extent), rows = q.shape, rel_proj.shape, slots.shape[0]
    (lines, table), (pages, _, kv_heads, page) = page_table.shape, kv_pool.shape[1:5]
    group, wide = heads // kv_heads, q.dtype == torch.float32
    groups = triton.next_power_of_2(group)
    config = configure(tokens, kv_heads, groups, table * page, window, wide)
    tile = config.lines // groups
    tiles = triton.cdiv(tokens, tile) + rows  # every row's last one may be short
    width = triton.cdiv(extent + tile + config.block - 2, config.block) * config.block
    strips = torch.empty((tiles, kv_heads, config.lines, width), dtype=q.dtype, device=q.device)
    out = torch.empty((tokens, heads * dim), dtype=q.dtype, device=q.device)
    share = (tokens, heads, config.splits) if config.splits > 1 else (1, 1, 1)
    partial = torch.empty((*share, dim), dtype=torch.float32, device=q.device)
    stats = torch.empty((*share, 2), dtype=torch.float32, device=q.device)
    launchable(extend_kernel)[(tiles, kv_heads, config.splits)](
        q, r, rel_proj, kv_pool, page_table, slots, starts, lengths, out, strips, partial, stats,
        tokens, rows, lines, pages, LAYER_UNIT.value * layer,
        KV_HEADS=kv_heads, GROUP=group, GROUPS=groups,
        DIM=dim, DIMS=max(16, triton.next_power_of_2(dim)),
        REL=rel, RELS=max(16, triton.next_power_of_2(rel)),
        EXTENT=extent, WINDOW=window, PAGE=page, TABLE=table,
        SPLITS=config.splits, LEAST=config.least, ROWS=triton.next_power_of_2(rows),
        TOKENS=tile, STRIP=width, BLOCK=config.block, FIRST=first,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    if config.splits > 1:
        combine(partial, stats, starts, out)
    return out


def compile_cases() -> list[CompileCase]:
    """Full and window layers of one rank of eight of inkling-small."""
    heads, kv_heads, dim, rel, page, rows, i32 = 4, 1, 128, 16, 64, 8, torch.int32
    cases = []
    for tokens, window, table, first in (
        (512, 0, 1024, 0),
        (512, 512, 42, 0),
        (2048, 0, 1024, 0),
        (4096, 0, 1024, 0),
        (4096, 512, 73, 0),
        (136, 0, 1024, 8),
        (136, 512, 42, 8),
    ):
        cases += launches(
            f"extend-t{tokens}-w{window}" + (f"-first{first}" if first else ""),
            attention_extend,
            meta(tokens, heads, dim),
            meta(tokens, heads, rel, dtype=torch.float32),
            meta(rel, window or 1024),
            meta(7, 8192, 2, kv_heads, page, dim),
            meta(129, table, dtype=i32),
            meta(rows, dtype=i32),
            meta(rows + 1, dtype=i32),
            meta(rows, dtype=i32),
            3,
            window,
            first,
        )
    return cases
