# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
"""The attention prologue in one launch: programs of (row or tile of tokens) x head.

Heads are the query heads, then k heads, then v heads. A query program normalises its head of a
tile of tokens and scales the head's relative vector. For k and v the first R programs of a head
convolve the first three tokens of a row, starting from its old inputs, and keep the conv state;
the others convolve the tokens of a tile that no row program took, which need inputs alone.
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
from inkling_engine.kernels._triton import CompileCase, follow, launchable, launches, meta


@dataclass(frozen=True)
class Config:
    """Tokens of a program (at least the three of a row program), warps."""

    tile: int
    warps: int


def configure(tokens: int, dim: int) -> Config:
    """Few tokens: small programs, so that one token's heads spread over the device.

    The second warp takes 2.6 to 2.4 us at 8 tokens, 3.1 to 2.6 at 128, and 2.0 to 2.15 at one.
    """
    if tokens <= 256:
        return Config(4, 1 if tokens == 1 else 2)
    return Config(16, 4 if dim > 64 else 2)


@triton.jit
def store_queries(
    qkvr, q_norm, positions, q, r, head, first, tokens, live, log_alpha, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr, REL: tl.constexpr,
    RELS: tl.constexpr, WIDTH: tl.constexpr, FLOOR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """q and r of one head for TILE tokens from `first`: norm, tau; zeros for padded tokens."""
    token = first + tl.arange(0, TILE)
    line = token.to(tl.int64)[:, None]
    known, exists = token < live, token < tokens
    tau = tl.full((TILE,), 1.0, tl.float32)
    if FLOOR > 0:
        position = tl.load(positions + token, exists, other=0)
        tau += log_alpha * tl.log(tl.maximum((position + 1).to(tl.float32) / FLOOR, 1.0))
    d = tl.arange(0, DIMS)
    inside = (d < DIM)[None, :]
    read = exists[:, None] & inside
    x = tl.load(qkvr + line * WIDTH + head * DIM + d[None, :], read, other=0.0).to(tl.float32)
    gain = tl.load(q_norm + d, d < DIM, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)
    y = tl.where(known[:, None], x * scale[:, None] * gain[None, :] * tau[:, None], 0.0)
    to = q + (line * HEADS + head) * DIM + d[None, :]
    tl.store(to, y.to(q.dtype.element_ty), read)
    c = tl.arange(0, RELS)
    read = exists[:, None] & (c < REL)[None, :]
    x = qkvr + line * WIDTH + (WIDTH - HEADS * REL + head * REL) + c[None, :]
    y = tl.load(x, read, other=0.0).to(tl.float32) * tau[:, None]
    to = r + (line * HEADS + head) * REL + c[None, :]
    tl.store(to, tl.where(known[:, None], y, 0.0), read)


@triton.jit
def store_values(
    qkvr, kv_conv, k_norm, kv_pool, locations, old, length, part, first, index, valid, ring, left,
    pages, layer, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Convolve k (part < KV_HEADS) or v of the `valid` tokens from `first` and write the pool.

    `index` [TILE] is a token's place in its row. z[index + tap] is an old input below 3. The inputs
    of the tokens `left` go to `ring` [TILE].
    """
    KV: tl.constexpr = 2 * KV_HEADS * DIM
    token = first + tl.arange(0, TILE)
    location = tl.load(locations + token, valid, other=0)
    d = tl.arange(0, DIMS)
    channel = part * DIM + d
    inside = d < DIM
    wanted = valid[:, None] & inside[None, :]
    inputs = qkvr + token.to(tl.int64)[:, None] * WIDTH + HEADS * DIM + channel[None, :]
    x = tl.load(inputs, wanted, other=0.0).to(tl.float32)
    y = x + tl.load(kv_conv + channel * 4 + 3, inside, other=0.0)[None, :] * x
    for tap in tl.static_range(3):
        place = (index + tap)[:, None]
        held = old + entry(length, place, RING) * KV + channel[None, :]
        known = wanted & (place < 3) & (length + place >= 3)
        z = tl.load(held, known, other=0.0).to(tl.float32)
        z += tl.load(inputs + (tap - 3) * WIDTH, wanted & (place >= 3), other=0.0).to(tl.float32)
        y += tl.load(kv_conv + channel * 4 + tap, inside, other=0.0)[None, :] * z
    if RING > 3:
        to = ring[:, None] + channel[None, :]
        tl.store(to, x.to(qkvr.dtype.element_ty), left[:, None] & inside[None, :])
    y = y.to(qkvr.dtype.element_ty)
    if part < KV_HEADS:
        wide = y.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / DIM + eps)
        gain = tl.load(k_norm + d, inside, other=0.0).to(tl.float32)
        y = (wide * scale[:, None] * gain[None, :]).to(qkvr.dtype.element_ty)
    page = tl.cast(layer // LAYER_UNIT, tl.int64) * pages + clamp(location // PAGE, 0, pages - 1)
    line = (page * (2 * KV_HEADS) + part) * PAGE + location % PAGE
    tl.store(kv_pool + line[:, None] * DIM + d[None, :], y, wanted)


@triton.jit
def prologue_kernel(
    qkvr, kv_conv, q_norm, k_norm, kv_pool, conv_pool, positions, token_rows, locations,
    slots, sources, starts, lengths, destination_slots, destination_offsets, q, r,
    tokens, rows, pages, pool_slots, layer, log_alpha, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr,
    REL: tl.constexpr, RELS: tl.constexpr, PAGE: tl.constexpr, FLOOR: tl.constexpr,
    TILE: tl.constexpr, DESTINATIONS: tl.constexpr, DESTINED: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM + HEADS * REL
    KV: tl.constexpr = 2 * KV_HEADS * DIM
    # A compiled program passes them in double precision.
    eps, log_alpha = tl.cast(eps, tl.float32), tl.cast(log_alpha, tl.float32)
    program, part = tl.program_id(0), tl.program_id(1) - HEADS
    live = clamp(tl.load(starts + rows), 0, tokens)
    first = (program - rows) * TILE
    i = tl.arange(0, TILE)
    if part < 0:
        follow()
        if program >= rows:
            store_queries(
                qkvr, q_norm, positions, q, r, part + HEADS, first, tokens, live, log_alpha, eps,
                HEADS, DIM, DIMS, REL, RELS, WIDTH, FLOOR, TILE,
            )  # fmt: skip
    elif program >= rows:
        known = first + i < live
        row = clamp(tl.load(token_rows + first + i, known, other=0), 0, rows - 1)
        index = first + i - tl.load(starts + row, known, other=0)
        late = known & (index >= 3)
        entries, left = conv_pool + i, late
        if RING > 3:
            end = tl.load(starts + row + 1, known, other=0)
            left = late & turns(index, end - first - i + index, RING)
            before = known_length(tl.load(lengths + row, known, other=0))
            into = tl.load(slots + row, known, other=0)
            entries = ring_at(conv_pool, layer, pool_slots, into, RING, KV)
            entries += entry(before, index + 3, RING) * KV
        follow()
        if tl.max(late.to(tl.int32)) != 0:
            store_values(
                qkvr, kv_conv, k_norm, kv_pool, locations, conv_pool, 0, part, first, index,
                late, entries, left, pages, layer, eps,
                HEADS, KV_HEADS, DIM, DIMS, PAGE, WIDTH, TILE, RING,
            )  # fmt: skip
    else:
        first = clamp(tl.load(starts + program), 0, tokens)
        count = clamp(tl.load(starts + program + 1), first, tokens) - first
        length = known_length(tl.load(lengths + program))
        source, slot = tl.load(sources + program), tl.load(slots + program)
        moved = source != slot
        old = ring_at(conv_pool, layer, pool_slots, source, RING, KV)
        ring = ring_at(conv_pool, layer, pool_slots, slot, RING, KV)
        wanted = wants_snapshots(destination_slots, program, DESTINATIONS, DESTINED)
        follow()
        if count > 0:
            # All loads stand before the first store: the compiler moves none across one.
            inputs = qkvr + tl.cast(first, tl.int64) * WIDTH + HEADS * DIM
            channels = part * DIM + tl.arange(0, DIMS)
            n0 = renewal(old, length, inputs, 0, count, moved, channels, DIM, RING, KV, WIDTH)
            n1 = renewal(old, length, inputs, 1, count, moved, channels, DIM, RING, KV, WIDTH)
            n2 = renewal(old, length, inputs, 2, count, moved, channels, DIM, RING, KV, WIDTH)
            early = i < tl.minimum(count, 3)
            store_values(
                qkvr, kv_conv, k_norm, kv_pool, locations, old, length, part, first, i,
                early, ring + entry(length, i + 3, RING) * KV, early & turns(i, count, RING),
                pages, layer, eps,
                HEADS, KV_HEADS, DIM, DIMS, PAGE, WIDTH, TILE, RING,
            )  # fmt: skip
            if wanted:
                save_snapshots(
                    old, length, inputs, count, channels, DIM, RING, KV, WIDTH, conv_pool, layer,
                    pool_slots, destination_slots, destination_offsets, program, DESTINATIONS,
                )  # fmt: skip
            renew_row(ring, n0, n1, n2, length, count, moved, channels, DIM, RING, KV)


def attention_prologue(
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
    layer: int,
    heads: int,
    log_floor: int,
    log_alpha: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Queries and relative vectors of a step; see the package docstring."""
    (tokens, width), rows, dim = qkvr.shape, slots.shape[0], q_norm.shape[0]
    kv_heads = kv_conv.shape[0] // (2 * dim)
    rel = (width - kv_conv.shape[0]) // heads - dim
    config = configure(tokens, dim)
    q = torch.empty((tokens, heads, dim), dtype=qkvr.dtype, device=qkvr.device)
    r = torch.empty((tokens, heads, rel), dtype=torch.float32, device=qkvr.device)
    programs, (pool_slots, ring) = rows + triton.cdiv(tokens, config.tile), conv_pool.shape[1:3]
    launchable(prologue_kernel)[(programs, heads + 2 * kv_heads)](
        qkvr, kv_conv, q_norm, k_norm, kv_pool, conv_pool, positions, token_rows, locations,
        slots, sources, starts, lengths, destination_slots, destination_offsets, q, r,
        tokens, rows, kv_pool.shape[1], pool_slots, LAYER_UNIT.value * layer, log_alpha, eps,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, DIMS=triton.next_power_of_2(dim),
        REL=rel, RELS=triton.next_power_of_2(rel), PAGE=kv_pool.shape[4], FLOOR=log_floor,
        TILE=config.tile, DESTINATIONS=destination_slots.shape[1],
        DESTINED=triton.next_power_of_2(destination_slots.shape[1]), RING=ring,
        num_warps=config.warps,
    )  # fmt: skip
    return q, r


def compile_cases() -> list[CompileCase]:
    """Decode, extend and verification of eight drafts of one rank of eight of inkling-small, full
    layers (with tau)."""
    heads, kv_heads, dim, rel, page = 4, 1, 128, 16, 64
    kv, i32 = 2 * kv_heads * dim, torch.int32
    cases = []
    sizes = ((1, 1), (8, 8), (128, 128), (2048, 8))
    drafting = ((9, 1, 11), (72, 8, 11), (2048, 8, 11))
    for tokens, rows, ring in (*((*size, 3) for size in sizes), *drafting):
        lines = [meta(rows, dtype=i32) for _ in range(2)]
        cases += launches(
            f"prologue-t{tokens}" + (f"-ring{ring}" if ring > 3 else ""),
            attention_prologue,
            meta(tokens, (heads + 2 * kv_heads) * dim + heads * rel),
            meta(kv, 4, dtype=torch.float32),
            meta(dim),
            meta(dim),
            meta(7, 8192, 2, kv_heads, page, dim),
            meta(7, 160, ring, kv),
            *(meta(tokens, dtype=dtype) for dtype in (i32, i32, torch.int64)),
            *lines,
            meta(rows + 1, dtype=i32),
            meta(rows, dtype=i32),
            *(meta(rows, 1 + tokens // 512, dtype=i32) for _ in range(2)),
            3,
            heads,
            128000,
            0.1,
            1e-6,
        )
    return cases
