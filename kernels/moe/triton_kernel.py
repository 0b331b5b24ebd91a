"""Router and experts of one token in three launches: the router's gate, gate and up, down.

Nobody writes down what was chosen: each program of the two expert products chooses from the gate's
logits, which takes less time than a launch between them. `down` does so before the launch before it
has ended, for the logits are older, and so holds its weights by then. One token needs no tensor
cores: a program holds whole rows of weights in registers, all of them on the way at once.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels._triton import (
    CompileCase,
    await_last,
    begin_next,
    follow,
    launchable,
    launches,
    meta,
)
from inkling_engine.kernels.experts.triton_kernel import experts
from inkling_engine.kernels.linear.triton_kernel import MAX_DEPTH, product_with_vector
from inkling_engine.kernels.router.triton_kernel import (
    NOBODY,
    choice_keys,
    router,
    shares,
)
from inkling_engine.kernels.swiglu.triton_kernel import silu

WARP = tl.constexpr(32)  # threads


@triton.jit
def keys_in_parts(logits, gate_bias, ROUTED: tl.constexpr, LANES: tl.constexpr):
    """The keys of the choice, WARP experts a tensor, so that each warp holds all of them: the best is
    then found without waiting for other warps."""
    SIZE: tl.constexpr = min(LANES, WARP)
    logit, bias, keys = (), (), ()
    for first in tl.static_range(0, LANES, SIZE):
        lane = tl.arange(0, SIZE) + first
        logit += (tl.load(logits + lane, mask=lane < ROUTED, other=0.0),)
        bias += (tl.load(gate_bias + lane, mask=lane < ROUTED, other=0.0),)
    for part in tl.static_range(LANES // SIZE):
        lane = tl.arange(0, SIZE) + part * SIZE
        keys += (choice_keys(logit[part], bias[part], lane < ROUTED),)
    return keys


@triton.jit
def take_best_of_parts(keys, LANES: tl.constexpr):
    """The expert of the highest key, of equal ones the first; and the keys without it."""
    SIZE: tl.constexpr = min(LANES, WARP)
    lane = tl.arange(0, SIZE)
    high = keys[0]
    for part in tl.static_range(1, LANES // SIZE):
        high = tl.maximum(high, keys[part])
    high = tl.max(high, axis=0)
    best = tl.where(keys[0] == high, lane, LANES - 1)
    for part in tl.static_range(1, LANES // SIZE):
        best = tl.minimum(best, tl.where(keys[part] == high, lane + part * SIZE, LANES - 1))
    best = tl.min(best, axis=0)
    left = ()
    for part in tl.static_range(LANES // SIZE):
        left += (tl.where(lane + part * SIZE == best, NOBODY, keys[part]),)
    return best, left


@triton.jit
def up_kernel(
    y, w13, logits, gate_bias, starts, act, ROWS: tl.constexpr, ROUTED: tl.constexpr,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    LANES: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """act [SLOTS, WIDTH] = silu(gate) * up: some pairs of rows of the slot's expert."""
    slot = SLOTS - 1 - tl.program_id(1)  # shared experts first: they need not wait for a choice
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    h, live = tl.arange(0, BLOCK_H), tl.load(starts + ROWS) > 0
    values = tl.load(y + h, mask=h < HIDDEN, other=0.0)  # older than the logits
    expert = ROUTED - TOP_K + slot
    if slot < TOP_K:
        follow()
        keys = keys_in_parts(logits, gate_bias, ROUTED, LANES)
        for _ in range(slot + 1):
            expert, keys = take_best_of_parts(keys, LANES)
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
    ROUTED: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, ROUTE_SCALE: tl.constexpr,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, SLOT_LANES: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """A piece of the out row: the rows of w2 of all chosen experts, held whole at once."""
    begin_next()
    slot = tl.arange(0, SLOT_LANES)
    h, i = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_I)
    taken = slot < SLOTS
    live = (tl.load(starts + ROWS) > 0) & taken
    keys = keys_in_parts(logits, gate_bias, ROUTED, LANES)
    chosen = tl.where(taken, ROUTED - TOP_K + slot, 0)
    for j in tl.static_range(TOP_K):
        best, keys = take_best_of_parts(keys, LANES)
        chosen = tl.where(slot == j, best, chosen)
    line = (chosen.to(tl.int64) * HIDDEN)[:, None] + h[None, :]
    within = live[:, None] & (h < HIDDEN)[None, :]
    w = tl.load(
        w2 + line[:, :, None] * WIDTH + i[None, None, :],
        mask=within[:, :, None] & (i < WIDTH)[None, None, :], other=0.0,
        eviction_policy="evict_first",
    )  # fmt: skip
    scale = ROUTE_SCALE * tl.load(gate_scale)
    share = shares(tl.load(logits + chosen, mask=taken, other=0.0), taken, scale)
    share = tl.where(live, share, 0.0)
    await_last()
    cell = slot[:, None] * WIDTH + i[None, :]
    values = tl.load(act + cell, mask=live[:, None] & (i < WIDTH)[None, :], other=0.0)
    down = tl.sum(w.to(tl.float32) * values.to(tl.float32)[:, None, :], axis=2)
    tl.store(out + h, tl.sum(down * share[:, None], axis=0), mask=h < HIDDEN)


