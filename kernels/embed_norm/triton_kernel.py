"""Token embedding and its norm as one Triton program a token.

Of several ranks one launch exchanges the rows (`_exchange_launches.py`), another norms them.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels._exchange import exchange_words
from inkling_engine.kernels._exchange_launches import embedded
from inkling_engine.kernels._triton import CompileCase, follow, launchable, launches, meta
from inkling_engine.kernels.rmsnorm.triton_kernel import normalised, rmsnorm, row_config


@triton.jit
def embed_norm_kernel(
    tokens, table, weight, y, VOCAB: tl.constexpr, EPS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    follow()
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
    exchange: Tensor,
    step_counter: Tensor,
    rank: Tensor,
    call: int,
    calls: int,
    eps: float,
    world: int,
) -> Tensor:
    """Look tokens up and normalise; see the package docstring."""
    count, (vocab, width) = tokens.shape[0], table.shape
    if world > 1:
        ranks = peers, exchange, step_counter, rank
        rows = embedded(tokens, None, count, table, ranks, 0, 0, call, calls, world)
        return rmsnorm(rows, weight, eps)
    y = table.new_empty(count, width)
    block, warps = row_config(width)
    if count:
        launchable(embed_norm_kernel)[(count,)](
            tokens, table, weight, y, VOCAB=vocab, EPS=eps, WIDTH=width, BLOCK=block,
            num_warps=warps,
        )  # fmt: skip
    return y


def compile_cases() -> list[CompileCase]:
    """The whole vocabulary of inkling-small, and a TP-8 shard; that in fp32 too, which waits otherwise."""
    i32, i64 = {"dtype": torch.int32}, {"dtype": torch.int64}
    cases = []
    for world, dtype in ((1, torch.bfloat16), (8, torch.bfloat16), (8, torch.float32)):
        table = meta(201024 // world, 4096, dtype=dtype)
        block = meta(exchange_words(4 * 8 * 4096, world), **i64)
        ranks = meta(8, **i64), block, meta(4, **i64), meta(4, **i32)
        arguments = meta(8, **i32), table, meta(4096, dtype=dtype), *ranks, 0, 86, 1e-6, world
        name = f"embed_norm-tp{world}" + ("-fp32" if dtype == torch.float32 else "")
        cases += launches(name, embed_norm, *arguments)
    return cases
