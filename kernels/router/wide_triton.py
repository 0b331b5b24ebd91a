"""The gate's logits of many tokens: a program owns two blocks of experts, a wide and a narrow one.

The count of experts exceeds a multiple of the wide block by the few shared ones (256 + 2): a third
wide block for these would cost as much as the others. The narrow block takes a program's share of
them while the tokens' tile is in shared memory.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels._triton import follow, launchable

NARROW = 16  # experts of the narrow block; the least that a product takes


@triton.jit
def wide_gate_kernel(
    y, weight, logits, TOKENS: tl.constexpr, EXPERTS: tl.constexpr, DEPTH: tl.constexpr,
    SPLIT_DEPTH: tl.constexpr, WIDES: tl.constexpr, SHARE: tl.constexpr, BLOCK_M: tl.constexpr,
    WIDE: tl.constexpr, NARROW: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """logits [splits, TOKENS, EXPERTS] f32: partial products over SPLIT_DEPTH each."""
    follow()
    piece, split = tl.program_id(0), tl.program_id(2)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n, lane = piece * WIDE + tl.arange(0, WIDE), tl.arange(0, NARROW)
    extra = WIDES * WIDE + piece * SHARE + lane
    own = (lane < SHARE) & (extra < EXPERTS)
    k = split * SPLIT_DEPTH + tl.arange(0, BLOCK_K)
    x_tile = y + m.to(tl.int64)[:, None] * DEPTH + k[None, :]
    w_tile = weight + n[None, :] * DEPTH + k[:, None]
    e_tile = weight + extra[None, :] * DEPTH + k[:, None]
    total = tl.zeros((BLOCK_M, WIDE), tl.float32)
    more = tl.zeros((BLOCK_M, NARROW), tl.float32)
    for start in range(0, SPLIT_DEPTH, BLOCK_K):
        deep = k < DEPTH - start
        x = tl.load(x_tile + start, mask=(m < TOKENS)[:, None] & deep[None, :], other=0.0)
        w = tl.load(w_tile + start, mask=deep[:, None], other=0.0)
        e = tl.load(e_tile + start, mask=own[None, :] & deep[:, None], other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
        more = tl.dot(x, e, more, input_precision="ieee")
    line = logits + (split * TOKENS + m).to(tl.int64)[:, None] * EXPERTS
    tl.store(line + n[None, :], total, mask=(m < TOKENS)[:, None])
    tl.store(line + extra[None, :], more, mask=(m < TOKENS)[:, None] & own[None, :])


class Wide(NamedTuple):
    """Wide blocks of experts, what each program takes of the rest, splits of the depth."""

    blocks: int
    share: int
    splits: int


TOKENS, EXPERTS, DEPTH, WARPS, STAGES = 128, 128, 64, 8, 4  # of a program
PROGRAMS = 132  # that the product is split into at most, if by depth
MOST_SPLITS = 8
FEW = 256  # tokens that the narrow tiles of `gate_kernel` serve as well


def wide_config(tokens: int, experts: int, depth: int, item_bytes: int) -> Wide | None:
    """None where it does not pay: fp32, few tokens, or too many experts beside the wide blocks.

    H200, 4096 tokens, 258 experts, depth 4096: 23 us with 2 splits (55 without the narrow block and
    splits); tiles of 64 x 256 24, 64 x 128 26 to 30, 128 x 256 29; three stages 27.
    """
    blocks = experts // EXPERTS
    if item_bytes == 4 or tokens <= FEW or not blocks:
        return None
    share = triton.cdiv(experts - blocks * EXPERTS, blocks)
    splits, programs = 1, blocks * triton.cdiv(tokens, TOKENS)
    most = min(MOST_SPLITS, PROGRAMS // programs, depth // (4 * DEPTH))
    while 2 * splits <= most:
        splits *= 2
    return Wide(blocks, share, splits) if share <= NARROW else None


def wide_gate(y: Tensor, gate_weight: Tensor, wide: Wide, logits: Tensor) -> None:
    """Fill logits [splits, tokens, experts]."""
    (tokens, depth), experts = y.shape, gate_weight.shape[0]
    split_depth = triton.cdiv(triton.cdiv(depth, wide.splits), DEPTH) * DEPTH
    launchable(wide_gate_kernel)[(wide.blocks, triton.cdiv(tokens, TOKENS), wide.splits)](
        y, gate_weight, logits, TOKENS=tokens, EXPERTS=experts, DEPTH=depth,
        SPLIT_DEPTH=split_depth, WIDES=wide.blocks, SHARE=wide.share, BLOCK_M=TOKENS, WIDE=EXPERTS,
        NARROW=NARROW, BLOCK_K=DEPTH, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