UP_BYTES, DOWN_BYTES = 65536, 8192  # of weights that a program holds, in bf16
UP_WARPS, DOWN_WARPS = 4, 1


def held_rows(held_bytes: int, row: int, most: int) -> int:
    """Rows of `row` bytes that a program holds, a power of 2, no more than there are.

    A step of one row through twelve layers of inkling-small at TP 8, on an H200: 476 us, and 484 with
    half of UP_BYTES, 497 with twice as much in 8 warps, 514 with half of DOWN_BYTES, 490 with twice
    as much in 4 warps (another 36 less without fetching later weights to L2 on the way, as now).
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
    logits, act = gate_bias.new_empty(1, count), y.new_empty(slots, width)
    out = torch.empty_like(y)
    block_h, block_i = triton.next_power_of_2(hidden), triton.next_power_of_2(width)
    product_with_vector(y, gate_weight, logits, hasty=False)
    sizes = {
        "ROWS": starts.shape[0] - 1, "ROUTED": routed, "TOP_K": top_k, "SLOTS": slots,
        "HIDDEN": hidden, "WIDTH": width, "LANES": triton.next_power_of_2(routed),
    }  # fmt: skip
    pairs = held_rows(UP_BYTES, 2 * block_h * y.element_size(), width)
    launchable(up_kernel)[(triton.cdiv(width, pairs), slots)](
        y, w13, logits, gate_bias, starts, act, **sizes, BLOCK_I=pairs, BLOCK_H=block_h,
        num_warps=UP_WARPS,
    )  # fmt: skip
    lanes = triton.next_power_of_2(slots)
    rows = held_rows(DOWN_BYTES, lanes * block_i * y.element_size(), hidden)
    launchable(down_kernel)[(triton.cdiv(hidden, rows),)](
        act, w2, logits, gate_bias, gate_scale, starts, out, **sizes, ROUTE_SCALE=route_scale,
        SLOT_LANES=lanes, BLOCK_H=rows, BLOCK_I=block_i, num_warps=DOWN_WARPS,
    )  # fmt: skip
    return out


def compile_cases() -> list[CompileCase]:
    """One token of inkling-small at TP 8."""
    f32, experts_, hidden, width = {"dtype": torch.float32}, 258, 4096, 256
    gate = meta(experts_, hidden), meta(256, **f32), meta(1, **f32)
    weights = meta(experts_, 2 * width, hidden), meta(experts_, hidden, width)
    starts = meta(2, dtype=torch.int32)
    return launches("moe", moe, meta(1, hidden), *gate, *weights, starts, 6, 2, 8.0)
