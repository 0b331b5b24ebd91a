"""Matrix product of each token: Triton kernels for few tokens, cuBLAS for many.

For few tokens the time is that of reading the weight once. One token: a program holds some whole
rows of the weight in registers. Up to 128: tiles on the tensor cores, narrow ones, so that many
programs read; up to 12 tokens some whole rows are held again, where the weight has few. fp32 is
IEEE here; through cuBLAS it is unless the process allows TF32, and bf16 sums are fp32 unless it allows
reduced precision.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels._triton import (
    CompileCase,
    begin_next,
    follow,
    follow_as,
    launchable,
    launches,
    load_along,
    meta,
    prefetch_rows,
)

TILE_BYTES = 32768  # of weight that a program of `vector_kernel` holds at most,
LEAST_BYTES = 8192  # and at least,
PROGRAMS = 3072  # unless there are as many, so that no processor waits for another
MAX_DEPTH = 8192  # elements of a row that it takes at once
HELD_COLUMNS, HELD_DEPTH = 8, 4096  # that a program of `held_kernel` takes at most
HELD_TOKENS = 12  # 832 x 4096 at 16 tokens in a round: 6.3 us held, 4.4 in tiles
FEW = 16  # tokens that a tile has at least, and a request at most in a depth of eight
AHEAD_BYTES = 2**21  # of weight that programs of `tile_kernel` fetch to L2 before x can be read


@triton.jit
def vector_kernel(
    x, weight, y, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, HASTY: tl.constexpr,
):  # fmt: skip
    """y [COLUMNS] = weight [COLUMNS, DEPTH] @ x [DEPTH]; DEPTH <= BLOCK_K."""
    if HASTY:
        begin_next()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    deep = k < DEPTH
    tile = tl.load(
        weight + n[:, None].to(tl.int64) * DEPTH + k[None, :],
        mask=(n < COLUMNS)[:, None] & deep[None, :], other=0.0, eviction_policy="evict_first",
    )  # fmt: skip
    follow_as(HASTY)
    values = tl.load(x + k, mask=deep, other=0.0).to(tl.float32)
    product = tl.sum(tile.to(tl.float32) * values[None, :], axis=1)
    tl.store(y + n, product, mask=n < COLUMNS)


@triton.jit
def tile_kernel(
    x, weight, y, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """y [TOKENS, COLUMNS] = x [TOKENS, DEPTH] @ weight [COLUMNS, DEPTH]^T, or each PARTS-th block of the
    depth a warp and their sum in order; AHEAD elements of a row are fetched to L2 first."""
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    prefetch_rows(weight, n, 0, COLUMNS, AHEAD, DEPTH)
    follow()
    k = tl.arange(0, BLOCK_K)
    if PARTS == 1:
        depth = k[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        x_line, x_mask = m[:, None], (m < TOKENS)[:, None]
        w_line, w_mask = n[:, None].to(tl.int64), (n < COLUMNS)[:, None]
    else:
        depth = (tl.arange(0, PARTS) * BLOCK_K)[:, None, None] + k[None, None, :]
        total = tl.zeros((PARTS, BLOCK_M, BLOCK_N), tl.float32)
        x_line, x_mask = m[None, :, None], (m < TOKENS)[None, :, None]
        w_line, w_mask = n[None, :, None].to(tl.int64), (n < COLUMNS)[None, :, None]
    for start in range(0, DEPTH, PARTS * BLOCK_K):
        deep = depth < DEPTH - start
        w = tl.load(
            weight + w_line * DEPTH + depth + start, mask=w_mask & deep, other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        values = tl.load(x + x_line * DEPTH + depth + start, mask=x_mask & deep, other=0.0)
        turned = tl.trans(w) if PARTS == 1 else tl.trans(w, 0, 2, 1)
        total = tl.dot(values, turned, total, input_precision="ieee")
    if PARTS > 1:
        total = tl.sum(total, 0)
    line = y + m[:, None].to(tl.int64) * COLUMNS + n[None, :]
    tl.store(line, total, mask=(m < TOKENS)[:, None] & (n < COLUMNS)[None, :])


@triton.jit
def held_kernel(
    x, weight, y, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """As `tile_kernel`; all weights of a program are on the way, then there, before x can be read."""
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = (tl.arange(0, PARTS) * BLOCK_K)[:, None, None] + tl.arange(0, BLOCK_K)[None, None, :]
    w_line, w_mask = n[None, :, None].to(tl.int64) * DEPTH, (n < COLUMNS)[None, :, None]
    x_line, x_mask = m[None, :, None] * DEPTH, (m < TOKENS)[None, :, None]
    STEP: tl.constexpr = PARTS * BLOCK_K
    held = load_along(weight + w_line + depth, w_mask, depth, DEPTH, STEP, DEPTH, "evict_first")
    follow()
    values = load_along(x + x_line + depth, x_mask, depth, DEPTH, STEP, DEPTH, "")
    total = tl.zeros((PARTS, BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.static_range((DEPTH + STEP - 1) // STEP):
        turned = tl.trans(held[step], 0, 2, 1)
        total = tl.dot(values[step], turned, total, input_precision="ieee")
    line = y + m[:, None].to(tl.int64) * COLUMNS + n[None, :]
    tl.store(line, tl.sum(total, 0), mask=(m < TOKENS)[:, None] & (n < COLUMNS)[None, :])


class Tiles(NamedTuple):
    """Blocks of `tile_kernel`: rows, columns, depth; parts of the depth."""

    rows: int
    columns: int
    depth: int
    parts: int
    warps: int
    stages: int


def vector_config(columns: int, depth: int, item_bytes: int) -> tuple[int, int, int]:
    """BLOCK_N, BLOCK_K and warps of `vector_kernel`.

    In a whole step of one row on an H200: 4096 x 512 takes 0.9 us less in 8 rows of a warp each
    than in 4 of 4 warps; 832 x 4096 takes 0.4 us less in rows of 4 warps than of 8.
    """
    block_k = max(16, triton.next_power_of_2(depth))
    block_n = max(1, TILE_BYTES // (block_k * item_bytes))
    while block_n > 1 and columns < PROGRAMS * block_n:
        if block_n * block_k * item_bytes <= LEAST_BYTES:
            break
        block_n //= 2
    return block_n, block_k, min(4 if block_n == 1 else 8, max(1, block_n * block_k // 512))


def few(tokens: int, columns: int, depth: int, item_bytes: int) -> bool:
    """Whether the product is one launch of ours, where cuBLAS often needs two.

    832 x 4096 at 8, 32, 64 and 128 tokens: 5.1, 6.1, 8.8, 8.9 us; cuBLAS 7.6, 7.7, 8.0, 8.8. 4096 x 512
    at 136 tokens, with the boundary behind it, which overlaps with ours: 11.3; cuBLAS 12.4.
    """
    most = 160 if columns * depth <= 2**21 else 128 if columns * depth <= 2**22 else FEW
    return tokens <= FEW or (item_bytes == 2 and tokens <= most)


def tile_config(tokens: int, columns: int, depth: int, item_bytes: int) -> Tiles:
    """Tiles so narrow that all processors read; a long depth is shared by the warps."""
    rows = min(64, max(FEW, triton.next_power_of_2(tokens)))
    if item_bytes == 4:
        tiles = Tiles(FEW, 32, 32, 1, 4, 2)
    elif columns < 2048 <= depth:  # 5.2 us at 832 x 4096 and 8 tokens; 7.4 without parts
        tiles = {FEW: Tiles(FEW, 8, 256, 4, 4, 3), 32: Tiles(32, 8, 128, 4, 4, 4)}.get(
            rows, Tiles(64, 16, 256, 1, 4, 4)
        )
    elif rows == FEW and depth >= 2048:  # 11.3 us at 4096 x 4096 and 8 tokens; cuBLAS 14.0
        tiles = Tiles(FEW, 32, 256, 2, 2, 4)
    else:  # 3.7 us at 4096 x 512 and 8 tokens, 4.4 at 128
        tiles = Tiles(rows, 64 if rows == 64 else 32, 128, 1, 4, 4)
    return tiles._replace(depth=min(tiles.depth, max(16, triton.next_power_of_2(depth))))


def product_with_vector(x: Tensor, weight: Tensor, y: Tensor, *, hasty: bool) -> None:
    """Write x @ weight^T to `y`, in the dtype of `y`; x has one row. If `hasty` the next launch may
    begin at once."""
    (tokens, depth), columns = x.shape, weight.shape[0]
    assert tokens == 1 and depth <= MAX_DEPTH
    block_n, block_k, warps = vector_config(columns, depth, weight.element_size())
    launchable(vector_kernel)[(triton.cdiv(columns, block_n),)](
        x, weight, y, COLUMNS=columns, DEPTH=depth, BLOCK_N=block_n, BLOCK_K=block_k,
        HASTY=hasty, num_warps=warps,
    )  # fmt: skip


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply `x` by the transpose of `weight`; see the package docstring."""
    (tokens, depth), columns = x.shape, weight.shape[0]
    if tokens == 0 or not few(tokens, columns, depth, weight.element_size()):
        return torch.mm(x, weight.t())
    y = x.new_empty(tokens, columns)
    if tokens == 1 and depth <= MAX_DEPTH:
        product_with_vector(x, weight, y, hasty=True)
        return y
    narrow = columns < 2048 <= depth <= HELD_DEPTH
    if tokens <= HELD_TOKENS and narrow and weight.element_size() == 2:
        launchable(held_kernel)[(triton.cdiv(columns, HELD_COLUMNS),)](
            x, weight, y, TOKENS=tokens, COLUMNS=columns, DEPTH=depth, BLOCK_M=FEW,
            BLOCK_N=HELD_COLUMNS, BLOCK_K=256, PARTS=8, num_warps=8,
        )  # fmt: skip
        return y
    tiles = tile_config(tokens, columns, depth, weight.element_size())
    ahead = min(depth, max(1, AHEAD_BYTES // (columns * weight.element_size())))
    grid = triton.cdiv(columns, tiles.columns), triton.cdiv(tokens, tiles.rows)
    launchable(tile_kernel)[grid](
        x, weight, y, TOKENS=tokens, COLUMNS=columns, DEPTH=depth, BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns, BLOCK_K=tiles.depth, PARTS=tiles.parts, AHEAD=ahead,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return y


def compile_cases() -> list[CompileCase]:
    """The attention and dense products of inkling-small at TP 8, one token to 136, and a depth's."""
    cases, products = [], (("qkvr", 832, 4096), ("o", 4096, 512), ("w2", 4096, 2048))
    for tokens in (1, 8, FEW, 32, 128, 136):
        for name, columns, depth in (*products, ("input", 4096, 8192)):
            if not few(tokens, columns, depth, 2) or (name == "input" and tokens != FEW):
                continue
            arguments = meta(tokens, depth), meta(columns, depth)
            cases += launches(f"linear-{name}-{tokens}", linear, *arguments)
    return cases
