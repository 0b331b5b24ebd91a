"""The router in two launches: the gate's logits, then choice, weights and grouping by expert.

Logits: for one token whole rows of the gate a program, else tiles split over the depth, whose
partial sums the second launch adds in turn. Choice: a program takes a tile of tokens; it also
ranks its assignments within the tile and counts them by expert. With more than one tile the
program that finishes last (by a ticket that the first launch zeroes) turns counts into offsets and
places all assignments: a counting sort, stable, the same whoever is last.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels._triton import CompileCase, launchable, launches, meta
from inkling_engine.kernels.linear.triton_kernel import MAX_DEPTH, product_with_vector

TILE_TOKENS = 16  # of a program that chooses
PROGRAMS = 160  # that the gate's product is split into at most, if by depth
PLACE_BLOCK = 4096  # assignments that the last program places at once
COUNT_BLOCK = 32  # tiles whose counts it sums at once


@triton.jit
def gate_kernel(
    y, weight, logits, ticket, TOKENS: tl.constexpr, EXPERTS: tl.constexpr, DEPTH: tl.constexpr,
    SPLIT_DEPTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """logits [splits, TOKENS, EXPERTS] f32: partial products over SPLIT_DEPTH each."""
    split = tl.program_id(2)
    if tl.program_id(0) + tl.program_id(1) + split == 0:
        tl.store(ticket, 0)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = split * SPLIT_DEPTH + tl.arange(0, BLOCK_K)
    x_tile = y + m.to(tl.int64)[:, None] * DEPTH + k[None, :]
    w_tile = weight + n[None, :] * DEPTH + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, SPLIT_DEPTH, BLOCK_K):
        deep = k < DEPTH - start
        x = tl.load(x_tile + start, mask=(m < TOKENS)[:, None] & deep[None, :], other=0.0)
        w = tl.load(w_tile + start, mask=(n < EXPERTS)[None, :] & deep[:, None], other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
    line = logits + (split * TOKENS + m)[:, None] * EXPERTS + n[None, :]
    tl.store(line, total, mask=(m < TOKENS)[:, None] & (n < EXPERTS)[None, :])


@triton.jit
def best_experts(
    logit, bias, mask, ROUTED: tl.constexpr, TOP_K: tl.constexpr, LANES: tl.constexpr,
    SLOT_LANES: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Experts [BLOCK_T, SLOT_LANES]: the TOP_K best routed ones, then the shared ones.

    One integer orders scores, highest first, then indices, lowest first.
    """
    lane, slot = tl.arange(0, LANES), tl.arange(0, SLOT_LANES)
    score = tl.div_rn(1.0, 1.0 + tl.exp(-logit)) + bias[None, :]
    score = tl.where(score == score, score, -float("inf"))  # noqa: PLR0124
    bits = score.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    none: tl.constexpr = -(2**63) + 1
    key = tl.where(mask, (bits.to(tl.int64) << 32) | (LANES - 1 - lane)[None, :], none)
    chosen = tl.zeros((BLOCK_T, SLOT_LANES), tl.int32) + (ROUTED - TOP_K + slot)[None, :]
    for j in tl.static_range(TOP_K):
        best = LANES - 1 - (tl.max(key, axis=1) & (LANES - 1)).to(tl.int32)
        chosen = tl.where(slot[None, :] == j, best[:, None], chosen)
        key = tl.where(lane[None, :] == best[:, None], none, key)
    return chosen


@triton.jit
def shares(logit, mask, scale):
    """softmax over logsigmoid(logit) where `mask`, times `scale`: [tokens, slots]."""
    value = tl.minimum(logit, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(logit)))
    value = tl.where(mask, value, -float("inf"))
    power = tl.where(mask, tl.exp(value - tl.max(value, axis=1)[:, None]), 0.0)
    return power / tl.sum(power, axis=1)[:, None] * scale


