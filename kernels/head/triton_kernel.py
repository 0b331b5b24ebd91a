"""Logits of the rows that sample: the head is read once, whatever the number of rows.

One row: whole rows of the head a program, as in `linear`. More: tiles of the vocabulary on the
tensor cores. Neither reads tokens of rows that do not emit, nor columns beyond the vocabulary.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels._triton import (
    CompileCase,
    follow,
    launchable,
    launches,
    meta,
    prefetch_rows,
)
from inkling_engine.kernels.linear.triton_kernel import MAX_DEPTH, vector_config


@triton.jit
def vector_kernel(
    x, weight, sample_rows, emits, logits, SCALE: tl.constexpr, TOKENS: tl.constexpr,
    VOCAB: tl.constexpr, DEPTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """logits [1, VOCAB] f32; DEPTH <= BLOCK_K."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    deep = k < DEPTH
    tile = tl.load(
        weight + n[:, None].to(tl.int64) * DEPTH + k[None, :],
        mask=(n < VOCAB)[:, None] & deep[None, :], other=0.0, eviction_policy="evict_first",
    )  # fmt: skip
    follow()
    emit = tl.load(emits) != 0
    token = tl.minimum(tl.maximum(tl.load(sample_rows), 0), TOKENS - 1).to(tl.int64)
    values = tl.load(x + token * DEPTH + k, mask=deep & emit, other=0.0).to(tl.float32)
    product = tl.sum(tile.to(tl.float32) * values[None, :], axis=1)
    tl.store(logits + n, product * SCALE, mask=n < VOCAB)


@triton.jit
def head_kernel(
    x, weight, sample_rows, emits, logits, SCALE: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, VOCAB: tl.constexpr, DEPTH: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """logits [ROWS, VOCAB] f32; the tiles of the same columns are neighbours."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    prefetch_rows(weight, n, 0, VOCAB, AHEAD, DEPTH)
    follow()
    k = tl.arange(0, BLOCK_K)
    emit = tl.load(emits + m, mask=m < ROWS, other=0) != 0
    token = tl.load(sample_rows + m, mask=emit, other=0)
    token = tl.minimum(tl.maximum(token, 0), TOKENS - 1).to(tl.int64)
    x_tile = x + token[:, None] * DEPTH + k[None, :]
    w_tile = weight + n[None, :].to(tl.int64) * DEPTH + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, DEPTH, BLOCK_K):
        deep = k < DEPTH - start
        values = tl.load(x_tile + start, mask=emit[:, None] & deep[None, :], other=0.0)
        w = tl.load(
            w_tile + start, mask=(n < VOCAB)[None, :] & deep[:, None], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        total = tl.dot(values, w, total, input_precision="ieee")
    line = logits + m[:, None].to(tl.int64) * VOCAB + n[None, :]
    tl.store(line, total * SCALE, mask=(m < ROWS)[:, None] & (n < VOCAB)[None, :])


class Tiles(NamedTuple):
    """Blocks of the head's product: rows, columns, depth."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


TILES = {  # by rows of a tile; bf16
    16: Tiles(16, 64, 128, 4, 4),
    32: Tiles(32, 32, 256, 4, 4),
    64: Tiles(64, 64, 128, 4, 4),
    128: Tiles(128, 64, 128, 8, 4),
}
WIDE = Tiles(16, 64, 32, 4, 2)  # fp32
AHEAD = 512  # elements of a row that are fetched before hidden rows can be read


def head_config(rows: int, depth: int, item_bytes: int) -> Tiles:
    """Tiles that hold all rows, up to 128."""
    tiles = TILES[min(128, max(16, triton.next_power_of_2(rows)))] if item_bytes == 2 else WIDE
    return tiles._replace(depth=min(tiles.depth, max(16, triton.next_power_of_2(depth))))


def head(
    x: Tensor, weight: Tensor, sample_rows: Tensor, emits: Tensor, scale: float, vocab: int
) -> Tensor:
    """Multiply the sampled rows of `x` by the head; see the package docstring."""
    (tokens, depth), rows = x.shape, sample_rows.shape[0]
    assert vocab <= weight.shape[0]
    logits = x.new_empty(rows, vocab, dtype=torch.float32)
    sizes = {"SCALE": scale, "TOKENS": tokens, "VOCAB": vocab, "DEPTH": depth}
    if rows == 1 and depth <= MAX_DEPTH:
        block_n, block_k, warps = vector_config(vocab, depth, weight.element_size())
        launchable(vector_kernel)[(triton.cdiv(vocab, block_n),)](
            x, weight, sample_rows, emits, logits, **sizes, BLOCK_N=block_n, BLOCK_K=block_k,
            num_warps=warps,
        )  # fmt: skip
        return logits
    tiles = head_config(rows, depth, weight.element_size())
    grid = triton.cdiv(rows, tiles.rows), triton.cdiv(vocab, tiles.columns)
    launchable(head_kernel)[grid](
        x, weight, sample_rows, emits, logits, **sizes, ROWS=rows, BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns, BLOCK_K=tiles.depth, AHEAD=min(depth, AHEAD), num_warps=tiles.warps,
        num_stages=tiles.stages,
    )  # fmt: skip
    return logits


def compile_cases() -> list[CompileCase]:
    """The head of inkling-small at TP 8, and the whole one."""
    cases = []
    for rows, vocab in ((1, 25128), (8, 25128), (32, 25128), (128, 25128), (64, 200058)):
        x, weight = meta(rows, 4096), meta(vocab, 4096)
        lines = meta(rows, dtype=torch.int32), meta(rows, dtype=torch.int32)
        cases += launches(f"head-{rows}x{vocab}", head, x, weight, *lines, 1 / 16, vocab)
    return cases
