"""The mixture of experts as products grouped by expert.

1. `gate_up`: a program owns a tile of one expert's tokens and some of its gate and up rows,
   interleaved so that a pair lands in one thread, and writes the gated activation.
2. `down`, grouped again, writes a row for each expert of each token, and
3. `mix` sums them a token. Nothing is accumulated by atomics: results are deterministic.

Few tokens take two launches (`few_triton.py`). Which of more chose an expert: up to DIRECT of them, a
program looks for itself through all choices; beyond, `group` lists them once (`grouped_triton.py`).
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels._triton import CompileCase, follow, launchable, launches, meta
from inkling_engine.kernels.experts.few_triton import down_few_kernel, gate_up_few_kernel
from inkling_engine.kernels.experts.grouped_triton import (
    direct_kernel,
    group_kernel,
    listed_kernel,
)

FEW = 16  # tokens that a tile of `few_triton.py` has
FEW_BYTES, DOWN_WARPS = 16384, 4  # of weight that a program of `down_few` holds
DIRECT = 32  # tokens up to which that costs less than a launch
EXACT = 256  # tokens up to which each expert's row is kept in fp32 until rows are mixed
MIX_BLOCK = 1024
SCAN_BLOCK = 4096  # tokens whose choices a program of `group` looks at at once


@triton.jit
def mix_kernel(
    rows, weights, starts, out, ROWS: tl.constexpr, SLOTS: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """out = sum over a token's assignments, in turn, of weight * row; zeros for padded tokens."""
    token = tl.program_id(1).to(tl.int64)
    h = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, LANES)
    live = token < tl.load(starts + ROWS)
    shares = tl.load(weights + token * SLOTS + lane, mask=live & (lane < SLOTS), other=0.0)
    follow()  # weights are older than the launch before
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(SLOTS):
        assignment = token * SLOTS + slot
        share = tl.sum(tl.where(lane == slot, shares, 0.0), axis=0)
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


FEW_UP = Tiles(16, 16, 256, 2, 3)  # H200, 9 tokens: 55 us; 61 with 2 programs a processor, not 4
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
        elif tokens > EXACT:
            programs = most_tiles(assignments, routed, rows)
        else:  # every expert's first tile is there
            programs = routed + assignments // rows
        return programs, programs + shared * triton.cdiv(tokens, rows)


def grouped(chosen: Tensor, places: Tensor, starts: Tensor, w13: Tensor, w2: Tensor) -> Grouping:
    """Group the assignments: lists for more than DIRECT tokens."""
    (tokens, slots), (count, hidden, width), routed = chosen.shape, w2.shape, places.shape[1]
    sizes = {
        "ROWS": starts.shape[0] - 1, "TOKENS": tokens, "SLOTS": slots, "SHARED": count - routed,
        "EXPERTS": count, "HIDDEN": hidden, "WIDTH": width,
    }  # fmt: skip
    if tokens <= DIRECT:
        return Grouping(chosen, places, starts, sizes)
    lists, counts = starts.new_empty(routed, tokens), starts.new_empty(routed)
    up_rows, down_rows = (
        triton.next_power_of_2(triton.cdiv(sizes["SHARED"] * rows, routed))
        for rows in (2 * width, hidden)
    )
    launchable(group_kernel)[(routed,)](
        chosen, starts, w13, w2, lists, counts, ROWS=sizes["ROWS"], TOKENS=tokens, SLOTS=slots,
        LANES=triton.next_power_of_2(slots), ROUTED=routed,
        BLOCK=min(SCAN_BLOCK, triton.next_power_of_2(tokens)), EXPERTS=count,
        HIDDEN=hidden, WIDTH=width, AHEAD=tokens <= EXACT, UP_ROWS=up_rows, DOWN_ROWS=down_rows,
        num_warps=8,
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
    if tokens <= FEW:
        return experts_few(y, w13, w2, chosen, weights, starts, count - routed)
    rows = tile_rows(tokens, slots - count + routed, routed)
    group = grouped(chosen, places, starts, w13, w2)
    act, out = y.new_empty(tokens * slots, width), torch.empty_like(y)
    tiles = fitted(WIDE if wide else GATE_UP[rows], width, hidden)
    product(group, y, w13, act, tiles, gate_up=True)
    exact = torch.float32 if tokens <= EXACT else y.dtype
    products = y.new_empty(tokens * slots, hidden, dtype=exact)
    tiles = DEEP if DOWN[rows].steps > 1 and width > DOWN[rows].depth else DOWN[rows]
    tiles = fitted(WIDE if wide else tiles, hidden, width)
    product(group, act, w2, products, tiles, gate_up=False)
    block = min(MIX_BLOCK, triton.next_power_of_2(hidden))
    launchable(mix_kernel)[(triton.cdiv(hidden, block), tokens)](
        products, weights, starts, out, ROWS=starts.shape[0] - 1, SLOTS=slots, HIDDEN=hidden,
        BLOCK=block, LANES=triton.next_power_of_2(slots),
    )  # fmt: skip
    return out


def experts_few(
    y: Tensor,
    w13: Tensor,
    w2: Tensor,
    chosen: Tensor,
    weights: Tensor,
    starts: Tensor,
    shared: int,
) -> Tensor:
    """The same for up to FEW tokens."""
    (tokens, slots), (count, hidden, width) = weights.shape, w2.shape
    act, out = y.new_empty(tokens * slots, width), torch.empty_like(y)
    sizes = {
        "ROWS": starts.shape[0] - 1, "TOKENS": tokens, "SLOTS": slots, "SHARED": shared,
        "EXPERTS": count, "HIDDEN": hidden, "WIDTH": width,
    }  # fmt: skip
    tiles = fitted(WIDE if y.dtype == torch.float32 else FEW_UP, width, hidden)
    grid = triton.cdiv(width, tiles.columns), shared + tokens * (slots - shared)
    launchable(gate_up_few_kernel)[grid](
        y, w13, chosen, starts, act, **sizes, LANES=triton.next_power_of_2(slots),
        BLOCK_M=tiles.rows, BLOCK_I=tiles.columns, BLOCK_K=tiles.depth, num_warps=tiles.warps,
        num_stages=tiles.stages,
    )  # fmt: skip
    block_i, lanes = triton.next_power_of_2(width), triton.next_power_of_2(slots)
    block_h = max(1, FEW_BYTES // (lanes * block_i * w2.element_size()))
    block_h = min(block_h, triton.next_power_of_2(hidden))
    launchable(down_few_kernel)[(tokens, triton.cdiv(hidden, block_h))](
        act, w2, chosen, weights, starts, out, ROWS=sizes["ROWS"], SLOTS=slots, LANES=lanes,
        PARTS=min(lanes, DOWN_WARPS), EXPERTS=count, HIDDEN=hidden, WIDTH=width, BLOCK_H=block_h,
        BLOCK_I=block_i, num_warps=DOWN_WARPS,
    )  # fmt: skip
    return out


def compile_cases() -> list[CompileCase]:
    """The experts of inkling-small at TP 8 for each tile height."""
    cases = []
    for tokens in (1, 9, 32, 72, 512, 1024, 4096):
        y, w13, w2 = meta(tokens, 4096), meta(258, 512, 4096), meta(258, 4096, 256)
        weights, starts = meta(tokens, 8, dtype=torch.float32), meta(17, dtype=torch.int32)
        chosen, places = meta(tokens, 8, dtype=torch.int32), meta(tokens, 256, dtype=torch.int8)
        arguments = y, w13, w2, chosen, weights, places, starts
        cases += launches(f"experts-{tokens}", experts, *arguments)
    return cases
