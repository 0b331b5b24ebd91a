"""The router in two launches: the gate's logits, then choice and weights.

Logits: for one token whole rows of the gate a program, else tiles split over the depth, whose
partial sums the second launch adds in turn (many tokens: `wide_triton.py`). Choice: a program, one warp, takes one token.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels._triton import (
    CompileCase,
    follow,
    launchable,
    launches,
    load_along,
    meta,
    prefetch_rows,
)
from inkling_engine.kernels.linear.triton_kernel import MAX_DEPTH, product_with_vector
from inkling_engine.kernels.router.wide_triton import wide_config, wide_gate

PROGRAMS = 160  # that the gate's product is split into at most, if by depth
MOST_SPLITS = 8
HELD_BLOCKS = 4  # of the depth, of which few tokens' programs hold all weights
NOBODY = tl.constexpr(-(2**31))  # below the key of every score, that of -inf included


@triton.jit
def gate_kernel(
    y, weight, logits, TOKENS: tl.constexpr, EXPERTS: tl.constexpr, DEPTH: tl.constexpr,
    SPLIT_DEPTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """logits [splits, TOKENS, EXPERTS] f32: partial products over SPLIT_DEPTH each. If HELD all weights
    of a program are there before y can be read."""
    split = tl.program_id(2)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = split * SPLIT_DEPTH + tl.arange(0, BLOCK_K)
    x_tile = y + m.to(tl.int64)[:, None] * DEPTH + k[None, :]
    w_tile = weight + n[None, :] * DEPTH + k[:, None]
    x_mask, w_mask = (m < TOKENS)[:, None], (n < EXPERTS)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if HELD:
        held = load_along(w_tile, w_mask, k[:, None], SPLIT_DEPTH, BLOCK_K, DEPTH, "")
        follow()
        values = load_along(x_tile, x_mask, k[None, :], SPLIT_DEPTH, BLOCK_K, DEPTH, "")
        for step in tl.static_range(SPLIT_DEPTH // BLOCK_K):
            total = tl.dot(values[step], held[step], total, input_precision="ieee")
    else:
        prefetch_rows(weight, n, split * SPLIT_DEPTH, EXPERTS, SPLIT_DEPTH, DEPTH)
        follow()
        for start in range(0, SPLIT_DEPTH, BLOCK_K):
            deep = k < DEPTH - start
            x = tl.load(x_tile + start, mask=x_mask & deep[None, :], other=0.0)
            w = tl.load(w_tile + start, mask=w_mask & deep[:, None], other=0.0)
            total = tl.dot(x, w, total, input_precision="ieee")
    line = logits + (split * TOKENS + m)[:, None] * EXPERTS + n[None, :]
    tl.store(line, total, mask=(m < TOKENS)[:, None] & (n < EXPERTS)[None, :])


@triton.jit
def choice_keys(logit, bias, mask):
    """Scores as integers of the same order, NaN as the lowest of all; NOBODY where not `mask`.

    Integers of 32 bits are reduced by one instruction a warp.
    """
    score = tl.div_rn(1.0, 1.0 + tl.exp(-logit)) + bias
    score = tl.where(score == score, score, -float("inf"))  # noqa: PLR0124
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(mask, bits ^ ((bits >> 31) & 0x7FFFFFFF), NOBODY)


@triton.jit
def take_best(key, lane, LANES: tl.constexpr):
    """The lane of the highest key, of equal ones the first; and the keys without it."""
    best = tl.min(tl.where(key == tl.max(key, axis=0), lane, LANES - 1), axis=0)
    return best, tl.where(lane == best, NOBODY, key)


@triton.jit
def shares(logit, mask, scale):
    """softmax over logsigmoid(logit) where `mask`, times `scale`."""
    value = tl.minimum(logit, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(logit)))
    value = tl.where(mask, value, -float("inf"))
    power = tl.where(mask, tl.exp(value - tl.max(value, axis=0)), 0.0)
    return power / tl.sum(power, axis=0) * scale


@triton.jit
def choose_kernel(
    logits, gate_bias, gate_scale, starts, experts, weights, places, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, ROUTED: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    SLOTS: tl.constexpr, SPLITS: tl.constexpr, ROUTE_SCALE: tl.constexpr, LANES: tl.constexpr,
    SLOT_LANES: tl.constexpr,
):  # fmt: skip
    """The TOP_K best routed experts of a token, then the shared ones, and their weights."""
    token, lane, slot = tl.program_id(0), tl.arange(0, LANES), tl.arange(0, SLOT_LANES)
    line = logits + token * EXPERTS
    mask, taken = lane < ROUTED, slot < SLOTS
    bias = tl.load(gate_bias + lane, mask=mask, other=0.0)
    scale = ROUTE_SCALE * tl.load(gate_scale)
    live = token < tl.load(starts + ROWS)
    chosen = ROUTED - TOP_K + slot
    always = (slot >= TOP_K) & taken
    follow()
    logit = tl.load(line + lane, mask=mask, other=0.0)
    picked = tl.load(line + chosen, mask=always, other=0.0)
    for split in tl.static_range(1, SPLITS):
        logit += tl.load(line + split * TOKENS * EXPERTS + lane, mask=mask, other=0.0)
        picked += tl.load(line + split * TOKENS * EXPERTS + chosen, mask=always, other=0.0)
    key = choice_keys(logit, bias, mask)
    place = tl.zeros((LANES,), tl.int32)
    for j in tl.static_range(TOP_K):
        best, key = take_best(key, lane, LANES)
        chosen = tl.where(slot == j, best, chosen)
        place = tl.where(lane == best, j + 1, place)
    picked = tl.where(always, picked, tl.gather(logit, tl.minimum(chosen, LANES - 1), 0))
    share = shares(picked, taken, scale)
    place = tl.where(live, place, 0).to(tl.int8)
    tl.store(places + token * ROUTED + lane, place, mask=mask)
    tl.store(experts + token * SLOTS + slot, tl.where(live, chosen, 0), mask=taken)
    tl.store(weights + token * SLOTS + slot, tl.where(live, share, 0.0), mask=taken)


class Gate(NamedTuple):
    """Blocks of the gate's product: tokens, experts, depth; splits of the depth."""

    tokens: int
    experts: int
    depth: int
    splits: int
    warps: int


