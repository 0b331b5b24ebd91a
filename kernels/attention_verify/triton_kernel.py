# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
"""Attention of a verify step, split over keys, in one launch.

A program takes up to TILE tokens of a row, one kv head and a run of key blocks; a line of its tile is
a query head of one of the tokens. A block of keys meets each token at distances of its own, one further from
token to token, so r times a slice of the bank that is as wide as all of them holds every line's
bias, and line by line a gather shifts it over the keys. Splits meet as in `attention_decode`; of the
lines each of the last splits merges some.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels._conv_triton import LAYER_UNIT, clamp
from inkling_engine.kernels._triton import (
    INTERPRETED,
    CompileCase,
    follow,
    launchable,
    launches,
    loaded,
    meta,
)
from inkling_engine.kernels.attention_decode.merge_triton import (
    RAISED,
    await_flags,
    merged_lines,
)
from inkling_engine.kernels.attention_extend.triton_kernel import (
    PROCESSORS,
    key_pointers,
    page_of,
    prefetch_keys,
    relative_scores,
    softmax_step,
    table_line,
    two_parts,
)

MOST_SPLITS = 128
MERGED = 8192  # values that a split merges at a time
SHARES = (4, 2)  # of a kv head's query heads, where blocks leave so many processors free
TILE = 16  # tokens of a row at most: all of a row in a depth of eight


@dataclass(frozen=True)
class Config:
    """Splits of a row's keys, splits that merge, warps, stages.

    `single`: no split has more than one block. `shares`: programs of a kv head, some query heads each.
    """

    splits: int
    mergers: int
    warps: int
    stages: int
    single: bool = False
    shares: int = 1


def configure(
    rows: int, kv_heads: int, group: int, held: int, capacity: int, window: int, wide: bool
) -> Config:
    """Two programs a processor; a block each in windows of few rows.

    Nine tokens a row on an H200: eight warps on 64 lines take 49 us where four take 34 (8 rows of
    8192 keys), 25 if there are two programs a processor, and merging is slow in few splits: 36, 25
    and 20 us in 2, 4 and 8 (a window, eight warps). One row takes 9.0 us in blocks of their own, 11.5
    in twos. A round of one row takes 52 us less with a query head a program in windows than with two, 57
    more with all. Loops of so many splits are short: 1 us less at 8 rows without stages.
    """
    programs, warps = rows * kv_heads, max(4, held * triton.next_power_of_2(group) // 16)
    if window:
        blocks = triton.cdiv(window + held - 2, 64) + 1
        splits = blocks if programs * blocks <= PROCESSORS else 1
        single = splits == blocks
        fit = (n for n in SHARES if n * programs * splits <= PROCESSORS and group % n == 0)
        shares = next(fit, 1) if single else 1
        stages = 1 if wide or single else 2
        return Config(splits, 16, max(4, warps // shares), stages, single, shares)
    splits = max(256 // programs, capacity // 16384)
    splits = max(1, min(splits, triton.cdiv(capacity, 128), MOST_SPLITS))
    mergers = min(64, triton.next_power_of_2(splits))
    return Config(splits, mergers, warps, stages=1 if wide or splits >= 32 else 2)


@triton.jit
def load_keys(
    kv_pool, page, block, n, low, last, layer, pages, head, KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """The keys block * BLOCK + `n`, and the values of those from `low` to `last`, zeros elsewhere."""
    d, keys = tl.arange(0, DIMS), block * BLOCK + n
    at = key_pointers(kv_pool, page, block, n, d, layer, pages, head, KV_HEADS, PAGE, BLOCK, DIM)
    inside = (d < DIM)[None, :]
    read = ((keys >= low) & (keys <= last))[:, None] & inside
    k = tl.load(at, inside, other=0.0)
    return k, tl.load(at + KV_HEADS * PAGE * DIM, read, other=0.0)


@triton.jit
def bank_at(
    rel_proj, base, REL: tl.constexpr, RELS: tl.constexpr, EXTENT: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """rel_proj at the distances base + column, 0 outside the extent, [RELS, COLUMNS]."""
    c = tl.arange(0, RELS)[:, None]
    distance = base + tl.arange(0, COLUMNS)[None, :]
    inside = (c < REL) & (distance >= 0) & (distance < EXTENT)
    return tl.load(rel_proj + (c * EXTENT + distance), inside, other=0.0)


@triton.jit
def bias_of(r_high, r_low, bank, beyond, shift):
    """Relative scores [LINES, BLOCK] from r in two parts, the bank at a block's distances from a row's
    first token, and at those that follow; `shift` [LINES, 1] is a line's token in its row."""
    BLOCK: tl.constexpr = bank.shape[1]
    columns = tl.arange(0, BLOCK)[None, :] + shift
    inside = tl.gather(relative_scores(r_high, r_low, bank), columns % BLOCK, 1)
    outside = relative_scores(r_high, r_low, beyond)
    outside = tl.gather(outside, columns % beyond.shape[1], 1)
    return tl.where(columns < BLOCK, inside, outside)


