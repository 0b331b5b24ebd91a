"""Products grouped by expert, for few tokens and for many.

An assignment is one expert of one token, numbered token * SLOTS + slot. Up to some tens of tokens a
program finds those of its expert in the router's `places`; beyond, `group_kernel` has listed them.
A shared expert has every live token, so it needs no list.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

import triton
import triton.language as tl

from inkling_engine.kernels._triton import follow, prefetch_rows
from inkling_engine.kernels.swiglu.triton_kernel import silu


@triton.jit
def tile_of_expert(tiles, place, LANES: tl.constexpr):
    """(expert, tile of it) of tile `place`, expert >= number of experts if there is no such tile.

    Tiles are numbered expert by expert, `tiles` [LANES] of each.
    """
    passed = tl.cumsum(tiles, axis=0) <= place
    counted = tl.sum(tl.where(passed, tiles * 2 * LANES + 1, 0), axis=0)  # both sums in one
    return counted % (2 * LANES), place - counted // (2 * LANES)


@triton.jit
def group_kernel(
    chosen, starts, w13, w2, lists, counts, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    SLOTS: tl.constexpr, LANES: tl.constexpr, ROUTED: tl.constexpr, BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr,
    UP_ROWS: tl.constexpr, DOWN_ROWS: tl.constexpr,
):  # fmt: skip
    """lists [ROUTED, TOKENS]: the assignments of an expert, ascending; counts of them.

    With AHEAD the programs first fetch the weights of the shared experts, a piece each.
    """
    expert = tl.program_id(0)
    if AHEAD:
        row = ROUTED * 2 * WIDTH + expert * UP_ROWS + tl.arange(0, UP_ROWS)
        prefetch_rows(w13, row, 0, EXPERTS * 2 * WIDTH, HIDDEN, HIDDEN)
        row = ROUTED * HIDDEN + expert * DOWN_ROWS + tl.arange(0, DOWN_ROWS)
        prefetch_rows(w2, row, 0, EXPERTS * HIDDEN, WIDTH, WIDTH)
    follow()
    live_tokens = tl.minimum(tl.load(starts + ROWS), TOKENS)
    slot, count = tl.arange(0, LANES), 0
    routed = slot < SLOTS - (EXPERTS - ROUTED)
    for first in range(0, TOKENS, BLOCK):
        token = first + tl.arange(0, BLOCK)
        mask = (token < live_tokens)[:, None] & routed[None, :]
        choice = tl.load(chosen + token[:, None] * SLOTS + slot[None, :], mask=mask, other=-1)
        place = tl.max(tl.where(choice == expert, slot[None, :], -1), axis=1)
        match = (place >= 0).to(tl.int32)
        to = lists + expert.to(tl.int64) * TOKENS + count + tl.cumsum(match, axis=0) - 1
        tl.store(to, token * SLOTS + place, mask=place >= 0)
        count += tl.sum(match, axis=0)
    tl.store(counts + expert, count)


@triton.jit
def gated(
    y, w13, expert, assignment, live, piece, SLOTS: tl.constexpr, HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up, [BLOCK_M, BLOCK_I] f32."""
    column, k = tl.arange(0, 2 * BLOCK_I), tl.arange(0, BLOCK_K)
    pair = piece * BLOCK_I + column // 2
    weight_row = (expert * 2 + column % 2).to(tl.int64) * WIDTH + pair
    x_tile = y + (assignment // SLOTS).to(tl.int64)[:, None] * HIDDEN + k[None, :]
    w_tile = w13 + weight_row[None, :] * HIDDEN + k[:, None]
    total = tl.zeros((BLOCK_M, 2 * BLOCK_I), tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        deep = k < HIDDEN - start
        w = tl.load(
            w_tile + start, mask=(pair < WIDTH)[None, :] & deep[:, None], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        x = tl.load(x_tile + start, mask=live[:, None] & deep[None, :], other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
    gate, up = tl.split(tl.reshape(total, (BLOCK_M, BLOCK_I, 2)))
    return silu(gate) * up


@triton.jit
def reduced(
    act, w2, expert, assignment, live, h, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Columns `h` of act @ w2^T, [BLOCK_M, BLOCK_H] f32."""
    k = tl.arange(0, BLOCK_K)
    x_tile = act + assignment.to(tl.int64)[:, None] * WIDTH + k[None, :]
    w_tile = w2 + (expert.to(tl.int64) * HIDDEN + h[None, :]) * WIDTH + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        deep = k < WIDTH - start
        w = tl.load(
            w_tile + start, mask=(h < HIDDEN)[None, :] & deep[:, None], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        x = tl.load(x_tile + start, mask=live[:, None] & deep[None, :], other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
    return total


@triton.jit
def direct_kernel(
    x, weight, chosen, places, starts, out, GATE_UP: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, SLOTS: tl.constexpr, SHARED: tl.constexpr, EXPERTS: tl.constexpr,
    COUNT: tl.constexpr, LEADERS: tl.constexpr, LANES: tl.constexpr, HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`gate_up` (x = y, out = act) or `down` (x = act, out = rows) for up to DIRECT tokens.

    COUNT programs are for the routed experts or, where there are fewer (LEADERS), the routed
    assignments, of which the first of an expert does its work; then tiles of the shared experts.
    """
    piece, number = tl.program_id(0), tl.program_id(1)
    TOP: tl.constexpr = SLOTS - SHARED
    ROUTED: tl.constexpr = EXPERTS - SHARED
    token, m = tl.arange(0, LANES), tl.arange(0, BLOCK_M)
    live_tokens = tl.minimum(tl.maximum(tl.load(starts + ROWS), 0), TOKENS)
    follow()
    routed, leader, expert = number < COUNT, number // TOP, number
    if LEADERS:
        expert = tl.load(chosen + leader * SLOTS + number % TOP, mask=routed, other=0)
        expert = tl.minimum(tl.maximum(expert, 0), ROUTED - 1)
    mask = routed & (token < live_tokens)
    place = tl.load(places + token * ROUTED + expert, mask=mask, other=0).to(tl.int32)
    match = (place > 0).to(tl.int32)
    rank, count = tl.cumsum(match, axis=0) - 1, tl.sum(match, axis=0)
    if LEADERS:
        count = tl.where(tl.min(tl.where(match > 0, token, LANES), axis=0) == leader, count, 0)
    tile, which = (number - COUNT) // SHARED, (number - COUNT) % SHARED
    begin, tiles = 0, tl.cdiv(count, BLOCK_M)
    if number >= COUNT:
        begin, count, expert = tile * BLOCK_M, live_tokens, ROUTED + which
        tiles = tl.where(begin < live_tokens, 1, 0)
    index = token * SLOTS + tl.minimum(place, SLOTS) - 1
    SIZE: tl.constexpr = WIDTH if GATE_UP else HIDDEN
    n = piece * BLOCK_N + tl.arange(0, BLOCK_N)
    for step in range(tiles):
        row = begin + step * BLOCK_M + m
        own = (match > 0)[None, :] & (rank[None, :] == row[:, None])
        member = tl.sum(tl.where(own, index[None, :], 0), axis=1)
        assignment = tl.where(routed, member, row * SLOTS + TOP + which)
        live = row < count
        if GATE_UP:
            value = gated(
                x, weight, expert, assignment, live, piece, SLOTS, HIDDEN, WIDTH, BLOCK_M,
                BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            value = reduced(
                x, weight, expert, assignment, live, n, HIDDEN, WIDTH, BLOCK_M, BLOCK_N, BLOCK_K
            )
        line = out + assignment.to(tl.int64)[:, None] * SIZE + n[None, :]
        tl.store(line, value, mask=live[:, None] & (n < SIZE)[None, :])


@triton.jit
def spread(place, some, total):
    """Of `total` places `some` are taken evenly: those taken before `place`; whether it is taken."""
    most = tl.maximum(total, 1)
    before = place * some // most
    return before, (place < total) & ((place + 1) * some // most > before)


@triton.jit
def listed_kernel(
    x, weight, counts, lists, starts, out, GATE_UP: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, SLOTS: tl.constexpr, SHARED: tl.constexpr, EXPERTS: tl.constexpr,
    COUNT: tl.constexpr, SPREAD: tl.constexpr, LANES: tl.constexpr, HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """The same for any number of tokens, from the lists: COUNT tiles, then shared ones.

    With SPREAD the shared experts' tiles, which wait for arithmetic, lie among the live routed ones,
    which wait for weights from memory. Without, an expert's first tile has its number, so that hardly
    any program has to look for its own.
    """
    if GATE_UP:
        follow()  # the lists come from the launch before
    piece, number = tl.program_id(0), tl.program_id(1)
    ROUTED: tl.constexpr = EXPERTS - SHARED
    lane = tl.arange(0, LANES)
    live_tokens = tl.minimum(tl.maximum(tl.load(starts + ROWS), 0), TOKENS)
    routed, passed, expert, first = number < COUNT, number - COUNT, number, 0
    if SPREAD:
        tiles = tl.cdiv(tl.load(counts + lane, mask=lane < ROUTED, other=0), BLOCK_M)
        shared = SHARED * tl.cdiv(live_tokens, BLOCK_M)
        passed, own = spread(number, shared, shared + tl.sum(tiles, axis=0))
        routed = own == 0
        expert, tile = tile_of_expert(tiles, number - passed, LANES)
        first = tile * BLOCK_M
    elif (number >= ROUTED) & routed:
        tiles = tl.cdiv(tl.load(counts + lane, mask=lane < ROUTED, other=0), BLOCK_M)
        expert, tile = tile_of_expert(tl.maximum(tiles - 1, 0), number - ROUTED, LANES)
        first = (tile + 1) * BLOCK_M
    which = passed % SHARED
    end = tl.load(counts + expert, mask=routed & (expert < ROUTED), other=0)
    if routed == 0:
        expert, first, end = ROUTED + which, passed // SHARED * BLOCK_M, live_tokens
    if not GATE_UP:
        follow()  # only the activation comes from the launch before
    if first >= end:
        return
    row = first + tl.arange(0, BLOCK_M)
    live = row < end
    own = lists + expert.to(tl.int64) * TOKENS + row
    listed = tl.load(own, mask=live & routed, other=0)
    listed = tl.minimum(tl.maximum(listed, 0), TOKENS * SLOTS - 1)
    assignment = tl.where(routed, listed, row * SLOTS + SLOTS - SHARED + which)
    SIZE: tl.constexpr = WIDTH if GATE_UP else HIDDEN
    line = out + assignment.to(tl.int64)[:, None] * SIZE
    n = piece * STEPS * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATE_UP:
        value = gated(
            x, weight, expert, assignment, live, piece, SLOTS, HIDDEN, WIDTH, BLOCK_M, BLOCK_N,
            BLOCK_K,
        )  # fmt: skip
        tl.store(line + n[None, :], value, mask=live[:, None] & (n < SIZE)[None, :])
    elif BLOCK_K >= WIDTH:  # the rows are held while the program walks over columns
        k = tl.arange(0, BLOCK_K)
        deep = k < WIDTH
        cell = x + assignment.to(tl.int64)[:, None] * WIDTH + k[None, :]
        held = tl.load(cell, mask=live[:, None] & deep[None, :], other=0.0)
        w_tile = weight + (expert.to(tl.int64) * HIDDEN + n[None, :]) * WIDTH + k[:, None]
        for _ in range(STEPS):
            w = tl.load(w_tile, mask=(n < HIDDEN)[None, :] & deep[:, None], other=0.0)
            value = tl.dot(held, w, input_precision="ieee")
            tl.store(line + n[None, :], value, mask=live[:, None] & (n < SIZE)[None, :])
            w_tile += BLOCK_N * WIDTH
            n += BLOCK_N
    else:
        value = reduced(
            x, weight, expert, assignment, live, n, HIDDEN, WIDTH, BLOCK_M, BLOCK_N, BLOCK_K
        )
        tl.store(line + n[None, :], value, mask=live[:, None] & (n < SIZE)[None, :])