def gate_config(tokens: int, experts: int, depth: int, item_bytes: int) -> Gate:
    """Tiles, and splits of the depth: on an H200 few tokens are fastest with the most splits, many
    with as many as keep all multiprocessors busy."""
    few = min(64, max(16, triton.next_power_of_2(tokens)))
    block_t, block_e, block_k, warps = (few, 32, 128, 4) if tokens <= 128 else (64, 64, 64, 4)
    if item_bytes == 4:
        block_t, block_e, block_k, warps = 16, 32, 32, 4
    block_k = min(block_k, max(16, triton.next_power_of_2(depth)))
    splits = 1
    programs = triton.cdiv(experts, block_e) * triton.cdiv(tokens, block_t)
    while (
        splits < MOST_SPLITS and 2 * splits * programs <= PROGRAMS and depth >= 4 * splits * block_k
    ):
        splits *= 2
    return Gate(block_t, block_e, block_k, splits, warps)


def gate_logits(y: Tensor, gate_weight: Tensor) -> Tensor:
    """Logits [splits, tokens, experts] f32, each a part of the depth."""
    (tokens, depth), count = y.shape, gate_weight.shape[0]
    if tokens == 1 and depth <= MAX_DEPTH:
        logits = y.new_empty(1, tokens, count, dtype=torch.float32)
        product_with_vector(y, gate_weight, logits, hasty=False)
        return logits
    wide = wide_config(tokens, count, depth, y.element_size())
    if wide:
        logits = y.new_empty(wide.splits, tokens, count, dtype=torch.float32)
        wide_gate(y, gate_weight, wide, logits)
        return logits
    gate = gate_config(tokens, count, depth, y.element_size())
    logits = y.new_empty(gate.splits, tokens, count, dtype=torch.float32)
    grid = triton.cdiv(count, gate.experts), triton.cdiv(tokens, gate.tokens), gate.splits
    split_depth = triton.cdiv(triton.cdiv(depth, gate.splits), gate.depth) * gate.depth
    launchable(gate_kernel)[grid](
        y, gate_weight, logits, TOKENS=tokens, EXPERTS=count, DEPTH=depth,
        SPLIT_DEPTH=split_depth, BLOCK_M=gate.tokens, BLOCK_N=gate.experts, BLOCK_K=gate.depth,
        HELD=gate.tokens == 16 and split_depth <= HELD_BLOCKS * gate.depth,
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose and weigh experts; see the package docstring."""
    tokens, count, slots = y.shape[0], gate_weight.shape[0], top_k + shared
    experts, weights = starts.new_empty(tokens, slots), gate_bias.new_empty(tokens, slots)
    places = starts.new_empty(tokens, gate_bias.shape[0], dtype=torch.int8)
    logits = gate_logits(y, gate_weight)
    launchable(choose_kernel)[(tokens,)](
        logits, gate_bias, gate_scale, starts, experts, weights, places,
        ROWS=starts.shape[0] - 1, TOKENS=tokens, ROUTED=gate_bias.shape[0], EXPERTS=count, TOP_K=top_k, SLOTS=slots,
        SPLITS=logits.shape[0], ROUTE_SCALE=route_scale,
        LANES=triton.next_power_of_2(gate_bias.shape[0]), SLOT_LANES=triton.next_power_of_2(slots),
        num_warps=1,
    )  # fmt: skip
    return experts, weights, places


def compile_cases() -> list[CompileCase]:
    """The router of inkling-small: decode and extend steps."""
    cases = []
    for tokens in (1, 8, 128, 4096):
        f32, i32 = {"dtype": torch.float32}, {"dtype": torch.int32}
        gate = meta(258, 4096), meta(256, **f32), meta(1, **f32)
        starts = meta(tokens + 1, **i32)
        cases += launches(f"router-{tokens}", router, meta(tokens, 4096), *gate, starts, 6, 2, 8.0)
    return cases
