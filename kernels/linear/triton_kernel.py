"""Matrix product of each token: Triton kernels for few tokens, cuBLAS for many.

For few tokens the time is that of reading the weight once. One token: a program holds some whole
rows of the weight in registers. Up to 16: tiles on the tensor cores, narrow ones, so that many
programs read. fp32 is IEEE here; through cuBLAS it is unless the process allows TF32, and bf16
sums are fp32 unless it allows reduced precision.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels._triton import CompileCase, launchable, launches, meta

FEW = 16  # tokens up to which `tile_kernel` is used: the least rows of a tensor core product
TILE_BYTES = 32768  # of weight that a program of `vector_kernel` holds at most,
LEAST_BYTES = 8192  # and at least
MAX_DEPTH = 8192  # elements of a row that it takes at once


@triton.jit
def vector_kernel(
    x, weight, y, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y [COLUMNS] = weight [COLUMNS, DEPTH] @ x [DEPTH]; DEPTH <= BLOCK_K."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    deep = k < DEPTH
    tile = tl.load(
        weight + n[:, None].to(tl.int64) * DEPTH + k[None, :],
        mask=(n < COLUMNS)[:, None] & deep[None, :], other=0.0, eviction_policy="evict_first",
    )  # fmt: skip
    values = tl.load(x + k, mask=deep, other=0.0).to(tl.float32)
    product = tl.sum(tile.to(tl.float32) * values[None, :], axis=1)
    tl.store(y + n, product, mask=n < COLUMNS)


@triton.jit
def tile_kernel(
    x, weight, y, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y [TOKENS, COLUMNS] = x [TOKENS, DEPTH] @ weight [COLUMNS, DEPTH]^T; TOKENS <= BLOCK_M."""
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_tile = x + m[:, None] * DEPTH + k[None, :]
    w_tile = weight + n[None, :].to(tl.int64) * DEPTH + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, DEPTH, BLOCK_K):
        deep = k < DEPTH - start
        w = tl.load(
            w_tile + start, mask=(n < COLUMNS)[None, :] & deep[:, None], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        values = tl.load(x_tile + start, mask=(m < TOKENS)[:, None] & deep[None, :], other=0.0)
        total = tl.dot(values, w, total, input_precision="ieee")
    line = y + m[:, None] * COLUMNS + n[None, :]
    tl.store(line, total, mask=(m < TOKENS)[:, None] & (n < COLUMNS)[None, :])


class Tiles(NamedTuple):
    """Blocks of `tile_kernel`."""

    columns: int
    depth: int
    warps: int
    stages: int


def vector_config(columns: int, depth: int, item_bytes: int) -> tuple[int, int, int]:
    """BLOCK_N, BLOCK_K and warps of `vector_kernel`."""
    block_k = max(16, triton.next_power_of_2(depth))
    block_n = max(1, TILE_BYTES // (block_k * item_bytes))
    while columns < 192 * block_n and block_n * block_k * item_bytes > LEAST_BYTES:
        block_n //= 2  # more programs than multiprocessors
    return block_n, block_k, min(8, max(1, block_n * block_k // 1024))


def tile_config(columns: int, depth: int, item_bytes: int) -> Tiles:
    """A warp for each 8 columns, so that none multiplies what another does."""
    if item_bytes == 4:
        return Tiles(32, min(32, max(16, triton.next_power_of_2(depth))), 4, 2)
    block_n = 8 if columns < 2048 else 16
    return Tiles(block_n, min(512, max(16, triton.next_power_of_2(depth))), block_n // 8, 4)


def product_with_vector(x: Tensor, weight: Tensor, y: Tensor) -> None:
    """Write x @ weight^T to `y`, in the dtype of `y`; x has one row."""
    (tokens, depth), columns = x.shape, weight.shape[0]
    assert tokens == 1 and depth <= MAX_DEPTH
    block_n, block_k, warps = vector_config(columns, depth, weight.element_size())
    launchable(vector_kernel)[(triton.cdiv(columns, block_n),)](
        x, weight, y, COLUMNS=columns, DEPTH=depth, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=warps,
    )  # fmt: skip


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply `x` by the transpose of `weight`; see the package docstring."""
    (tokens, depth), columns = x.shape, weight.shape[0]
    if tokens == 0 or tokens > FEW:
        return torch.mm(x, weight.t())
    y = x.new_empty(tokens, columns)
    if tokens == 1 and depth <= MAX_DEPTH:
        product_with_vector(x, weight, y)
        return y
    tiles = tile_config(columns, depth, weight.element_size())
    launchable(tile_kernel)[(triton.cdiv(columns, tiles.columns),)](
        x, weight, y, TOKENS=tokens, COLUMNS=columns, DEPTH=depth, BLOCK_M=FEW,
        BLOCK_N=tiles.columns, BLOCK_K=tiles.depth, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return y


def compile_cases() -> list[CompileCase]:
    """The attention and dense products of inkling-small at TP 8, one token and eight."""
    cases = []
    for tokens in (1, 8):
        for name, columns, depth in (("qkvr", 832, 4096), ("o", 4096, 512), ("w2", 4096, 2048)):
            arguments = meta(tokens, depth), meta(columns, depth)
            cases += launches(f"linear-{name}-{tokens}", linear, *arguments)
    return cases
