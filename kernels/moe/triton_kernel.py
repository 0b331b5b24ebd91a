"""Router and experts of one token in three launches: gate, gate and up, down.

Nobody writes down what was chosen: each program of the two expert products chooses from the gate's
logits, which takes less time than a launch between them. `down` does so before the launch before it
has ended, for the logits are older, and so holds its weights by then. One token needs no tensor
cores: a program holds whole rows of weights in registers, all of them on the way at once.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels._triton import CompileCase, follow, launchable, launches, meta
from inkling_engine.kernels.experts.triton_kernel import experts
from inkling_engine.kernels.linear.triton_kernel import MAX_DEPTH
from inkling_engine.kernels.router.triton_kernel import (
    choice_keys,
    gate_logits,
    router,
    shares,
    take_best,
)
from inkling_engine.kernels.swiglu.triton_kernel import silu


@triton.jit
def summed(logits, index, mask, EXPERTS: tl.constexpr, SPLITS: tl.constexpr):
    """The logits at `index`, from their SPLITS parts [SPLITS, EXPERTS]."""
    logit = tl.load(logits + index, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        logit += tl.load(logits + split * EXPERTS + index, mask=mask, other=0.0)
    return logit


@triton.jit
def up_kernel(
    y, w13, logits, gate_bias, starts, act, ROWS: tl.constexpr, ROUTED: tl.constexpr,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, SPLITS: tl.constexpr,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """act [SLOTS, WIDTH] = silu(gate) * up: some pairs of rows of the slot's expert."""
    slot = SLOTS - 1 - tl.program_id(1)  # shared experts first: they need not wait for a choice
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    h, lane = tl.arange(0, BLOCK_H), tl.arange(0, LANES)
    live, mask = tl.load(starts + ROWS) > 0, lane < ROUTED
    bias = tl.load(gate_bias + lane, mask=mask, other=0.0)
    values = tl.load(y + h, mask=h < HIDDEN, other=0.0)  # older than the logits
    expert = ROUTED - TOP_K + slot
    if slot < TOP_K:
        follow()
        key = choice_keys(summed(logits, lane, mask, EXPERTS, SPLITS), bias, mask)
        for _ in range(slot + 1):
            expert, key = take_best(key, lane, LANES)
    line = expert.to(tl.int64) * (2 * WIDTH) + i
    within = ((i < WIDTH) & live)[:, None] & (h < HIDDEN)[None, :]
    tile = w13 + line[:, None] * HIDDEN + h[None, :]
    gate = tl.load(tile, mask=within, other=0.0, eviction_policy="evict_first")
    up = tl.load(tile + WIDTH * HIDDEN, mask=within, other=0.0, eviction_policy="evict_first")
    if slot >= TOP_K:
        follow()
    wide = values.to(tl.float32)[None, :]
    gate = tl.sum(gate.to(tl.float32) * wide, axis=1)
    up = tl.sum(up.to(tl.float32) * wide, axis=1)
    tl.store(act + slot * WIDTH + i, silu(gate) * up, mask=i < WIDTH)


@triton.jit
def down_kernel(
    act, w2, logits, gate_bias, gate_scale, starts, out, ROWS: tl.constexpr,
    ROUTED: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
    SPLITS: tl.constexpr, ROUTE_SCALE: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    LANES: tl.constexpr, SLOT_LANES: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """A piece of the out row: the rows of w2 of all chosen experts, held whole at once."""
    lane, slot = tl.arange(0, LANES), tl.arange(0, SLOT_LANES)
    h, i = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_I)
    mask, taken = lane < ROUTED, slot < SLOTS
    bias = tl.load(gate_bias + lane, mask=mask, other=0.0)
    live = (tl.load(starts + ROWS) > 0) & taken
    key = choice_keys(summed(logits, lane, mask, EXPERTS, SPLITS), bias, mask)
    chosen = tl.where(taken, ROUTED - TOP_K + slot, 0)
    for j in tl.static_range(TOP_K):
        best, key = take_best(key, lane, LANES)
        chosen = tl.where(slot == j, best, chosen)
    line = (chosen.to(tl.int64) * HIDDEN)[:, None] + h[None, :]
    within = live[:, None] & (h < HIDDEN)[None, :]
    w = tl.load(
        w2 + line[:, :, None] * WIDTH + i[None, None, :],
        mask=within[:, :, None] & (i < WIDTH)[None, None, :], other=0.0,
        eviction_policy="evict_first",
    )  # fmt: skip
    scale = ROUTE_SCALE * tl.load(gate_scale)
    share = shares(summed(logits, chosen, taken, EXPERTS, SPLITS), taken, scale)
    share = tl.where(live, share, 0.0)
    follow()
    cell = slot[:, None] * WIDTH + i[None, :]
    values = tl.load(act + cell, mask=live[:, None] & (i < WIDTH)[None, :], other=0.0)
    down = tl.sum(w.to(tl.float32) * values.to(tl.float32)[:, None, :], axis=2)
    tl.store(out + h, tl.sum(down * share[:, None], axis=0), mask=h < HIDDEN)


