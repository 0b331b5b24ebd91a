# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
"""The boundary as two plain kernels behind a finished sum: a convolution, then residual and norm.

What an engine without the fused boundary launches. The convolution keeps its state in rings like the
boundary's [slots, 3, H]; a step is either a row a token or one row of all tokens. Both kernels let the
next launch begin early, as ours do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels._triton import follow


@triton.jit
def conv_kernel(
    x, weight, ring, starts, slots, lengths, y, tokens, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    STRIP: tl.constexpr,
):  # fmt: skip
    """y = x + conv(x) for STRIP tokens and BLOCK channels of the row of program 2."""
    follow()
    row = tl.program_id(2)
    begin, stop = tl.load(starts + row), tl.load(starts + row + 1)
    length = tl.load(lengths + row)
    old = ring + tl.load(slots + row).to(tl.int64) * (3 * WIDTH)
    t = tl.program_id(0) * STRIP + tl.arange(0, STRIP)[:, None]
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    count = stop - begin
    inputs = x + (begin + t).to(tl.int64) * WIDTH + c
    now = tl.load(inputs, t < count, other=0.0)
    found = now.to(tl.float32) * (1 + tl.load(weight + c * 4 + 3))
    for j in tl.static_range(3):
        back = t + j - 3
        z = tl.load(inputs + (j - 3) * WIDTH, (back >= 0) & (t < count), other=0.0)
        known = (back < 0) & (length + back >= 0)
        z += tl.load(old + (length + back + 3) % 3 * WIDTH + c, known, other=0.0)
        found += tl.load(weight + c * 4 + j) * z.to(tl.float32)
    tl.store(y + (begin + t).to(tl.int64) * WIDTH + c, found.to(y.dtype.element_ty), t < count)
    if tl.program_id(0) == 0:
        tl.debug_barrier()
        last = count - 3 + tl.arange(0, 4)[:, None]
        keep = (last >= 0) & (last < count)
        new = tl.load(x + (begin + last).to(tl.int64) * WIDTH + c, keep, other=0.0)
        tl.store(old + (length + last) % 3 * WIDTH + c, new, keep)


@triton.jit
def residual_norm_kernel(
    y, residual, weight, hidden, normed, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """hidden = residual + y and its norm, a token a program."""
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    gain = tl.load(weight + column, mask, other=0.0).to(tl.float32)
    follow()
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    base = tl.load(residual + at, mask, other=0.0).to(tl.float32)
    value = tl.load(y + at, mask, other=0.0).to(tl.float32) + base
    tl.store(hidden + at, value.to(hidden.dtype.element_ty), mask)
    value *= tl.rsqrt(tl.sum(value * value) / WIDTH + eps) * gain
    tl.store(normed + at, value.to(normed.dtype.element_ty), mask)


def conv_residual_norm(
    x: Tensor,
    residual: Tensor,
    conv_weight: Tensor,
    norm_weight: Tensor,
    ring: Tensor,
    starts: Tensor,
    slots: Tensor,
    lengths: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """(hidden, normed) [T, H] of the summed x [T, H]; ring [slots, 3, H] is written."""
    tokens, width = x.shape
    rows = slots.shape[0]
    y, hidden, normed = (torch.empty_like(x) for _ in range(3))
    most = tokens if rows == 1 else 1
    strip = 1 if most == 1 else 8
    conv_kernel[(triton.cdiv(most, strip), triton.cdiv(width, 1024), rows)](
        x, conv_weight, ring, starts, slots, lengths, y, tokens, WIDTH=width, BLOCK=1024,
        STRIP=strip, num_warps=4 if strip == 1 else 8,
    )  # fmt: skip
    block = triton.next_power_of_2(width)
    residual_norm_kernel[(tokens,)](
        y, residual, norm_weight, hidden, normed, eps, WIDTH=width, BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return hidden, normed
