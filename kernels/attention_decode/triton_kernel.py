# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
"""Decode attention, split over keys, in one launch.

A program takes one row, one kv head and a run of key blocks; the kv head's query heads share its
tile, padded to the 16 rows of a tensor-core product. The distances of a block of consecutive keys
are consecutive too, so its relative bias is r times a slice of the bank, for all heads at once.
Each split leaves its output and raises a flag; the last splits of a row wait for all flags and
merge, in the order of the splits. Scratch is not initialised: a flag is a 64-bit number that
nothing else writes, and whoever merges clears it. Programs start in the order of their numbers,
so whoever waits waits for programs that run already or are the next to start.
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
    meta,
)
from inkling_engine.kernels.attention_decode.several_triton import attend_several
from inkling_engine.kernels.attention_decode.several_triton import compile_cases as several_cases
from inkling_engine.kernels.attention_extend.triton_kernel import (
    PROCESSORS,
    key_pointers,
    page_of,
    relative_scores,
    softmax_step,
    table_line,
    two_parts,
)

RESIDENT = 2  # programs that share a processor
MOST_SPLITS = 128
RAISED = tl.constexpr(0x6A09E667F3BCC909)  # a flag: the fraction of the square root of 2


@dataclass(frozen=True)
class Config:
    """Splits of a row's keys, blocks a split has at least, keys of a block.

    Parts of a block: one a warp, or 1 for products that all warps share. `single`: no split has
    more than one block. `slices`: of the heads, each merged by another split.
    """

    splits: int
    least: int
    block: int
    parts: int
    warps: int
    stages: int
    single: bool = False
    slices: int = 1


def configure(tokens: int, kv_heads: int, capacity: int, window: int, wide: bool) -> Config:
    """One full wave of programs; more when rows can be so long that one would straggle.

    Measured on an H200, microseconds a layer. Few programs share the products among warps: 8 rows
    of 8192 keys take 17, and 21 with parts; of many, more fit a processor and the last wave is a
    short one: 128 rows take 179, and 144 with parts. A window of few rows is a page a program: 5.6,
    7.3 and 9.3 at 1, 8 and 32 rows, 11 to 15 at 32 in one to five splits. At 128 rows the flags
    cost more than they give: 21, and 16 in one split.
    """
    programs = tokens * kv_heads
    many = programs > PROCESSORS // 2
    if window and (many or wide):
        return Config(1, 1, 64, 4, 4, 2 if wide else 3)
    if window:
        return Config(triton.cdiv(window - 1, 64) + 1, 1, 64, 1, 2, 1, single=True)
    parts, stages = (4, 2) if wide else (4, 4) if many or programs == 1 else (1, 3)
    least = 128 if programs == 1 else 256 if programs < PROCESSORS else 512
    splits = max(RESIDENT * PROCESSORS // programs, capacity // 16384)
    splits = max(1, min(splits, triton.cdiv(capacity, least), MOST_SPLITS))
    return Config(splits, least // 64, 64, parts, 4, stages, slices=4 if splits > 16 else 1)


@triton.jit
def bank_slice(rel_proj, distance, REL: tl.constexpr, RELS: tl.constexpr, EXTENT: tl.constexpr):
    """rel_proj at `distance` [.., N], [.., RELS, N]; anything outside the extent."""
    axis: tl.constexpr = len(distance.shape) - 1
    c = tl.minimum(tl.arange(0, RELS), REL - 1)[:, None]
    inside = tl.minimum(tl.maximum(distance, 0), EXTENT - 1)
    return tl.load(rel_proj + (c * EXTENT + tl.expand_dims(inside, axis)))


@triton.jit
def attend(
    query, r_high, r_low, bank, k, v, distance, maximum, total, output,
    SCALE: tl.constexpr, EXTENT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One block of keys in the running softmax; `bank` is its slice."""
    axis: tl.constexpr = len(distance.shape) - 1
    scores = relative_scores(r_high, r_low, bank)
    if (WINDOW == 0) | (WINDOW > EXTENT):
        scores = tl.where(tl.expand_dims(distance < EXTENT, axis), scores, 0.0)
    turned = tl.trans(k) if axis == 0 else tl.trans(k, 0, 2, 1)
    scores = tl.dot(query, turned, scores, input_precision="ieee")
    scores = tl.where(tl.expand_dims(visible(distance, WINDOW), axis), scores, float("-inf"))
    return softmax_step(scores, SCALE, maximum, total, output, v)


