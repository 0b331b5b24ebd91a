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

from inkling_engine.kernels._conv_triton import LAYER_UNIT, clamp, window_at
from inkling_engine.kernels._triton import (
    INTERPRETED,
    CompileCase,
    follow,
    launchable,
    launches,
    meta,
)
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
    """Keys before the newest that the query may see."""
    return (distance > 0) & (distance < WINDOW) if WINDOW > 0 else distance > 0


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
def keep_window(to, moved, z0, z1, z2, z3, mask, WIDTH: tl.constexpr):
    """Write the last three inputs: z1, z2, z3, or z0, z1, z2 if the window has not `moved` on."""
    tl.store(to, tl.where(moved, z1, z0), mask)
    tl.store(to + WIDTH, tl.where(moved, z2, z1), mask)
    tl.store(to + 2 * WIDTH, tl.where(moved, z3, z2), mask)


@triton.jit
def queries(
    qkvr, q_norm, line, g, d, c, tau, eps, dtype: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, REL: tl.constexpr, KV: tl.constexpr, HEADS: tl.constexpr, head,
):  # fmt: skip
    """Normalised queries [G, D] and relative vectors [G, c] f32 of a kv head, both times tau."""
    mine = (g < GROUP)[:, None]
    h = head * GROUP + g[:, None]
    x = tl.load(qkvr + line + h * DIM + d[None, :], mine & (d < DIM)[None, :], other=0.0)
    x = x.to(tl.float32)
    gain = tl.load(q_norm + d, d < DIM, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)
    y = x * scale[:, None] * gain[None, :] * tau
    at = qkvr + line + (HEADS * DIM + KV) + h * REL + c[None, :]
    r = tl.load(at, mine & (c < REL)[None, :], other=0.0).to(tl.float32) * tau
    return y.to(dtype), r


@triton.jit
def convolved(x, z0, z1, z2, kv_conv, channel, mask):
    """The short convolution of one token, as the prologue sums it."""
    y = x.to(tl.float32)
    y += tl.load(kv_conv + channel * 4 + 3, mask, other=0.0) * y
    y += tl.load(kv_conv + channel * 4, mask, other=0.0) * z0.to(tl.float32)
    y += tl.load(kv_conv + channel * 4 + 1, mask, other=0.0) * z1.to(tl.float32)
    y += tl.load(kv_conv + channel * 4 + 2, mask, other=0.0) * z2.to(tl.float32)
    return y.to(x.dtype)


@triton.jit
def start(newest, scores, v, PARTS: tl.constexpr):
    """Softmax state before the older keys: the newest key with its scores [M], or nothing."""
    maximum = tl.where(newest, scores, -1e30)
    output = tl.zeros((scores.shape[0], v.shape[0]), tl.float32)
    output += tl.where(newest, v.to(tl.float32), 0.0)[None, :]
    if PARTS > 1:
        first = (tl.arange(0, PARTS) == 0)[:, None]
        maximum = tl.where(first, maximum[None, :], -1e30)
        output = tl.where(first[:, :, None], output[None, :, :], 0.0)
    return maximum, tl.where(maximum > -1e30, 1.0, 0.0), output