@triton.jit
def place(
    experts, ranks, counts, offsets, order, live_tokens, TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr, BLOCK_T: tl.constexpr,
    TILES: tl.constexpr, COUNT_BLOCK: tl.constexpr, PLACE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Offsets from the tiles' counts, then the order of all assignments."""
    lane = tl.arange(0, LANES)
    total = tl.zeros((LANES,), tl.int32)
    for first in range(0, TILES, COUNT_BLOCK):
        tile = first + tl.arange(0, COUNT_BLOCK)
        line = counts + tile[:, None] * LANES + lane[None, :]
        found = tl.load(line, mask=(tile < TILES)[:, None], other=0)
        before = tl.cumsum(found, axis=0) - found + total[None, :]
        tl.store(line, before, mask=(tile < TILES)[:, None])
        total += tl.sum(found, axis=0)
    tl.store(offsets + lane + 1, tl.cumsum(total, axis=0), mask=lane < EXPERTS)
    tl.store(offsets, 0)
    tl.debug_barrier()
    used = live_tokens * SLOTS
    for first in range(0, TOKENS * SLOTS, PLACE_BLOCK):
        assignment = first + tl.arange(0, PLACE_BLOCK)
        live = assignment < used
        expert = tl.load(experts + assignment, mask=live, other=0)
        position = tl.load(offsets + expert, mask=live, other=0)
        tile = assignment // (SLOTS * BLOCK_T)
        position += tl.load(counts + tile * LANES + expert, mask=live, other=0)
        position += tl.load(ranks + assignment, mask=live, other=0)
        tl.store(order + position, assignment, mask=live)
        tl.store(order + assignment, 0, mask=(assignment >= used) & (assignment < TOKENS * SLOTS))


@triton.jit
def choose_kernel(
    logits, gate_bias, gate_scale, starts, experts, weights, order, offsets, ranks, counts, ticket,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, ROUTED: tl.constexpr, EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, SPLITS: tl.constexpr, ROUTE_SCALE: tl.constexpr,
    LANES: tl.constexpr, ROUTED_LANES: tl.constexpr, SLOT_LANES: tl.constexpr,
    BLOCK_T: tl.constexpr, TILES: tl.constexpr, COUNT_BLOCK: tl.constexpr,
    PLACE_BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of tokens; LANES > EXPERTS, so that the last count is that of no expert.

    Loads stand here and not in the helpers that use the values: export would take pointers that
    are handed to a function for written if an address depends on its result.
    """
    tile, slot = tl.program_id(0), tl.arange(0, SLOT_LANES)
    live_tokens = tl.minimum(tl.maximum(tl.load(starts + ROWS), 0), TOKENS)
    token = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    live = token < live_tokens
    lane = tl.arange(0, ROUTED_LANES)
    mask = (token < TOKENS)[:, None] & (lane < ROUTED)[None, :]
    line = logits + token[:, None] * EXPERTS + lane[None, :]
    logit = tl.load(line, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        logit += tl.load(line + split * (TOKENS * EXPERTS), mask=mask, other=0.0)
    bias = tl.load(gate_bias + lane, mask=lane < ROUTED, other=0.0)
    chosen = best_experts(logit, bias, mask, ROUTED, TOP_K, ROUTED_LANES, SLOT_LANES, BLOCK_T)
    mask = live[:, None] & (slot < SLOTS)[None, :]
    line = logits + token[:, None] * EXPERTS + chosen
    logit = tl.load(line, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        logit += tl.load(line + split * (TOKENS * EXPERTS), mask=mask, other=0.0)
    share = shares(logit, mask, ROUTE_SCALE * tl.load(gate_scale))
    within = (token < TOKENS)[:, None] & (slot < SLOTS)[None, :]
    cell = token[:, None] * SLOTS + slot[None, :]
    tl.store(experts + cell, tl.where(mask, chosen, 0), mask=within)
    tl.store(weights + cell, tl.where(mask, share, 0.0), mask=within)

    expert = tl.reshape(tl.where(mask, chosen, LANES - 1), (BLOCK_T * SLOT_LANES,))
    assignment = tl.reshape(cell, (BLOCK_T * SLOT_LANES,))
    count = tl.histogram(expert, LANES)
    lane = tl.arange(0, LANES)
    earlier = assignment[None, :] < assignment[:, None]
    ahead = (expert[None, :] == expert[:, None]) & earlier
    real = expert < EXPERTS
    if TILES == 1:
        ahead = ahead | (expert[None, :] < expert[:, None])
        position = tl.sum(ahead.to(tl.int32), axis=1)
        tl.store(offsets + lane + 1, tl.cumsum(count, axis=0), mask=lane < EXPERTS)
        tl.store(offsets, 0)
        tl.store(order + position, assignment, mask=real)
        padded = (token >= live_tokens)[:, None] & within
        tl.store(order + cell, tl.zeros_like(cell), mask=padded)
    else:
        tl.store(ranks + assignment, tl.sum(ahead.to(tl.int32), axis=1), mask=real)
        tl.store(counts + tile * LANES + lane, count)
        tl.debug_barrier()
        if tl.atomic_add(ticket, 1) == TILES - 1:
            place(
                experts, ranks, counts, offsets, order, live_tokens, TOKENS, EXPERTS, SLOTS,
                LANES, BLOCK_T, TILES, COUNT_BLOCK, PLACE_BLOCK,
            )  # fmt: skip


class Gate(NamedTuple):
    """Blocks of the gate's product: tokens, experts, depth; splits of the depth."""

    tokens: int
    experts: int
    depth: int
    splits: int
    warps: int


def gate_config(tokens: int, experts: int, depth: int, item_bytes: int) -> Gate:
    """Tiles, and as many splits of the depth as keep all multiprocessors busy."""
    block_t, block_e, block_k, warps = (16, 16, 128, 2) if tokens <= 128 else (64, 64, 64, 4)
    if item_bytes == 4:
        block_t, block_e, block_k, warps = 16, 32, 32, 4
    block_k = min(block_k, max(16, triton.next_power_of_2(depth)))
    splits = 1
    programs = triton.cdiv(experts, block_e) * triton.cdiv(tokens, block_t)
    while splits < 8 and 2 * splits * programs <= PROGRAMS and depth >= 4 * splits * block_k:
        splits *= 2
    return Gate(block_t, block_e, block_k, splits, warps)


def _gate(y: Tensor, gate_weight: Tensor, ticket: Tensor) -> Tensor:
    """logits [splits, tokens, experts] f32; zeroes the ticket if there are several tokens."""
    (tokens, depth), count = y.shape, gate_weight.shape[0]
    if tokens == 1 and depth <= MAX_DEPTH:
        logits = y.new_empty(1, tokens, count, dtype=torch.float32)
        product_with_vector(y, gate_weight, logits)
        return logits
    gate = gate_config(tokens, count, depth, y.element_size())
    logits = y.new_empty(gate.splits, tokens, count, dtype=torch.float32)
    grid = triton.cdiv(count, gate.experts), triton.cdiv(tokens, gate.tokens), gate.splits
    split_depth = triton.cdiv(triton.cdiv(depth, gate.splits), gate.depth) * gate.depth
    launchable(gate_kernel)[grid](
        y, gate_weight, logits, ticket, TOKENS=tokens, EXPERTS=count, DEPTH=depth,
        SPLIT_DEPTH=split_depth, BLOCK_M=gate.tokens, BLOCK_N=gate.experts, BLOCK_K=gate.depth,
        num_warps=gate.warps, num_stages=4,
    )  # fmt: skip
    return logits


def router(
    y: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    gate_scale: Tensor,
    starts: Tensor,
    top_k: int,
    shared: int,
    route_scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Choose and weigh experts; see the package docstring."""
    tokens, count, slots = y.shape[0], gate_weight.shape[0], top_k + shared
    block_t = min(TILE_TOKENS, triton.next_power_of_2(tokens))
    tiles, lanes = triton.cdiv(tokens, block_t), triton.next_power_of_2(count + 1)
    experts, weights = starts.new_empty(tokens, slots), gate_bias.new_empty(tokens, slots)
    order, offsets = starts.new_empty(tokens * slots), starts.new_empty(count + 1)
    ranks, counts = torch.empty_like(order), starts.new_empty(tiles, lanes)
    ticket = starts.new_empty(1)
    logits = _gate(y, gate_weight, ticket)
    launchable(choose_kernel)[(tiles,)](
        logits, gate_bias, gate_scale, starts, experts, weights, order, offsets, ranks, counts,
        ticket, ROWS=starts.shape[0] - 1, TOKENS=tokens, ROUTED=gate_bias.shape[0], EXPERTS=count,
        TOP_K=top_k, SLOTS=slots, SPLITS=logits.shape[0], ROUTE_SCALE=route_scale, LANES=lanes,
        ROUTED_LANES=triton.next_power_of_2(gate_bias.shape[0]),
        SLOT_LANES=triton.next_power_of_2(slots), BLOCK_T=block_t, TILES=tiles,
        COUNT_BLOCK=min(COUNT_BLOCK, triton.next_power_of_2(tiles)),
        PLACE_BLOCK=min(PLACE_BLOCK, triton.next_power_of_2(tokens * slots)),
        num_warps=min(8, block_t),
    )  # fmt: skip
    return experts, weights, order, offsets


def compile_cases() -> list[CompileCase]:
    """The router of inkling-small: one tile of tokens, several, an extend step."""
    cases = []
    for tokens in (1, 8, 32, 128, 4096):
        f32, i32 = {"dtype": torch.float32}, {"dtype": torch.int32}
        gate = meta(258, 4096), meta(256, **f32), meta(1, **f32)
        starts = meta(tokens + 1, **i32)
        cases += launches(f"router-{tokens}", router, meta(tokens, 4096), *gate, starts, 6, 2, 8.0)
    return cases
