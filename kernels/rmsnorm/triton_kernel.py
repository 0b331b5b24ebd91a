"""RMSNorm as one Triton program a row: statistics and product in fp32, one rounding."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels._triton import CompileCase, follow, launchable, launches, meta


@triton.jit
def normalised(values, weight, eps, WIDTH: tl.constexpr):
    """fp32 values * rsqrt(mean(values^2) + eps) * weight; lanes beyond WIDTH are zero."""
    mean = tl.sum(values * values, axis=0) / WIDTH
    return values * tl.rsqrt(mean + eps) * weight


@triton.jit
def rmsnorm_kernel(x, weight, y, EPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    follow()
    values = tl.load(x + row + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row + column, normalised(values, scale, EPS, WIDTH), mask=mask)


def row_config(width: int) -> tuple[int, int]:
    """Block and warps of a program that holds a row of `width` elements: 16 a thread."""
    block = triton.next_power_of_2(width)
    return block, min(16, max(1, block // 512))


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise each row; see the package docstring."""
    y = torch.empty_like(x)
    rows, width = x.shape
    block, warps = row_config(width)
    if rows:
        launchable(rmsnorm_kernel)[(rows,)](
            x, weight, y, EPS=eps, WIDTH=width, BLOCK=block, num_warps=warps
        )
    return y


def compile_cases() -> list[CompileCase]:
    """A hidden row of inkling-small."""
    return launches("rmsnorm", rmsnorm, meta(8, 4096), meta(4096), 1e-6)
