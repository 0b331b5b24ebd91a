"""Experts of up to 16 tokens: every tile has a row for each token, so nothing is sorted.

`gate_up_few`: a program of the first token that chose an expert reads some of the expert's rows for
all tokens that chose it. `down_few`: a program owns a token and a piece of the hidden row and sums over
the token's experts; the programs of a piece are neighbours, so an expert is read from memory once.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

import triton
import triton.language as tl

from inkling_engine.kernels._triton import await_last, begin_next, follow, prefetch_rows
from inkling_engine.kernels.experts.grouped_triton import gated


@triton.jit
def gate_up_few_kernel(
    y, w13, chosen, starts, act, ROWS: tl.constexpr, TOKENS: tl.constexpr, SLOTS: tl.constexpr,
    SHARED: tl.constexpr, EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    LANES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """act [TOKENS * SLOTS, WIDTH]; the programs of the shared experts come first."""
    piece, number = tl.program_id(0), tl.program_id(1)
    TOP: tl.constexpr = SLOTS - SHARED
    ROUTED: tl.constexpr = EXPERTS - SHARED
    i = piece * BLOCK_I + tl.arange(0, BLOCK_I)
    if number < SHARED:  # these weights are read whatever is chosen
        for half in range(2):
            line = ((ROUTED + number) * 2 + half) * WIDTH + tl.minimum(i, WIDTH - 1)
            prefetch_rows(w13, line, 0, EXPERTS * 2 * WIDTH, HIDDEN, HIDDEN)
    token, slot = tl.arange(0, BLOCK_M), tl.arange(0, LANES)
    live = token < tl.minimum(tl.load(starts + ROWS), TOKENS)
    follow()
    choice = tl.maximum(number - SHARED, 0)
    choice = choice // TOP * SLOTS + choice % TOP
    expert = tl.minimum(tl.maximum(tl.load(chosen + choice), 0), ROUTED - 1)
    cell = token[:, None] * SLOTS + slot[None, :]
    theirs = tl.load(chosen + cell, mask=live[:, None] & (slot < TOP)[None, :], other=-1)
    own = theirs == expert
    if number < SHARED:
        expert, own = ROUTED + number, live[:, None] & (slot == TOP + number)[None, :]
    member = tl.max(own.to(tl.int32), axis=1) > 0
    leader = tl.min(tl.where(member, token, BLOCK_M), axis=0)
    if (number >= SHARED) & (leader != choice // SLOTS):
        return
    value = gated(
        y, w13, expert, token * SLOTS, member, piece, SLOTS, HIDDEN, WIDTH, BLOCK_M, BLOCK_I,
        BLOCK_K,
    )  # fmt: skip
    assignment = token * SLOTS + tl.sum(tl.where(own, slot[None, :], 0), axis=1)
    to = act + assignment[:, None] * WIDTH + i[None, :]
    tl.store(to, value, mask=member[:, None] & (i < WIDTH)[None, :])


@triton.jit
def down_few_kernel(
    act, w2, chosen, weights, starts, out, ROWS: tl.constexpr, SLOTS: tl.constexpr,
    LANES: tl.constexpr, PARTS: tl.constexpr, EXPERTS: tl.constexpr, HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """A piece of a token's out row: the rows of w2 of all its experts, held whole at once.

    A warp has the experts of one of PARTS parts and sums them before it sums its threads.
    """
    begin_next()
    token = tl.program_id(0)
    EACH: tl.constexpr = LANES // PARTS
    slot = tl.arange(0, PARTS)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.arange(0, BLOCK_I)
    live = (token < tl.load(starts + ROWS)) & (slot < SLOTS)
    assignment = token * SLOTS + slot
    expert = tl.load(chosen + assignment, mask=slot < SLOTS, other=0)
    expert = tl.minimum(tl.maximum(expert, 0), EXPERTS - 1).to(tl.int64)
    line = (expert * HIDDEN)[:, :, None] + h[None, None, :]
    within = live[:, :, None] & (h < HIDDEN)[None, None, :]
    w = tl.load(
        w2 + line[:, :, :, None] * WIDTH + i[None, None, None, :],
        mask=within[:, :, :, None] & (i < WIDTH)[None, None, None, :], other=0.0,
        eviction_policy="evict_first",
    )  # fmt: skip
    share = tl.load(weights + assignment, mask=live, other=0.0)
    await_last()  # choices and weights are older than the launch before
    cell = assignment[:, :, None] * WIDTH + i[None, None, :]
    values = tl.load(act + cell, mask=live[:, :, None] & (i < WIDTH)[None, None, :], other=0.0)
    values = values.to(tl.float32) * share[:, :, None]
    down = tl.sum(w.to(tl.float32) * values[:, :, None, :], axis=1)
    total = tl.sum(tl.sum(down, axis=2), axis=0)
    tl.store(out + token * HIDDEN + h, total, mask=h < HIDDEN)
