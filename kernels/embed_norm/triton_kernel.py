"""Token embedding and its norm as one Triton program a token."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels._triton import CompileCase, launchable, launches, meta
from inkling_engine.kernels.rmsnorm.triton_kernel import normalised, row_config


@triton.jit
def embed_norm_kernel(
    tokens, table, weight, y, VOCAB: tl.constexpr, EPS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    token = tl.minimum(tl.maximum(token, 0), VOCAB - 1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    values = tl.load(table + token * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * WIDTH + column, normalised(values, scale, EPS, WIDTH), mask=mask)


def embed_norm(
    tokens: Tensor,
    table: Tensor,
    weight: Tensor,
    peers: Tensor,
    rank: Tensor,
    eps: float,
    world: int,
) -> Tensor:
    """Look tokens up and normalise; see the package docstring."""
    assert world == 1, "the vocabulary is not split over ranks"
    count, (vocab, width) = tokens.shape[0], table.shape
    y = table.new_empty(count, width)
    block, warps = row_config(width)
    if count:
        launchable(embed_norm_kernel)[(count,)](
            tokens, table, weight, y, VOCAB=vocab, EPS=eps, WIDTH=width, BLOCK=block,
            num_warps=warps,
        )  # fmt: skip
    return y


def compile_cases() -> list[CompileCase]:
    """The whole vocabulary of inkling-small."""
    i32, i64 = {"dtype": torch.int32}, {"dtype": torch.int64}
    arguments = meta(8, **i32), meta(201024, 4096), meta(4096), meta(8, **i64), meta(4, **i32)
    return launches("embed_norm", embed_norm, *arguments, 1e-6, 1)