@triton.jit
def decode_kernel(
    qkvr, kv_conv, q_norm, k_norm, kv_pool, conv_pool, locations, slots, sources, starts, lengths,
    destination_slots, destination_offsets, rel_proj, page_table, out, partial, stats, flags,
    tokens, rows, lines, pages, pool_slots, layer, log_alpha, eps,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    DIM: tl.constexpr, DIMS: tl.constexpr, REL: tl.constexpr, RELS: tl.constexpr,
    EXTENT: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, TABLE: tl.constexpr,
    FLOOR: tl.constexpr, DESTINATIONS: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    SINGLE: tl.constexpr, PADDED: tl.constexpr, MERGERS: tl.constexpr, SLICES: tl.constexpr,
    SLICE: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = KV_HEADS * GROUP
    KV: tl.constexpr = 2 * KV_HEADS * DIM
    SOME: tl.constexpr = BLOCK // PARTS
    SCALE: tl.constexpr = 1.4426950408889634 / DIM
    # A compiled program passes them in double precision.
    eps, log_alpha = tl.cast(eps, tl.float32), tl.cast(log_alpha, tl.float32)
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    of = tl.minimum(row, rows - 1)
    token = clamp(tl.load(starts + of), 0, tokens)
    count = clamp(tl.load(starts + of + 1), token, tokens) - token
    live = tl.load(starts + rows)
    length, slot, source = tl.load(lengths + of), tl.load(slots + of), tl.load(sources + of)
    position = clamp(length, 0, (2**30 if WINDOW > 0 else TABLE * PAGE) - 1)
    location = tl.load(locations + tl.minimum(token, tokens - 1))
    table = table_line(page_table, slot, lines, TABLE)
    low = tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else 0
    first = low // BLOCK
    last = position // BLOCK + 1
    share = tl.maximum(tl.cdiv(last - first, SPLITS), LEAST)
    active = tl.cdiv(last - first, share)
    mine = (row < rows) & (count > 0) & (split < active)
    newest = mine & (split == active - 1)
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
    g, d, c = tl.arange(0, GROUPS), tl.arange(0, DIMS), tl.arange(0, RELS)
    axis: tl.constexpr = len(n.shape)
    if SINGLE:
        distance = position - first * BLOCK - n
        where = key_pointers(
            kv_pool, page, first, n, d, layer, pages, head, KV_HEADS, PAGE, BLOCK, DIM
        )
        read = tl.expand_dims(visible(distance, WINDOW), axis) & (d < tl.where(mine, DIM, 0))
        k = tl.load(where, read, other=0.0)
        v = tl.load(where + KV_HEADS * PAGE * DIM, read, other=0.0)
    # The newest key and value, and the state that they leave: the last split's.
    inside = d < tl.where(newest, DIM, 0)
    k_channel, v_channel = head * DIM + d, (KV_HEADS + head) * DIM + d
    held = d < tl.where(newest & (length > 0), DIM, 0)
    old = window_at(conv_pool, layer, pool_slots, source, KV)
    k0 = tl.load(old + k_channel, held, other=0.0)
    k1 = tl.load(old + KV + k_channel, held, other=0.0)
    k2 = tl.load(old + 2 * KV + k_channel, held, other=0.0)
    v0 = tl.load(old + v_channel, held, other=0.0)
    v1 = tl.load(old + KV + v_channel, held, other=0.0)
    v2 = tl.load(old + 2 * KV + v_channel, held, other=0.0)
    nearest = tl.load(rel_proj + tl.minimum(c, REL - 1) * EXTENT).to(tl.float32)
    tau = tl.full((), 1.0, tl.float32)
    if FLOOR > 0:
        tau += log_alpha * tl.log(tl.maximum((length + 1).to(tl.float32) / FLOOR, 1.0))
    follow()  # only the token's q, k, v, r come from the launch before

    heads = (g < GROUP)[:, None] & (d < DIM)[None, :]
    at = (head * GROUP + g)[:, None] * DIM + d[None, :]
    if (row >= live) & (split == 0):  # the program also clears the padded token of its number
        nothing = tl.zeros((GROUPS, DIMS), out.dtype.element_ty)
        tl.store(out + tl.cast(row, tl.int64) * (HEADS * DIM) + at, nothing, heads)
    if (row >= rows) | (count == 0) | (split >= active):
        return

    line = tl.cast(token, tl.int64) * (HEADS * (DIM + REL) + KV)
    query, relative = queries(
        qkvr, q_norm, line, g, d, c, tau, eps, out.dtype.element_ty, GROUP, DIM, REL, KV, HEADS,
        head,
    )  # fmt: skip
    k_in = tl.load(qkvr + line + HEADS * DIM + k_channel, inside, other=0.0)
    v_in = tl.load(qkvr + line + HEADS * DIM + v_channel, inside, other=0.0)
    k_new = convolved(k_in, k0, k1, k2, kv_conv, k_channel, inside).to(tl.float32)
    v_new = convolved(v_in, v0, v1, v2, kv_conv, v_channel, inside)
    gain = tl.load(k_norm + d, inside, other=0.0).to(tl.float32)
    k_new = (k_new * tl.rsqrt(tl.sum(k_new * k_new, axis=0) / DIM + eps) * gain).to(k_in.dtype)
    scores = tl.sum(query.to(tl.float32) * k_new.to(tl.float32)[None, :], axis=1)
    scores += tl.sum(relative * nearest[None, :], axis=1) * DIM
    maximum, total, output = start(newest, scores * SCALE, v_new, PARTS)
    if PARTS > 1:
        query = tl.broadcast_to(query[None, :, :], (PARTS, GROUPS, DIMS))
        relative = tl.broadcast_to(relative[None, :, :], (PARTS, GROUPS, RELS))
    r_high, r_low = two_parts(relative * DIM, rel_proj.dtype.element_ty)
    if SINGLE:
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
    if newest:
        cell = tl.cast(layer // LAYER_UNIT, tl.int64) * pages + clamp(
            location // PAGE, 0, pages - 1
        )
        cell = (cell * (2 * KV_HEADS) + head) * PAGE + location % PAGE
        tl.store(kv_pool + cell * DIM + d, k_new, inside)
        tl.store(kv_pool + (cell + KV_HEADS * PAGE) * DIM + d, v_new, inside)
        for j in range(DESTINATIONS):
            to = tl.load(destination_slots + of * DESTINATIONS + j)
            if to != 0:
                whole = tl.load(destination_offsets + of * DESTINATIONS + j) > 0
                copy = window_at(conv_pool, layer, pool_slots, to, KV)
                keep_window(copy + k_channel, whole, k0, k1, k2, k_in, inside, KV)
                keep_window(copy + v_channel, whole, v0, v1, v2, v_in, inside, KV)
        new = window_at(conv_pool, layer, pool_slots, slot, KV)
        tl.debug_barrier()  # every thread has read the old window, which may be the same slot's
        keep_window(new + k_channel, True, k0, k1, k2, k_in, inside, KV)
        keep_window(new + v_channel, True, v0, v1, v2, v_in, inside, KV)
    if PARTS > 1:
        maximum, total, output = merge_parts(maximum, total, output, GROUP)
    g = tl.arange(0, maximum.shape[0])
    heads = (g < GROUP)[:, None] & (d < DIM)[None, :]
    at = (head * GROUP + g)[:, None] * DIM + d[None, :]
    line = tl.cast(token, tl.int64) * (HEADS * DIM)
    if (SPLITS == 1) | (active == 1):
        tl.store(out + line + at, (output / total[:, None]).to(out.dtype.element_ty), heads)
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
                    flag + place * SPLITS, out + line + head * GROUP * DIM, active, place,
                    mergers, GROUP, DIM, DIMS, SPLITS, PADDED, SLICES, SLICE,
                )  # fmt: skip


