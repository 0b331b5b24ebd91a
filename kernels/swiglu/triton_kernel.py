"""The gated activation as one Triton program a block of a token."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels._triton import CompileCase, follow, launchable, launches, meta

BLOCK = 1024


@triton.jit
def silu(gate):
    """gate * sigmoid(gate) of fp32 values."""
    return gate / (1.0 + tl.exp(-gate))


@triton.jit
def swiglu_kernel(x, scale, y, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    factor = tl.load(scale)
    follow()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    first = x + row * 2 * WIDTH + column
    gate = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(first + WIDTH, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * WIDTH + column, silu(gate) * up * factor, mask=mask)


def swiglu(x: Tensor, scale: Tensor) -> Tensor:
    """Gate the halves of `x`; see the package docstring."""
    rows, width = x.shape[0], x.shape[1] // 2
    y = x.new_empty(rows, width)
    block = min(BLOCK, triton.next_power_of_2(width))
    if rows:
        launchable(swiglu_kernel)[(rows, triton.cdiv(width, block))](
            x, scale, y, WIDTH=width, BLOCK=block
        )
    return y


def compile_cases() -> list[CompileCase]:
    """A dense layer of inkling-small at TP 8."""
    return launches("swiglu", swiglu, meta(8, 4096), meta(1, dtype=torch.float32))
