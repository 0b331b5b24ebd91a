"""The mixture of experts as two or three launches over assignments grouped by expert.

1. `gate_up`: a program owns a tile of one expert's assignments and some of its gate and up rows,
   interleaved so that a pair lands in one thread, and writes the gated activation.
2. Few tokens: `down_few`, a program owns a token and a piece of the hidden row and sums over the
   token's assignments. More: `down`, grouped again, writes fp32 rows an assignment, and
3. `mix` sums them a token. Nothing is accumulated by atomics: results are deterministic.

The grid covers the most tiles that the shapes allow; a program beyond the tiles in use ends.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels._triton import CompileCase, launchable, launches, meta
from inkling_engine.kernels.swiglu.triton_kernel import silu

FEW = 8  # tokens up to which a program sums over a token's assignments itself
FEW_BYTES = 16384  # of weight that a program of `down_few` holds
MIX_BLOCK = 1024


@triton.jit
def tile_of_expert(
    offsets, tile, ASSIGNMENTS: tl.constexpr, EXPERTS: tl.constexpr, LANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """(expert, first, end) of a tile: rows of `order`; expert >= EXPERTS if there is no such tile.

    Tiles are numbered expert by expert, ceil(count / BLOCK_M) of each.
    """
    lane = tl.arange(0, LANES)
    begin = tl.load(offsets + lane, mask=lane < EXPERTS, other=0)
    end = tl.load(offsets + lane + 1, mask=lane < EXPERTS, other=0)
    tiles = (end - begin + BLOCK_M - 1) // BLOCK_M
    passed = tl.cumsum(tiles, axis=0) <= tile
    counted = tl.sum(tl.where(passed, tiles * 2 * LANES + 1, 0), axis=0)  # both sums in one
    expert = counted % (2 * LANES)
    own = tl.minimum(expert, EXPERTS - 1)
    first = tl.load(offsets + own) + (tile - counted // (2 * LANES)) * BLOCK_M
    end = tl.load(offsets + own + 1)
    return expert, tl.maximum(first, 0), tl.minimum(end, ASSIGNMENTS)


@triton.jit
def gate_up_kernel(
    y, w13, order, offsets, act, chosen, ASSIGNMENTS: tl.constexpr, SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """act [ASSIGNMENTS, WIDTH] = silu(gate) * up, chosen [ASSIGNMENTS] = the expert."""
    piece, tile = tl.program_id(0), tl.program_id(1)
    expert, first, end = tile_of_expert(offsets, tile, ASSIGNMENTS, EXPERTS, LANES, BLOCK_M)
    if expert >= EXPERTS:
        return
    row = first + tl.arange(0, BLOCK_M)
    live = row < end
    assignment = tl.load(order + row, mask=live, other=0)
    assignment = tl.minimum(tl.maximum(assignment, 0), ASSIGNMENTS - 1)
    column = tl.arange(0, 2 * BLOCK_I)
    pair = piece * BLOCK_I + column // 2
    k = tl.arange(0, BLOCK_K)
    weight_row = (expert * 2 + column % 2).to(tl.int64) * WIDTH + pair
    token = assignment // SLOTS
    if ASSIGNMENTS == SLOTS:  # one token: its row need not wait for the order
        token = tl.zeros_like(assignment)
    x_tile = y + token.to(tl.int64)[:, None] * HIDDEN + k[None, :]
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
    pair = piece * BLOCK_I + tl.arange(0, BLOCK_I)
    line = act + assignment.to(tl.int64)[:, None] * WIDTH + pair[None, :]
    tl.store(line, silu(gate) * up, mask=live[:, None] & (pair < WIDTH)[None, :])
    if piece == 0:
        tl.store(chosen + assignment, tl.zeros_like(assignment) + expert, mask=live)


@triton.jit
def down_few_kernel(
    act, w2, weights, chosen, offsets, out, SLOTS: tl.constexpr, LANES: tl.constexpr,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_I: tl.constexpr,
):  # fmt: skip
    """A piece of a token's out row: the rows of w2 of all its assignments, held whole at once."""
    token = tl.program_id(1)
    slot = tl.arange(0, LANES)
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.arange(0, BLOCK_I)
    live = ((token + 1) * SLOTS <= tl.load(offsets + EXPERTS)) & (slot < SLOTS)
    assignment = token * SLOTS + slot
    expert = tl.load(chosen + assignment, mask=live, other=0)
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
def down_kernel(
    act, w2, order, offsets, rows, ASSIGNMENTS: tl.constexpr, EXPERTS: tl.constexpr,
    LANES: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """rows [ASSIGNMENTS, HIDDEN] f32 = act @ w2^T of each assignment's expert."""
    piece, tile = tl.program_id(0), tl.program_id(1)
    expert, first, end = tile_of_expert(offsets, tile, ASSIGNMENTS, EXPERTS, LANES, BLOCK_M)
    if expert >= EXPERTS:
        return
    row = first + tl.arange(0, BLOCK_M)
    live = row < end
    assignment = tl.load(order + row, mask=live, other=0)
    assignment = tl.minimum(tl.maximum(assignment, 0), ASSIGNMENTS - 1)
    h = piece * BLOCK_H + tl.arange(0, BLOCK_H)
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
    line = rows + assignment.to(tl.int64)[:, None] * HIDDEN + h[None, :]
    tl.store(line, total, mask=live[:, None] & (h < HIDDEN)[None, :])


@triton.jit
def mix_kernel(
    rows, weights, offsets, out, SLOTS: tl.constexpr, EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = sum over a token's assignments, in turn, of weight * row; zeros for padded tokens."""
    token = tl.program_id(1).to(tl.int64)
    h = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = (token + 1) * SLOTS <= tl.load(offsets + EXPERTS)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(SLOTS):
        assignment = token * SLOTS + slot
        share = tl.load(weights + assignment, mask=live, other=0.0)
        total += share * tl.load(
            rows + assignment * HIDDEN + h, mask=live & (h < HIDDEN), other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
    tl.store(out + token * HIDDEN + h, total, mask=h < HIDDEN)


class Tiles(NamedTuple):
    """Blocks of a grouped product: assignments, columns (pairs in `gate_up`), depth."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


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
    128: Tiles(128, 128, 64, 4, 3),
}
WIDE = Tiles(16, 32, 32, 4, 2)  # fp32


def tile_rows(assignments: int, experts: int) -> int:
    """Rows of a tile: most experts should need one only, so that a weight is read once."""
    mean = assignments / experts
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
    y: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, order: Tensor, offsets: Tensor
) -> Tensor:
    """Run each expert over its tokens and mix; see the package docstring."""
    (tokens, hidden), slots = y.shape, weights.shape[1]
    count, _, width = w2.shape
    act, chosen = y.new_empty(tokens * slots, width), torch.empty_like(order)
    out = torch.empty_like(y)
    assignments, lanes = tokens * slots, triton.next_power_of_2(count)
    rows = tile_rows(assignments, count)
    wide = y.dtype == torch.float32
    tiles = fitted(WIDE if wide else GATE_UP[rows], width, hidden)
    sizes = {"ASSIGNMENTS": assignments, "EXPERTS": count, "HIDDEN": hidden, "WIDTH": width}
    grid = triton.cdiv(width, tiles.columns), most_tiles(assignments, count, tiles.rows)
    launchable(gate_up_kernel)[grid](
        y, w13, order, offsets, act, chosen, **sizes, SLOTS=slots, LANES=lanes,
        BLOCK_M=tiles.rows, BLOCK_I=tiles.columns, BLOCK_K=tiles.depth, num_warps=tiles.warps,
        num_stages=tiles.stages,
    )  # fmt: skip
    if tokens <= FEW:
        _down_few(act, w2, weights, chosen, offsets, out)
        return out
    tiles = fitted(WIDE if wide else DOWN[rows], hidden, width)
    grid = triton.cdiv(hidden, tiles.columns), most_tiles(assignments, count, tiles.rows)
    products = y.new_empty(assignments, hidden, dtype=torch.float32)
    launchable(down_kernel)[grid](
        act, w2, order, offsets, products, **sizes, LANES=lanes, BLOCK_M=tiles.rows,
        BLOCK_H=tiles.columns, BLOCK_K=tiles.depth, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    block = min(MIX_BLOCK, triton.next_power_of_2(hidden))
    launchable(mix_kernel)[(triton.cdiv(hidden, block), tokens)](
        products, weights, offsets, out, SLOTS=slots, EXPERTS=count, HIDDEN=hidden, BLOCK=block
    )
    return out


def _down_few(
    act: Tensor, w2: Tensor, weights: Tensor, chosen: Tensor, offsets: Tensor, out: Tensor
) -> None:
    (tokens, slots), (count, hidden, width) = weights.shape, w2.shape
    lanes, block_i = triton.next_power_of_2(slots), triton.next_power_of_2(width)
    block_h = max(1, FEW_BYTES // (lanes * block_i * w2.element_size()))
    block_h = min(block_h, triton.next_power_of_2(hidden))
    launchable(down_few_kernel)[(triton.cdiv(hidden, block_h), tokens)](
        act, w2, weights, chosen, offsets, out, SLOTS=slots, LANES=lanes, EXPERTS=count,
        HIDDEN=hidden, WIDTH=width, BLOCK_H=block_h, BLOCK_I=block_i, num_warps=4,
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """The experts of inkling-small at TP 8 for each tile height."""
    cases = []
    for tokens in (1, 32, 512, 1024, 4096):
        y, w13, w2 = meta(tokens, 4096), meta(258, 512, 4096), meta(258, 4096, 256)
        weights = meta(tokens, 8, dtype=torch.float32)
        order, offsets = meta(tokens * 8, dtype=torch.int32), meta(259, dtype=torch.int32)
        cases += launches(f"experts-{tokens}", experts, y, w13, w2, weights, order, offsets)
    return cases
