"""The mixture of experts as products grouped by expert.

1. `gate_up`: a program owns a tile of one expert's tokens and some of its gate and up rows,
   interleaved so that a pair lands in one thread, and writes the gated activation.
2. Few tokens: `down_few`, a program owns a token and a piece of the hidden row and sums over the
   token's experts. More: `down`, grouped again, writes a row for each expert of each token, and
3. `mix` sums them a token. Nothing is accumulated by atomics: results are deterministic.

Which tokens chose an expert: up to DIRECT of them, a program looks for itself through all choices;
beyond, `group` lists them once. A shared expert has every live token, so it needs no list.
An assignment is one expert of one token, numbered token * SLOTS + slot.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels._triton import CompileCase, launchable, launches, meta
from inkling_engine.kernels.swiglu.triton_kernel import silu

FEW = 8  # tokens up to which a program sums over a token's experts itself
FEW_BYTES = 16384  # of weight that a program of `down_few` holds
DIRECT = 32  # tokens up to which that costs less than a launch
MIX_BLOCK = 1024
SCAN_BLOCK = 4096  # choices that a program of `group` looks at at once


@triton.jit
def tile_of_expert(count, lane, place, LANES: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, first row) of tile `place`, expert >= number of experts if there is no such tile.

    Tiles are numbered expert by expert, ceil(count / BLOCK_M) of each.
    """
    tiles = (count + BLOCK_M - 1) // BLOCK_M
    passed = tl.cumsum(tiles, axis=0) <= place
    counted = tl.sum(tl.where(passed, tiles * 2 * LANES + 1, 0), axis=0)  # both sums in one
    return counted % (2 * LANES), (place - counted // (2 * LANES)) * BLOCK_M


@triton.jit
def group_kernel(
    places, starts, lists, counts, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    SLOTS: tl.constexpr, ROUTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """lists [ROUTED, TOKENS]: the assignments of an expert, ascending; counts of them."""
    expert = tl.program_id(0)
    live_tokens = tl.minimum(tl.load(starts + ROWS), TOKENS)
    count = 0
    for first in range(0, TOKENS, BLOCK):
        token = first + tl.arange(0, BLOCK)
        place = tl.load(places + token * ROUTED + expert, mask=token < live_tokens, other=0)
        match = (place > 0).to(tl.int32)
        to = lists + expert.to(tl.int64) * TOKENS + count + tl.cumsum(match, axis=0) - 1
        tl.store(to, token * SLOTS + tl.minimum(place, SLOTS) - 1, mask=place > 0)
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
    routed, leader, expert = number < COUNT, number // TOP, number
    if LEADERS:
        expert = tl.load(chosen + leader * SLOTS + number % TOP, mask=routed, other=0)
        expert = tl.minimum(tl.maximum(expert, 0), ROUTED - 1)
    mask = routed & (token < live_tokens)
    if TOKENS == 1:
        place = tl.where(mask, number % TOP + 1, 0)
    else:
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
def listed_kernel(
    x, weight, counts, lists, starts, out, GATE_UP: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, SLOTS: tl.constexpr, SHARED: tl.constexpr, EXPERTS: tl.constexpr,
    COUNT: tl.constexpr, LANES: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The same for any number of tokens, from the lists: COUNT tiles, then shared ones."""
    piece, number = tl.program_id(0), tl.program_id(1)
    ROUTED: tl.constexpr = EXPERTS - SHARED
    lane = tl.arange(0, LANES)
    live_tokens = tl.minimum(tl.maximum(tl.load(starts + ROWS), 0), TOKENS)
    count = tl.load(counts + lane, mask=lane < ROUTED, other=0)
    expert, first = tile_of_expert(count, lane, number, LANES, BLOCK_M)
    routed, which = number < COUNT, (number - COUNT) % SHARED
    end = tl.load(counts + expert, mask=routed & (expert < ROUTED), other=0)
    if number >= COUNT:
        expert, first, end = ROUTED + which, (number - COUNT) // SHARED * BLOCK_M, live_tokens
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


@triton.jit
def down_few_kernel(
    act, w2, chosen, weights, starts, out, ROWS: tl.constexpr, SLOTS: tl.constexpr,
    LANES: tl.constexpr, EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """A piece of a token's out row: the rows of w2 of all its experts, held whole at once."""
    token, slot = tl.program_id(1), tl.arange(0, LANES)
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.arange(0, BLOCK_I)
    live = (token < tl.load(starts + ROWS)) & (slot < SLOTS)
    assignment = token * SLOTS + slot
    expert = tl.load(chosen + assignment, mask=slot < SLOTS, other=0)
    expert = tl.minimum(tl.maximum(expert, 0), EXPERTS - 1).to(tl.int64)
    line = (expert * HIDDEN)[:, None] + h[None, :]
    within = live[:, None] & (h < HIDDEN)[None, :]
    w = tl.load(
        w2 + line[:, :, None] * WIDTH + i[None, None, :],
        mask=within[:, :, None] & (i < WIDTH)[None, None, :], other=0.0,
        eviction_policy="evict_first",
    )  # fmt: skip
    share = tl.load(weights + assignment, mask=live, other=0.0)
    cell = assignment[:, None] * WIDTH + i[None, :]
    values = tl.load(act + cell, mask=live[:, None] & (i < WIDTH)[None, :], other=0.0)
    down = tl.sum(w.to(tl.float32) * values.to(tl.float32)[:, None, :], axis=2)
    tl.store(out + token * HIDDEN + h, tl.sum(down * share[:, None], axis=0), mask=h < HIDDEN)


@triton.jit
def mix_kernel(
    rows, weights, starts, out, ROWS: tl.constexpr, SLOTS: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out = sum over a token's assignments, in turn, of weight * row; zeros for padded tokens."""
    token = tl.program_id(1).to(tl.int64)
    h = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = token < tl.load(starts + ROWS)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(SLOTS):
        assignment = token * SLOTS + slot
        share = tl.load(weights + assignment, mask=live, other=0.0)
        row = tl.load(
            rows + assignment * HIDDEN + h, mask=live & (h < HIDDEN), other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        total += share * row.to(tl.float32)
    tl.store(out + token * HIDDEN + h, total, mask=h < HIDDEN)


class Tiles(NamedTuple):
    """Blocks of a grouped product: tokens, columns (pairs in `gate_up`), depth."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    steps: int = 1  # blocks of columns that a program of `down` walks over


GATE_UP = {  # by rows of a tile; bf16
    16: Tiles(16, 16, 256, 4, 4),
    32: Tiles(32, 32, 128, 4, 4),
    64: Tiles(64, 64, 64, 4, 4),
    128: Tiles(128, 128, 64, 8, 4),
}
DOWN = {
    16: Tiles(16, 128, 64, 4, 4),
    32: Tiles(32, 128, 64, 4, 4),
    64: Tiles(64, 128, 64, 4, 4),
    128: Tiles(128, 64, 256, 8, 4, 32),  # H200, 4096 tokens: 255 us; without steps 306
}
WIDE = Tiles(16, 32, 32, 4, 2)  # fp32


def tile_rows(tokens: int, top: int, routed: int) -> int:
    """Rows of a tile: most experts should need one only, so that a weight is read once."""
    mean = tokens * top / routed
    return 16 if mean <= 8 else 32 if mean <= 24 else 64 if mean <= 48 else 128


def fitted(tiles: Tiles, columns: int, depth: int) -> Tiles:
    """`tiles` no wider than the product itself; 16 is the least that a product takes."""
    return tiles._replace(
        columns=min(tiles.columns, max(16, triton.next_power_of_2(columns))),
        depth=min(tiles.depth, max(16, triton.next_power_of_2(depth))),
    )


def most_tiles(assignments: int, experts: int, rows: int) -> int:
    """An upper bound of sum over experts of ceil(count / rows)."""
    return min(assignments, min(assignments, experts) + assignments // rows)


def experts(
    y: Tensor,
    w13: Tensor,
    w2: Tensor,
    chosen: Tensor,
    weights: Tensor,
    places: Tensor,
    starts: Tensor,
) -> Tensor:
    """Run each expert over its tokens and mix; see the package docstring."""
    (tokens, hidden), slots, (count, _, width) = y.shape, chosen.shape[1], w2.shape
    routed, assignments = places.shape[1], tokens * slots
    shared, top = count - routed, slots - count + routed
    act, out, rows = y.new_empty(assignments, width), torch.empty_like(y), starts.shape[0] - 1
    size = tile_rows(tokens, top, routed)
    wide = y.dtype == torch.float32
    up = fitted(WIDE if wide else GATE_UP[size], width, hidden)
    down = fitted(WIDE if wide else DOWN[size], hidden, width)
    sizes = {
        "ROWS": rows, "TOKENS": tokens, "SLOTS": slots, "SHARED": shared, "EXPERTS": count,
        "HIDDEN": hidden, "WIDTH": width,
    }  # fmt: skip
    direct = tokens <= DIRECT
    if not direct:
        lists, counts = starts.new_empty(routed, tokens), starts.new_empty(routed)
        launchable(group_kernel)[(routed,)](
            places, starts, lists, counts, ROWS=rows, TOKENS=tokens, SLOTS=slots, ROUTED=routed,
            BLOCK=min(SCAN_BLOCK, triton.next_power_of_2(tokens)), num_warps=8,
        )  # fmt: skip

    def product(x: Tensor, weight: Tensor, to: Tensor, tiles: Tiles, columns: int) -> None:
        blocks = {"BLOCK_M": tiles.rows, "BLOCK_N": tiles.columns, "BLOCK_K": tiles.depth}
        options = {**blocks, "num_warps": tiles.warps, "num_stages": tiles.stages}
        most = tokens * top if direct else most_tiles(tokens * top, routed, tiles.rows)
        programs = min(most, routed) if direct else most
        all_tiles = programs + shared * triton.cdiv(tokens, tiles.rows)
        grid = triton.cdiv(columns, tiles.columns * tiles.steps), all_tiles
        if direct:
            launchable(direct_kernel)[grid](
                x, weight, chosen, places, starts, to, GATE_UP=to is act, **sizes, COUNT=programs,
                LEADERS=most < routed, LANES=triton.next_power_of_2(tokens), **options,
            )  # fmt: skip
        else:
            launchable(listed_kernel)[grid](
                x, weight, counts, lists, starts, to, GATE_UP=to is act, **sizes, COUNT=programs,
                LANES=triton.next_power_of_2(routed), STEPS=tiles.steps, **options,
            )  # fmt: skip

    product(y, w13, act, up, width)
    if tokens <= FEW:
        _down_few(act, w2, chosen, weights, starts, out)
        return out
    products = y.new_empty(assignments, hidden, dtype=torch.float32 if direct else y.dtype)
    product(act, w2, products, down, hidden)
    block = min(MIX_BLOCK, triton.next_power_of_2(hidden))
    launchable(mix_kernel)[(triton.cdiv(hidden, block), tokens)](
        products, weights, starts, out, ROWS=rows, SLOTS=slots, HIDDEN=hidden, BLOCK=block
    )
    return out


def _down_few(
    act: Tensor, w2: Tensor, chosen: Tensor, weights: Tensor, starts: Tensor, out: Tensor
) -> None:
    (tokens, slots), (count, hidden, width) = weights.shape, w2.shape
    lanes, block_i = triton.next_power_of_2(slots), triton.next_power_of_2(width)
    block_h = max(1, FEW_BYTES // (lanes * block_i * w2.element_size()))
    block_h = min(block_h, triton.next_power_of_2(hidden))
    launchable(down_few_kernel)[(triton.cdiv(hidden, block_h), tokens)](
        act, w2, chosen, weights, starts, out, ROWS=starts.shape[0] - 1, SLOTS=slots, LANES=lanes,
        EXPERTS=count, HIDDEN=hidden, WIDTH=width, BLOCK_H=block_h, BLOCK_I=block_i, num_warps=4,
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """The experts of inkling-small at TP 8 for each tile height."""
    cases = []
    for tokens in (1, 32, 512, 1024, 4096):
        y, w13, w2 = meta(tokens, 4096), meta(258, 512, 4096), meta(258, 4096, 256)
        weights, starts = meta(tokens, 8, dtype=torch.float32), meta(17, dtype=torch.int32)
        chosen, places = meta(tokens, 8, dtype=torch.int32), meta(tokens, 256, dtype=torch.int8)
        arguments = y, w13, w2, chosen, weights, places, starts
        cases += launches(f"experts-{tokens}", experts, *arguments)
    return cases
