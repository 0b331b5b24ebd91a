# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
"""Decode attention, split over keys, in one launch.

A program takes one row, one kv head and a run of key blocks; the kv head's query heads share its
tile, padded to the 16 rows of a tensor-core product. The distances of a block of consecutive keys
are consecutive too, so its relative bias is r times a slice of the bank, for all heads at once.
The newest key and value are computed here, by the split that they fall into (`newest_triton.py`),
and splits are merged here too (`merge_triton.py`).
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
    known_length,
    ring_at,
    wants_snapshots,
)
from inkling_engine.kernels._triton import (
    INTERPRETED,
    CompileCase,
    follow,
    launchable,
    launches,
    loaded,
    meta,
)
from inkling_engine.kernels.attention_decode.merge_triton import finish, merge_parts
from inkling_engine.kernels.attention_decode.newest_triton import (
    convolved,
    first_state,
    keep_inputs,
    keep_key_value,
    log_scale,
    normalised,
    own_inputs,
    queries,
    taps_of,
    window_inputs,
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

RESIDENT = 2  # programs that share a processor
MOST_SPLITS = 128


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
        slices, warps = (4, 4) if programs == 1 else (1, 2)
        return Config(triton.cdiv(window - 1, 64) + 1, 1, 64, 1, warps, 1, True, slices)
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
def keys_and_values(
    kv_pool, page, block, n, d, width, distance, layer, pages, head,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """A block of keys and of the visible values [.., N, D], of which `width` channels are read."""
    where = key_pointers(kv_pool, page, block, n, d, layer, pages, head, KV_HEADS, PAGE, BLOCK, DIM)
    k = tl.load(where, d < width, other=0.0)
    read = tl.expand_dims(visible(distance, WINDOW), len(n.shape)) & (d < width)
    return k, tl.load(where + KV_HEADS * PAGE * DIM, read, other=0.0)


@triton.jit
def decode_kernel(
    qkvr, kv_conv, q_norm, k_norm, kv_pool, conv_pool, locations, slots, sources, starts, lengths,
    destination_slots, destination_offsets, rel_proj, page_table, out, partial, stats, flags,
    tokens, rows, lines, pages, pool_slots, layer, log_alpha, eps,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr,
    DIMS: tl.constexpr, REL: tl.constexpr, RELS: tl.constexpr, EXTENT: tl.constexpr,
    WINDOW: tl.constexpr, PAGE: tl.constexpr, TABLE: tl.constexpr, FLOOR: tl.constexpr,
    DESTINATIONS: tl.constexpr, DESTINED: tl.constexpr, RING: tl.constexpr, SPLITS: tl.constexpr,
    LEAST: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, SINGLE: tl.constexpr,
    PADDED: tl.constexpr, MERGERS: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = KV_HEADS * GROUP
    KV: tl.constexpr = 2 * KV_HEADS * DIM
    SOME: tl.constexpr = BLOCK // PARTS
    SCALE: tl.constexpr = 1.4426950408889634 / DIM
    eps, log_alpha = tl.cast(eps, tl.float32), tl.cast(log_alpha, tl.float32)  # come as fp64
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    of = tl.minimum(row, rows - 1)
    token = clamp(tl.load(starts + of), 0, tokens)
    count = clamp(tl.load(starts + of + 1), token, tokens) - token
    length = known_length(tl.load(lengths + of))
    slot, source = tl.load(slots + of), tl.load(sources + of)
    live, location = tl.load(starts + rows), tl.load(locations + tl.minimum(token, tokens - 1))
    position = clamp(length, 0, (2**30 if WINDOW > 0 else TABLE * PAGE) - 1)
    table = table_line(page_table, slot, lines, TABLE)
    low = tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else 0
    first, last = low // BLOCK, position // BLOCK + 1
    share = tl.maximum(tl.cdiv(last - first, SPLITS), LEAST)
    active = tl.cdiv(last - first, share)
    first += split * share
    last = tl.minimum(first + share, last)
    busy = (row < rows) & (count > 0) & (split < active)
    newest = busy & (split == active - 1)
    # Keys descend, so that their distances ascend and slices of the bank are read forwards.
    if PARTS == 1:
        n = BLOCK - 1 - tl.arange(0, BLOCK)
    else:
        n = BLOCK - 1 - (tl.arange(0, PARTS)[:, None] * SOME + tl.arange(0, SOME)[None, :])
    anchor = n
    if (PARTS > 1) & (PAGE % SOME == 0):  # one page a part
        anchor = BLOCK - SOME - tl.arange(0, PARTS)[:, None] * SOME
    page = page_of(table, first, anchor, PAGE, TABLE, BLOCK)
    distance = position - first * BLOCK - n
    following = bank_slice(rel_proj, distance, REL, RELS, EXTENT)
    g, d, c = tl.arange(0, GROUPS), tl.arange(0, DIMS), tl.arange(0, RELS)
    inside = d < tl.where(newest, DIM, 0)
    k_channel, v_channel = head * DIM + d, (KV_HEADS + head) * DIM + d
    old = ring_at(conv_pool, layer, pool_slots, source, RING, KV)
    k0, k1, k2 = window_inputs(old, length, k_channel, inside, RING, KV)
    v0, v1, v2 = window_inputs(old, length, v_channel, inside, RING, KV)
    kw0, kw1, kw2, kw3 = taps_of(kv_conv, k_channel, inside)
    vw0, vw1, vw2, vw3 = taps_of(kv_conv, v_channel, inside)
    k_gain = tl.load(k_norm + d, inside, other=0.0)
    wanted = wants_snapshots(destination_slots, of, DESTINATIONS, DESTINED)
    q_gain = tl.load(q_norm + d, d < DIM, other=0.0)
    nearest = tl.load(rel_proj + tl.minimum(c, REL - 1) * EXTENT).to(tl.float32)
    if SINGLE:
        k, v = keys_and_values(
            kv_pool, page, first, n, d, tl.where(busy, DIM, 0), distance, layer, pages, head,
            KV_HEADS, PAGE, BLOCK, DIM, WINDOW,
        )  # fmt: skip
        k, v = loaded(k), loaded(v)
    elif busy:
        prefetch_keys(kv_pool, page, first, n, layer, pages, head, KV_HEADS, PAGE, BLOCK, DIM, DIMS)
    follow()  # only the token's q, k, v, r come from the launch before

    if (row >= live) & (split == 0):  # the program also clears the padded token of its number
        at = (tl.cast(row, tl.int64) * HEADS + head * GROUP + g)[:, None] * DIM + d[None, :]
        nothing = tl.zeros((GROUPS, DIMS), out.dtype.element_ty)
        tl.store(out + at, nothing, (g < GROUP)[:, None] & (d < DIM)[None, :])
    if (row >= rows) | (count == 0) | (split >= active):
        return
    q, r, k3, v3 = own_inputs(qkvr, token, head, g, d, c, inside, KV_HEADS, GROUP, DIM, REL)
    query, relative = queries(q, r, q_gain, log_scale(length, log_alpha, FLOOR), eps, DIM)
    k_new = loaded(normalised(convolved(k3, k0, k1, k2, kw0, kw1, kw2, kw3), k_gain, eps, DIM))
    v_new = loaded(convolved(v3, v0, v1, v2, vw0, vw1, vw2, vw3))
    maximum, total, output = first_state(
        newest, query, relative, k_new, v_new, nearest, DIM, SCALE, PARTS
    )
    if newest:
        keep_key_value(
            k_new, v_new, d, inside, kv_pool, location, layer, pages, head, KV_HEADS, PAGE, DIM
        )
        keep_inputs(
            length, k0, k1, k2, k3, k_channel, v0, v1, v2, v3, v_channel, inside, conv_pool, layer,
            pool_slots, slot, source != slot, wanted, destination_slots, destination_offsets, of,
            RING, KV, DESTINATIONS,
        )  # fmt: skip
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
            of_block = page
            page = page_of(table, block + 1, anchor, PAGE, TABLE, BLOCK)
            k, v = keys_and_values(
                kv_pool, of_block, block, n, d, DIM, distance, layer, pages, head,
                KV_HEADS, PAGE, BLOCK, DIM, WINDOW,
            )  # fmt: skip
            maximum, total, output = attend(
                query, r_high, r_low, bank, k, v, distance, maximum, total, output,
                SCALE, EXTENT, WINDOW,
            )  # fmt: skip
    if PARTS > 1:
        maximum, total, output = merge_parts(maximum, total, output, GROUP)
    finish(
        maximum, total, output, out, partial, stats, flags, row, token, head, split, active,
        KV_HEADS, GROUP, DIM, DIMS, SPLITS, PADDED, MERGERS, SLICES, SLICE,
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
    group = triton.next_power_of_2(heads // kv_heads)
    config = configure(tokens, kv_heads, table * page, window, qkvr.dtype == torch.float32)
    slices = min(config.slices, group)
    mergers = 1 if INTERPRETED else slices  # the interpreter runs one program after another
    out = qkvr.new_empty(tokens, heads * dim)
    share = (tokens, heads, config.splits) if config.splits > 1 else (1, 1, 1)
    partial, stats = kv_conv.new_empty(*share, dim), kv_conv.new_empty(*share, 2)
    flags = locations.new_empty(*share, mergers)
    launchable(decode_kernel)[(config.splits, kv_heads, tokens)](
        qkvr, kv_conv, q_norm, k_norm, kv_pool, conv_pool, locations, slots, sources, starts,
        lengths, destination_slots, destination_offsets, rel_proj, page_table, out, partial, stats,
        flags, tokens, rows, lines, pages, conv_pool.shape[1], LAYER_UNIT.value * layer, log_alpha,
        eps, KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, REL=rel,
        GROUPS=max(16, group), DIMS=max(16, triton.next_power_of_2(dim)),
        RELS=max(16, triton.next_power_of_2(rel)), EXTENT=extent, WINDOW=window, PAGE=page,
        TABLE=table, FLOOR=log_floor, SPLITS=config.splits, LEAST=config.least, BLOCK=config.block,
        PADDED=triton.next_power_of_2(config.splits), PARTS=config.parts, SINGLE=config.single,
        DESTINATIONS=destination_slots.shape[1], RING=conv_pool.shape[2], MERGERS=mergers,
        DESTINED=triton.next_power_of_2(destination_slots.shape[1]), SLICES=slices,
        SLICE=group // slices, num_warps=config.warps, num_stages=config.stages,
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