def attention_decode(
    qkvr: Tensor,
    kv_conv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    kv_pool: Tensor,
    conv_pool: Tensor,
    positions: Tensor,
    token_rows: Tensor,
    locations: Tensor,
    slots: Tensor,
    sources: Tensor,
    starts: Tensor,
    lengths: Tensor,
    destination_slots: Tensor,
    destination_offsets: Tensor,
    rel_proj: Tensor,
    page_table: Tensor,
    layer: int,
    heads: int,
    window: int,
    log_floor: int,
    log_alpha: float,
    eps: float,
) -> Tensor:
    """Attention output [T, Nq * D]; see the package docstring."""
    tokens, (rel, extent), rows = qkvr.shape[0], rel_proj.shape, slots.shape[0]
    (lines, table), (pages, _, kv_heads, page, dim) = page_table.shape, kv_pool.shape[1:]
    group, wide = heads // kv_heads, qkvr.dtype == torch.float32
    config = configure(tokens, kv_heads, table * page, window, wide)
    slices = min(config.slices, triton.next_power_of_2(group))
    mergers = 1 if INTERPRETED else slices  # the interpreter runs one program after another
    out = qkvr.new_empty(tokens, heads * dim)
    share = (tokens, heads, config.splits) if config.splits > 1 else (1, 1, 1)
    partial = qkvr.new_empty(*share, dim, dtype=torch.float32)
    stats = qkvr.new_empty(*share, 2, dtype=torch.float32)
    flags = qkvr.new_empty(*share, mergers, dtype=torch.int64)
    launchable(decode_kernel)[(config.splits, kv_heads, tokens)](
        qkvr, kv_conv, q_norm, k_norm, kv_pool, conv_pool, locations, slots, sources, starts,
        lengths, destination_slots, destination_offsets, rel_proj, page_table, out, partial, stats,
        flags, tokens, rows, lines, pages, conv_pool.shape[1], LAYER_UNIT.value * layer, log_alpha,
        eps,
        KV_HEADS=kv_heads, GROUP=group, GROUPS=max(16, triton.next_power_of_2(group)),
        DIM=dim, DIMS=max(16, triton.next_power_of_2(dim)),
        REL=rel, RELS=max(16, triton.next_power_of_2(rel)),
        EXTENT=extent, WINDOW=window, PAGE=page, TABLE=table, FLOOR=log_floor,
        DESTINATIONS=destination_slots.shape[1],
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
        heads, kv = 4 * kv_heads, 2 * kv_heads * dim
        lines = [meta(rows, dtype=i32) for _ in range(4)]
        cases += launches(
            f"decode-r{rows}-kv{kv_heads}-w{window}",
            attention_decode,
            meta(rows, heads * (dim + rel) + kv),
            meta(kv, 4, dtype=torch.float32),
            meta(dim),
            meta(dim),
            meta(7, 8192, 2, kv_heads, page, dim),
            meta(7, 160, 3, kv),
            *lines[:2],
            meta(rows, dtype=torch.int64),
            *lines[2:],
            meta(rows + 1, dtype=i32),
            meta(rows, dtype=i32),
            *(meta(rows, 1, dtype=i32) for _ in range(2)),
            meta(rel, window or 1024),
            meta(129, table, dtype=i32),
            3,
            heads,
            window,
            0 if window else 128000,
            0.1,
            1e-6,
        )
    return cases