@triton.jit
def visible(distance, WINDOW: tl.constexpr):
    return (distance >= 0) & (distance < WINDOW) if WINDOW > 0 else distance >= 0


@triton.jit
def merge_parts(maximum, total, output, GROUP: tl.constexpr):
    """The softmax of all parts from that of each, [P, M] and [P, M, D]; only GROUP lines count."""
    PARTS: tl.constexpr = output.shape[0]
    HALF: tl.constexpr = output.shape[1] // 2
    if GROUP <= HALF:  # half of the tile is padding
        maximum, _ = tl.split(tl.permute(tl.reshape(maximum, (PARTS, 2, HALF)), (0, 2, 1)))
        total, _ = tl.split(tl.permute(tl.reshape(total, (PARTS, 2, HALF)), (0, 2, 1)))
        output = tl.reshape(output, (PARTS, 2, HALF, output.shape[2]))
        output, _ = tl.split(tl.permute(output, (0, 2, 3, 1)))
    highest = tl.max(maximum, 0)
    weight = tl.exp2(maximum - highest[None, :])
    return highest, tl.sum(total * weight, 0), tl.sum(output * weight[:, :, None], 0)


@triton.jit
def merge_splits(
    partial, stats, flag, out, active, first, mergers,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr, SPLITS: tl.constexpr,
    PADDED: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Wait for the flags of `active` splits and write each `mergers`-th slice of SLICE heads.

    `partial` [GROUP, SPLITS, DIM] and `stats` [GROUP, SPLITS, 2] are of one row and kv head.
    """
    s = tl.arange(0, PADDED)
    here = s < active
    missing = tl.full((), 1, tl.int32)
    while missing > 0:
        found = tl.atomic_add(flag + s, 0, here, sem="acquire")
        missing = tl.sum(((found != RAISED) & here).to(tl.int32))
    d = tl.arange(0, DIMS)
    for part in range(first, SLICES, mergers):
        h = part * SLICE + tl.arange(0, SLICE)
        held = here[:, None] & (h < GROUP)[None, :]
        line = h[None, :] * SPLITS + s[:, None]
        peak = tl.load(stats + line * 2, held, other=float("-inf"), cache_modifier=".cg")
        total = tl.load(stats + line * 2 + 1, held, other=0.0, cache_modifier=".cg")
        weight = tl.exp2(peak - tl.maximum(tl.max(peak, 0), -1e30)[None, :])
        weight = weight / tl.maximum(tl.sum(weight * total, 0), 1e-30)[None, :]
        at = partial + (line[:, :, None] * DIM + d[None, None, :])
        held3 = held[:, :, None] & (d < DIM)[None, None, :]
        values = tl.load(at, held3, other=0.0, cache_modifier=".cg")
        merged = tl.sum(weight[:, :, None] * values, 0).to(out.dtype.element_ty)
        to = out + (h[:, None] * DIM + d[None, :])
        tl.store(to, merged, (h < GROUP)[:, None] & (d < DIM)[None, :])
    tl.store(flag + s, 0, here)


@triton.jit
def decode_kernel(
    q, r, rel_proj, kv_pool, page_table, slots, starts, lengths, out, partial, stats, flags,
    tokens, rows, lines, pages, layer,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    DIM: tl.constexpr, DIMS: tl.constexpr, REL: tl.constexpr, RELS: tl.constexpr,
    EXTENT: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, TABLE: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    SINGLE: tl.constexpr, PADDED: tl.constexpr, MERGERS: tl.constexpr, SLICES: tl.constexpr,
    SLICE: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = KV_HEADS * GROUP
    SOME: tl.constexpr = BLOCK // PARTS
    SCALE: tl.constexpr = 1.4426950408889634 / DIM
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
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
    active = tl.cdiv(last - first, share)
    first += split * share
    last = tl.minimum(first + share, last)
    # Keys descend, so that their distances ascend and slices of the bank are read forwards.
    if PARTS == 1:
        n = BLOCK - 1 - tl.arange(0, BLOCK)
    else:
        n = BLOCK - 1 - (tl.arange(0, PARTS)[:, None] * SOME + tl.arange(0, SOME)[None, :])
    anchor = n
    if (PARTS > 1) & (PAGE % SOME == 0):  # one page a part
        anchor = BLOCK - SOME - tl.arange(0, PARTS)[:, None] * SOME
    page = page_of(table, first, anchor, PAGE, TABLE, BLOCK)
    following = bank_slice(rel_proj, position - first * BLOCK - n, REL, RELS, EXTENT)
    follow()  # only query, r and the newest key and value come from the launch before

    g = tl.arange(0, GROUPS)
    d = tl.arange(0, DIMS)
    heads = (g < GROUP)[:, None] & (d < DIM)[None, :]
    at = (head * GROUP + g)[:, None] * DIM + d[None, :]
    if (row >= live) & (split == 0):  # the program also clears the padded token of its number
        nothing = tl.zeros((GROUPS, DIMS), out.dtype.element_ty)
        tl.store(out + tl.cast(row, tl.int64) * (HEADS * DIM) + at, nothing, heads)
    if (row >= rows) | (count == 0) | (split >= active):
        return

    line = tl.cast(token, tl.int64) * HEADS
    query = tl.load(q + line * DIM + at, heads, other=0.0)
    c = tl.arange(0, RELS)
    relative = r + (line + head * GROUP + g)[:, None] * REL + c[None, :]
    relative = tl.load(relative, (g < GROUP)[:, None] & (c < REL)[None, :], other=0.0)
    axis: tl.constexpr = len(n.shape)
    if PARTS == 1:
        maximum = tl.full((GROUPS,), -1e30, tl.float32)
        output = tl.zeros((GROUPS, DIMS), tl.float32)
    else:
        query = tl.broadcast_to(query[None, :, :], (PARTS, GROUPS, DIMS))
        relative = tl.broadcast_to(relative[None, :, :], (PARTS, GROUPS, RELS))
        maximum = tl.full((PARTS, GROUPS), -1e30, tl.float32)
        output = tl.zeros((PARTS, GROUPS, DIMS), tl.float32)
    total = tl.zeros_like(maximum)
    r_high, r_low = two_parts(relative * DIM, rel_proj.dtype.element_ty)
    if SINGLE:
        distance = position - first * BLOCK - n
        where = key_pointers(
            kv_pool, page, first, n, d, layer, pages, head, KV_HEADS, PAGE, BLOCK, DIM
        )
        k = tl.load(where, d < DIM, other=0.0)
        read = tl.expand_dims(visible(distance, WINDOW), axis) & (d < DIM)
        v = tl.load(where + KV_HEADS * PAGE * DIM, read, other=0.0)
        maximum, total, output = attend(
            query, r_high, r_low, following, k, v, distance, maximum, total, output,
            SCALE, EXTENT, WINDOW,
        )  # fmt: skip
    else:
        for block in range(first, last):
            bank = following
            distance = position - block * BLOCK - n
            following = bank_slice(rel_proj, distance - BLOCK, REL, RELS, EXTENT)
            where = key_pointers(
                kv_pool, page, block, n, d, layer, pages, head, KV_HEADS, PAGE, BLOCK, DIM
            )
            page = page_of(table, block + 1, anchor, PAGE, TABLE, BLOCK)
            k = tl.load(where, d < DIM, other=0.0)
            read = tl.expand_dims(visible(distance, WINDOW), axis) & (d < DIM)
            v = tl.load(where + KV_HEADS * PAGE * DIM, read, other=0.0)
            maximum, total, output = attend(
                query, r_high, r_low, bank, k, v, distance, maximum, total, output,
                SCALE, EXTENT, WINDOW,
            )  # fmt: skip
    if PARTS > 1:
        maximum, total, output = merge_parts(maximum, total, output, GROUP)
    g = tl.arange(0, maximum.shape[0])
    heads = (g < GROUP)[:, None] & (d < DIM)[None, :]
    at = (head * GROUP + g)[:, None] * DIM + d[None, :]
    if (SPLITS == 1) | (active == 1):
        tl.store(out + line * DIM + at, (output / total[:, None]).to(out.dtype.element_ty), heads)
    if SPLITS > 1:  # noqa: SIM102  (known when compiled; the other is not)
        if active > 1:
            # Scratch is the row's, not its token's: so no two rows share flags, on garbage either.
            cell = tl.cast(row, tl.int64) * HEADS + head * GROUP
            lane = (cell + g) * SPLITS + split
            tl.store(stats + lane * 2, maximum, g < GROUP)
            tl.store(stats + lane * 2 + 1, total, g < GROUP)
            tl.store(partial + lane[:, None] * DIM + d[None, :], output, heads)
            tl.debug_barrier()
            mergers = tl.minimum(active, MERGERS)
            flag = flags + (tl.cast(row, tl.int64) * KV_HEADS + head) * (MERGERS * SPLITS)
            j = tl.arange(0, MERGERS)
            tl.atomic_xchg(flag + j * SPLITS + split, RAISED, j < mergers, sem="release")
            place = active - 1 - split
            if place < mergers:
                merge_splits(
                    partial + cell * (SPLITS * DIM), stats + cell * (SPLITS * 2),
                    flag + place * SPLITS, out + (line + head * GROUP) * DIM, active, place,
                    mergers, GROUP, DIM, DIMS, SPLITS, PADDED, SLICES, SLICE,
                )  # fmt: skip


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
    most: int,
) -> Tensor:
    """Attention output [T, Nq * D]; see the package docstring."""
    if most > 1:
        return attend_several(
            q, r, rel_proj, kv_pool, page_table, slots, starts, lengths, layer, window, most
        )
    (tokens, heads, dim), (rel, extent), rows = q.shape, rel_proj.shape, slots.shape[0]
    (lines, table), (pages, _, kv_heads, page) = page_table.shape, kv_pool.shape[1:5]
    group, wide = heads // kv_heads, q.dtype == torch.float32
    config = configure(tokens, kv_heads, table * page, window, wide)
    slices = min(config.slices, triton.next_power_of_2(group))
    mergers = 1 if INTERPRETED else slices  # the interpreter runs one program after another
    out = torch.empty((tokens, heads * dim), dtype=q.dtype, device=q.device)
    share = (tokens, heads, config.splits) if config.splits > 1 else (1, 1, 1)
    partial = torch.empty((*share, dim), dtype=torch.float32, device=q.device)
    stats = torch.empty((*share, 2), dtype=torch.float32, device=q.device)
    flags = torch.empty((*share, mergers), dtype=torch.int64, device=q.device)
    launchable(decode_kernel)[(config.splits, kv_heads, tokens)](
        q, r, rel_proj, kv_pool, page_table, slots, starts, lengths, out, partial, stats, flags,
        tokens, rows, lines, pages, LAYER_UNIT.value * layer,
        KV_HEADS=kv_heads, GROUP=group, GROUPS=max(16, triton.next_power_of_2(group)),
        DIM=dim, DIMS=max(16, triton.next_power_of_2(dim)),
        REL=rel, RELS=max(16, triton.next_power_of_2(rel)),
        EXTENT=extent, WINDOW=window, PAGE=page, TABLE=table,
        SPLITS=config.splits, LEAST=config.least, BLOCK=config.block, PARTS=config.parts,
        SINGLE=config.single, PADDED=triton.next_power_of_2(config.splits), MERGERS=mergers,
        SLICES=slices, SLICE=triton.next_power_of_2(group) // slices,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
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
            1,
        )
    return cases + several_cases()