UP_BYTES, DOWN_BYTES = 32768, 16384  # of weights that a program holds, in bf16
WARPS = 4


def held_rows(held_bytes: int, row: int, most: int) -> int:
    """Rows of `row` bytes that a program holds, a power of 2, no more than there are.

    H200, router and experts of inkling-small at TP 8: 17.4 us; 19.1 with half of UP_BYTES, 18.9
    with twice as much, 17.8 with twice DOWN_BYTES, 19.3 with 8 warps; 22.4 as two ops.
    """
    rows: int = triton.next_power_of_2(most)
    return min(max(1, held_bytes // row), rows)


def moe(
    y: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    gate_scale: Tensor,
    w13: Tensor,
    w2: Tensor,
    starts: Tensor,
    top_k: int,
    shared: int,
    route_scale: float,
) -> Tensor:
    """Choose, run and mix experts; see the package docstring."""
    (tokens, hidden), (count, _, width), routed = y.shape, w2.shape, gate_bias.shape[0]
    if tokens != 1 or hidden > MAX_DEPTH:
        choice = router(y, gate_weight, gate_bias, gate_scale, starts, top_k, shared, route_scale)
        return experts(y, w13, w2, *choice, starts)
    slots = top_k + shared
    logits = gate_logits(y, gate_weight)
    act, out = y.new_empty(slots, width), torch.empty_like(y)
    sizes = {
        "ROWS": starts.shape[0] - 1, "ROUTED": routed, "EXPERTS": count, "TOP_K": top_k,
        "SLOTS": slots, "SPLITS": logits.shape[0], "HIDDEN": hidden, "WIDTH": width,
        "LANES": triton.next_power_of_2(routed),
    }  # fmt: skip
    block_h, block_i = triton.next_power_of_2(hidden), triton.next_power_of_2(width)
    pairs = held_rows(UP_BYTES, 2 * block_h * y.element_size(), width)
    launchable(up_kernel)[(triton.cdiv(width, pairs), slots)](
        y, w13, logits, gate_bias, starts, act, **sizes, BLOCK_I=pairs, BLOCK_H=block_h,
        num_warps=WARPS,
    )  # fmt: skip
    lanes = triton.next_power_of_2(slots)
    rows = held_rows(DOWN_BYTES, lanes * block_i * y.element_size(), hidden)
    launchable(down_kernel)[(triton.cdiv(hidden, rows),)](
        act, w2, logits, gate_bias, gate_scale, starts, out, **sizes, ROUTE_SCALE=route_scale,
        SLOT_LANES=lanes, BLOCK_H=rows, BLOCK_I=block_i, num_warps=WARPS,
    )  # fmt: skip
    return out


def compile_cases() -> list[CompileCase]:
    """One token of inkling-small at TP 8."""
    f32, experts_, hidden, width = {"dtype": torch.float32}, 258, 4096, 256
    gate = meta(experts_, hidden), meta(256, **f32), meta(1, **f32)
    weights = meta(experts_, 2 * width, hidden), meta(experts_, hidden, width)
    starts = meta(2, dtype=torch.int32)
    return launches("moe", moe, meta(1, hidden), *gate, *weights, starts, 6, 2, 8.0)