@triton.jit
def attend_lines(
    query, k, v, scores, position, keys, maximum, total, output,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """One block of keys in the running softmax of all lines; `scores` holds the bias."""
    scores = tl.dot(query, tl.trans(k), scores, input_precision="ieee")
    distance = position - keys[None, :]
    seen = distance.to(tl.uint32) < WINDOW if WINDOW > 0 else distance >= 0
    if FIRST > 0:
        seen &= (keys >= FIRST)[None, :]
    scores = tl.where(seen, scores, float("-inf"))
    return softmax_step(scores, SCALE, maximum, total, output, v)


@triton.jit
def merge_lines(
    partial, stats, flag, out, active, first, mergers, count,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    DIMS: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Wait for the flags of `active` splits and write each `mergers`-th slice of SLICE lines.

    `partial` [LINES, SPLITS, DIM] and `stats` [LINES, SPLITS, 2] are of one row and kv head.
    """
    s = tl.arange(0, PADDED)
    here = s < active
    await_flags(flag, s, here)
    d = tl.arange(0, DIMS)
    for part in range(first, tl.cdiv(count * GROUPS, SLICE), mergers):
        m = part * SLICE + tl.arange(0, SLICE)
        live = (m < count * GROUPS) & (m % GROUPS < GROUP)
        held = here[:, None] & live[None, :]
        line = m[None, :] * SPLITS + s[:, None]
        merged = merged_lines(partial, stats, line, held, d, DIM).to(out.dtype.element_ty)
        to = out + ((m // GROUPS * HEADS + m % GROUPS)[:, None] * DIM + d[None, :])
        tl.store(to, merged, live[:, None] & (d < DIM)[None, :])
    tl.store(flag + s, 0, here)


@triton.jit
def clear_heads(
    out, token, head, HEADS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    DIM: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Zeros in GROUP heads of a token from `head`."""
    spare, d = tl.arange(0, GROUPS)[:, None], tl.arange(0, DIMS)[None, :]
    line, inside = tl.cast(token, tl.int64) * HEADS + head + spare, (spare < GROUP) & (d < DIM)
    tl.store(out + line * DIM + d, tl.zeros((GROUPS, DIMS), out.dtype.element_ty), inside)


@triton.jit
def verify_kernel(
    q, r, rel_proj, kv_pool, page_table, slots, starts, lengths, out, partial, stats, flags,
    tokens, rows, lines, pages, layer,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, LINES: tl.constexpr,
    DIM: tl.constexpr, DIMS: tl.constexpr, REL: tl.constexpr, RELS: tl.constexpr,
    EXTENT: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, TABLE: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr,
    MERGERS: tl.constexpr, SLICE: tl.constexpr, SHIFTS: tl.constexpr, SINGLE: tl.constexpr,
    TILES: tl.constexpr, FIRST: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = KV_HEADS * GROUP
    STORED: tl.constexpr = KV_HEADS // SHARES  # in the pool
    ONCE: tl.constexpr = SINGLE and SHARES > 1  # more lines leave no registers for it
    SCALE: tl.constexpr = 1.4426950408889634 / DIM
    split, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv = head // SHARES
    row, before = tile // TILES, tile % TILES * (LINES // GROUPS)
    token = clamp(tl.load(starts + row) + before, 0, tokens)
    count = clamp(tl.load(starts + row + 1), token, tokens) - token
    count = tl.minimum(count, LINES // GROUPS)
    live = clamp(tl.load(starts + rows), 0, tokens)
    start = tl.load(lengths + row) + before
    start = clamp(start, 0, (2**30 if WINDOW > 0 else TABLE * PAGE) - 1)
    last = start + tl.maximum(count, 1) - 1
    table = table_line(page_table, tl.load(slots + row), lines, TABLE)
    low = tl.maximum(start - WINDOW + 1, FIRST) if WINDOW > 0 else FIRST
    first = low // BLOCK
    end = last // BLOCK + 1
    share = tl.cdiv(end - first, SPLITS)
    active = tl.cdiv(end - first, share)
    first += split * share
    end = tl.minimum(first + share, end)
    n = BLOCK - 1 - tl.arange(0, BLOCK)  # keys descend, so that their distances ascend
    page = page_of(table, first, n, PAGE, TABLE, BLOCK)
    prefetch_keys(kv_pool, page, first, n, layer, pages, kv, STORED, PAGE, BLOCK, DIM, DIMS)
    base = start - first * BLOCK - (BLOCK - 1)  # the least distance of the row's first token
    if SINGLE:
        bank = bank_at(rel_proj, base, REL, RELS, EXTENT, BLOCK)
        beyond = bank_at(rel_proj, base + BLOCK, REL, RELS, EXTENT, SHIFTS)
    follow()  # only queries, r and the newest keys and values come from the launch before

    m = tl.arange(0, LINES)
    i, g = m // GROUPS, m % GROUPS
    d = tl.arange(0, DIMS)
    inside = (d < DIM)[None, :]
    if split == 0:  # the program also clears its share of the padded tokens
        for padded in range(live + tile, tokens, rows * TILES):
            clear_heads(out, padded, head * GROUP, HEADS, GROUP, GROUPS, DIM, DIMS)
    if (count == 0) | (split >= active):
        return

    exists = ((i < count) & (g < GROUP))[:, None]
    line = tl.cast(token, tl.int64) * HEADS + head * GROUP
    heads = (i * HEADS + g)[:, None]
    query = tl.load(q + line * DIM + heads * DIM + d[None, :], exists & inside, other=0.0)
    c = tl.arange(0, RELS)[None, :]
    relative = tl.load(r + line * REL + heads * REL + c, exists & (c < REL), other=0.0)
    if ONCE:
        k, v = load_keys(
            kv_pool, page, first, n, low, last, layer, pages, kv, STORED, PAGE, BLOCK, DIM, DIMS
        )
        query, relative, k, v = loaded(query), loaded(relative), loaded(k), loaded(v)
        bank, beyond = loaded(bank), loaded(beyond)
    r_high, r_low = two_parts(relative * DIM, rel_proj.dtype.element_ty)
    maximum = tl.full((LINES,), -1e30, tl.float32)
    total = tl.zeros((LINES,), tl.float32)
    output = tl.zeros((LINES, DIMS), tl.float32)
    position = (start + i)[:, None]
    near = first
    if not SINGLE:
        near = clamp(tl.maximum(start + 1 - EXTENT, 0) // BLOCK, first, end)
        for block in range(first, near):
            where = key_pointers(
                kv_pool, page, block, n, d, layer, pages, kv, STORED, PAGE, BLOCK, DIM
            )
            page = page_of(table, block + 1, n, PAGE, TABLE, BLOCK)
            keys = block * BLOCK + n
            k = tl.load(where, inside, other=0.0)
            v = tl.load(where + STORED * PAGE * DIM, (keys >= low)[:, None] & inside, other=0.0)
            scores = tl.zeros((LINES, BLOCK), tl.float32)
            maximum, total, output = attend_lines(
                query, k, v, scores, position, keys, maximum, total, output, SCALE, WINDOW, FIRST
            )
    for block in tl.range(near, end, num_stages=1):
        if not SINGLE:
            base = start - block * BLOCK - (BLOCK - 1)
            bank = bank_at(rel_proj, base, REL, RELS, EXTENT, BLOCK)
            beyond = bank_at(rel_proj, base + BLOCK, REL, RELS, EXTENT, SHIFTS)
        keys = block * BLOCK + n
        if not ONCE:
            k, v = load_keys(
                kv_pool, page, block, n, low, last, layer, pages, kv, STORED, PAGE, BLOCK, DIM, DIMS
            )  # fmt: skip
            page = page_of(table, block + 1, n, PAGE, TABLE, BLOCK)
        scores = bias_of(r_high, r_low, bank, beyond, i[:, None])
        maximum, total, output = attend_lines(
            query, k, v, scores, position, keys, maximum, total, output, SCALE, WINDOW, FIRST
        )
    if (SPLITS == 1) | (active == 1):
        whole = (output / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + line * DIM + heads * DIM + d[None, :], whole, exists & inside)
    if SPLITS > 1:  # noqa: SIM102  (known when compiled; the other is not)
        if active > 1:
            cell = (tl.cast(tile, tl.int64) * KV_HEADS + head) * LINES
            lane = ((cell + m) * SPLITS + split)[:, None]
            tl.store(stats + lane * 2, maximum[:, None], exists)
            tl.store(stats + lane * 2 + 1, total[:, None], exists)
            tl.store(partial + lane * DIM + d[None, :], output, exists & inside)
            tl.debug_barrier()
            mergers = tl.minimum(active, MERGERS)
            flag = flags + (tl.cast(tile, tl.int64) * KV_HEADS + head) * (MERGERS * SPLITS)
            j = tl.arange(0, MERGERS)
            tl.atomic_xchg(flag + j * SPLITS + split, RAISED, j < mergers, sem="release")
            place = active - 1 - split
            if place < mergers:
                merge_lines(
                    partial + cell * (SPLITS * DIM), stats + cell * (SPLITS * 2),
                    flag + place * SPLITS, out + line * DIM, active, place, mergers, count,
                    GROUP, GROUPS, HEADS, DIM, DIMS, SPLITS, PADDED, SLICE,
                )  # fmt: skip


def attention_verify(
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
    most: int,
) -> Tensor:
    """Attention output [T, Nq * D]; see the package docstring."""
    (tokens, heads, dim), (rel, extent), rows = q.shape, rel_proj.shape, slots.shape[0]
    (lines, table), (pages, _, kv_heads, page) = page_table.shape, kv_pool.shape[1:5]
    group, wide = heads // kv_heads, q.dtype == torch.float32
    least = max(1, 16 // triton.next_power_of_2(group))  # tokens of a tile of 16 lines
    held = max(least, min(TILE, triton.next_power_of_2(most)))
    config = configure(rows, kv_heads, group, held, table * page, window, wide)
    kv_heads, group = kv_heads * config.shares, group // config.shares
    groups, dims = triton.next_power_of_2(group), max(16, triton.next_power_of_2(dim))
    height = max(16, held * groups)
    held = height // groups  # tokens of a tile
    tiles = rows * triton.cdiv(most, held)
    wider = 2 * groups if most > held else groups
    mergers = 1 if INTERPRETED else config.mergers
    padded = triton.next_power_of_2(config.splits)
    out = torch.empty((tokens, heads * dim), dtype=q.dtype, device=q.device)
    share = (tiles, kv_heads, height, config.splits) if config.splits > 1 else (1, 1, 1, 1)
    partial = torch.empty((*share, dim), dtype=torch.float32, device=q.device)
    stats = torch.empty((*share, 2), dtype=torch.float32, device=q.device)
    flags = torch.empty((*share[:2], mergers, share[3]), dtype=torch.int64, device=q.device)
    launchable(verify_kernel)[(config.splits, kv_heads, tiles)](
        q, r, rel_proj, kv_pool, page_table, slots, starts, lengths, out, partial, stats, flags,
        tokens, rows, lines, pages, LAYER_UNIT.value * layer,
        KV_HEADS=kv_heads, GROUP=group, GROUPS=groups, LINES=height,
        DIM=dim, DIMS=dims, REL=rel, RELS=max(16, triton.next_power_of_2(rel)),
        EXTENT=extent, WINDOW=window, PAGE=page, TABLE=table,
        SPLITS=config.splits, BLOCK=64, PADDED=padded,
        MERGERS=mergers, SLICE=min(wider, max(1, MERGED * wider // groups // (padded * dims))),
        SHIFTS=max(16, held), SINGLE=config.single, TILES=tiles // rows, FIRST=first,
        SHARES=config.shares,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out


def compile_cases() -> list[CompileCase]:
    """Verification of eight and of three drafts on one rank of eight of inkling-small, and the rows of
    its draft depths."""
    heads, kv_heads, dim, rel, page, i32 = 4, 1, 128, 16, 64, torch.int32
    cases = []
    for rows, most, window, table, first in (
        (1, 9, 0, 1024, 0),
        (8, 9, 0, 1024, 0),
        (64, 9, 0, 1024, 0),
        (1, 9, 512, 43, 0),
        (8, 9, 512, 43, 0),
        (64, 9, 512, 43, 0),
        (1, 4, 0, 1024, 0),
        (1, 16, 0, 1024, 8),
        (8, 16, 0, 1024, 8),
        (1, 16, 512, 43, 8),
        (8, 16, 512, 43, 8),
    ):
        cases += launches(
            f"verify-r{rows}-most{most}-w{window}",
            attention_verify,
            meta(rows * most, heads, dim),
            meta(rows * most, heads, rel, dtype=torch.float32),
            meta(rel, window or 1024),
            meta(7, 8192, 2, kv_heads, page, dim),
            meta(129, table, dtype=i32),
            meta(rows, dtype=i32),
            meta(rows + 1, dtype=i32),
            meta(rows, dtype=i32),
            3,
            window,
            first,
            most,
        )
    return cases
