"""The mixture of experts as products grouped by expert.

1. `gate_up`: a program owns a tile of one expert's tokens and some of its gate and up rows,
   interleaved so that a pair lands in one thread, and writes the gated activation.
2. Few tokens: `down_few`, a program owns a token and a piece of the hidden row and sums over the
   token's experts. More: `down`, grouped again, writes a row for each expert of each token, and
3. `mix` sums them a token. Nothing is accumulated by atomics: results are deterministic.

Which tokens chose an expert: up to DIRECT of them, a program looks for itself through all choices;
beyond, `group` lists them once (`grouped_triton.py`).
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels._triton import CompileCase, follow, launchable, launches, meta
from inkling_engine.kernels.experts.grouped_triton import (
    direct_kernel,
    group_kernel,
    listed_kernel,
)

FEW = 8  # tokens up to which a program sums over a token's experts itself
FEW_BYTES = 16384  # of weight that a program of `down_few` holds
DIRECT = 32  # tokens up to which that costs less than a launch
EXACT = 256  # tokens up to which each expert's row is kept in fp32 until rows are mixed
MIX_BLOCK = 1024
SCAN_BLOCK = 4096  # choices that a program of `group` looks at at once


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
    follow()  # choices and weights are older than the launch before
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
    follow()
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
DEEP = Tiles(128, 128, 64, 8, 4)  # DOWN[128] where experts are too wide for it to hold the rows
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


class Grouping(NamedTuple):
    """Which tokens chose which expert, and the sizes that all grouped products share.

    `chosen`, `places`, `starts` are the op's; `counts` and `lists` are there if programs do not
    look for themselves.
    """

    chosen: Tensor
    places: Tensor
    starts: Tensor
    sizes: dict[str, int]
    lists: Tensor | None = None
    counts: Tensor | None = None

    def places_and_tiles(self, rows: int) -> tuple[int, int]:
        """Programs of a column block: for routed experts, and with the shared ones' tiles."""
        tokens, shared = self.sizes["TOKENS"], self.sizes["SHARED"]
        assignments, routed = tokens * (self.sizes["SLOTS"] - shared), self.places.shape[1]
        if self.lists is None:
            programs = min(assignments, routed)
        else:
            programs = most_tiles(assignments, routed, rows)
        return programs, programs + shared * triton.cdiv(tokens, rows)


def grouped(chosen: Tensor, places: Tensor, starts: Tensor, w2: Tensor) -> Grouping:
    """Group the assignments: lists for more than DIRECT tokens."""
    (tokens, slots), (count, hidden, width), routed = chosen.shape, w2.shape, places.shape[1]
    sizes = {
        "ROWS": starts.shape[0] - 1, "TOKENS": tokens, "SLOTS": slots, "SHARED": count - routed,
        "EXPERTS": count, "HIDDEN": hidden, "WIDTH": width,
    }  # fmt: skip
    if tokens <= DIRECT:
        return Grouping(chosen, places, starts, sizes)
    lists, counts = starts.new_empty(routed, tokens), starts.new_empty(routed)
    launchable(group_kernel)[(routed,)](
        places, starts, lists, counts, ROWS=sizes["ROWS"], TOKENS=tokens, SLOTS=slots,
        ROUTED=routed, BLOCK=min(SCAN_BLOCK, triton.next_power_of_2(tokens)), num_warps=8,
    )  # fmt: skip
    return Grouping(chosen, places, starts, sizes, lists, counts)


def product(
    group: Grouping, x: Tensor, weight: Tensor, to: Tensor, tiles: Tiles, *, gate_up: bool
) -> None:
    """`gate_up` or `down` of all assignments: `to` from `x`."""
    programs, all_tiles = group.places_and_tiles(tiles.rows)
    columns, (tokens, routed) = to.shape[1], group.places.shape
    grid = triton.cdiv(columns, tiles.columns * tiles.steps), all_tiles
    shared = {
        "GATE_UP": gate_up, **group.sizes, "COUNT": programs, "BLOCK_M": tiles.rows,
        "BLOCK_N": tiles.columns, "BLOCK_K": tiles.depth, "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }  # fmt: skip
    if group.lists is None:
        launchable(direct_kernel)[grid](
            x, weight, group.chosen, group.places, group.starts, to, **shared,
            LEADERS=programs < routed, LANES=triton.next_power_of_2(tokens),
        )  # fmt: skip
    else:
        launchable(listed_kernel)[grid](
            x, weight, group.counts, group.lists, group.starts, to, **shared,
            LANES=triton.next_power_of_2(routed), STEPS=tiles.steps, SPREAD=tokens > EXACT,
        )  # fmt: skip


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
    routed, wide = places.shape[1], y.dtype == torch.float32
    rows = tile_rows(tokens, slots - count + routed, routed)
    group = grouped(chosen, places, starts, w2)
    act, out = y.new_empty(tokens * slots, width), torch.empty_like(y)
    tiles = fitted(WIDE if wide else GATE_UP[rows], width, hidden)
    product(group, y, w13, act, tiles, gate_up=True)
    if tokens <= FEW:
        _down_few(act, w2, chosen, weights, starts, out)
        return out
    exact = torch.float32 if tokens <= EXACT else y.dtype
    products = y.new_empty(tokens * slots, hidden, dtype=exact)
    tiles = DEEP if DOWN[rows].steps > 1 and width > DOWN[rows].depth else DOWN[rows]
    tiles = fitted(WIDE if wide else tiles, hidden, width)
    product(group, act, w2, products, tiles, gate_up=False)
    block = min(MIX_BLOCK, triton.next_power_of_2(hidden))
    launchable(mix_kernel)[(triton.cdiv(hidden, block), tokens)](
        products, weights, starts, out, ROWS=starts.shape[0] - 1, SLOTS=slots, HIDDEN=hidden,
        BLOCK=block,
    )  # fmt: skip
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
