"""Input of a draft depth as one Triton program a row: two or three norms in registers.

Of several ranks a launch before exchanges the embeddings (`_exchange_launches.py`).
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels._conv_triton import LAYER_UNIT
from inkling_engine.kernels._exchange import exchange_words
from inkling_engine.kernels._exchange_launches import embedded
from inkling_engine.kernels._triton import (
    CompileCase,
    await_last,
    begin_next,
    launchable,
    launches,
    meta,
)
from inkling_engine.kernels.rmsnorm.triton_kernel import normalised, row_config


@triton.jit
def draft_input_kernel(
    hidden, ids, table, embed_norm, hidden_norm, token_norm, token_rows, starts, z,
    depth, ROWS: tl.constexpr, IDS: tl.constexpr, VOCAB: tl.constexpr,
    DRAFTS: tl.constexpr, EPS: tl.constexpr, GATHERED: tl.constexpr, BACKBONE: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin_next()
    column, i = tl.arange(0, BLOCK), tl.program_id(0).to(tl.int64)
    mask = column < WIDTH
    gain = tl.load(hidden_norm + column, mask=mask, other=0.0).to(tl.float32)
    await_last()
    held = i < tl.load(starts + ROWS)
    row = tl.minimum(tl.maximum(tl.load(token_rows + i), 0), ROWS - 1)
    token = tl.load(ids + tl.minimum(i + row * DRAFTS + depth // LAYER_UNIT, IDS - 1))
    values = tl.load(hidden + i * WIDTH + column, mask=mask & held, other=0.0).to(tl.float32)
    if GATHERED:  # the table is that of the rows
        token = i.to(tl.int32)
    token = tl.minimum(tl.maximum(token, 0), VOCAB - 1).to(tl.int64)
    known = tl.load(table + token * WIDTH + column, mask=mask & held, other=0.0).to(tl.float32)
    out = z + i * (2 * WIDTH) + column  # written when both rows are on the way
    tl.store(out, normalised(values, gain, EPS, WIDTH), mask=mask)
    if BACKBONE:
        gain = tl.load(embed_norm + column, mask=mask, other=0.0).to(tl.float32)
        normed = normalised(known, gain, EPS, WIDTH)
        known = normed.to(table.dtype.element_ty).to(tl.float32)
    gain = tl.load(token_norm + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + WIDTH, normalised(known, gain, EPS, WIDTH), mask=mask)


def draft_input(
    hidden: Tensor,
    ids: Tensor,
    table: Tensor,
    embed_norm: Tensor,
    hidden_norm: Tensor,
    token_norm: Tensor,
    token_rows: Tensor,
    starts: Tensor,
    peers: Tensor,
    exchange: Tensor,
    step_counter: Tensor,
    rank: Tensor,
    depth: int,
    drafts: int,
    call: int,
    calls: int,
    eps: float,
    world: int,
    backbone_norm: bool,
) -> Tensor:
    """Norm hidden states and tokens; see the package docstring."""
    count, width = hidden.shape
    z = hidden.new_empty(count, 2 * width)
    block, warps = row_config(width)
    if world > 1:
        rows, ranks = (token_rows, starts), (peers, exchange, step_counter, rank)
        table = embedded(ids, rows, count, table, ranks, depth, drafts, call, calls, world)
    launchable(draft_input_kernel)[(count,)](
        hidden, ids, table, embed_norm, hidden_norm, token_norm, token_rows, starts, z,
        LAYER_UNIT.value * depth, ROWS=starts.shape[0] - 1, IDS=ids.shape[0], VOCAB=table.shape[0],
        DRAFTS=drafts, EPS=eps, GATHERED=world > 1, BACKBONE=backbone_norm, WIDTH=width, BLOCK=block,
        num_warps=warps,
    )  # fmt: skip
    return z


def compile_cases() -> list[CompileCase]:
    """A verify step of inkling-small of 8 rows: the whole vocabulary, and a TP-8 shard."""
    i32, i64, cases = {"dtype": torch.int32}, {"dtype": torch.int64}, []
    for world in (1, 8):
        norms = [meta(4096) for _ in range(3)]
        cases += launches(
            f"draft_input-tp{world}", draft_input, meta(128, 4096), meta(192, **i32),
            meta(201024 // world, 4096), *norms, meta(128, **i32), meta(9, **i32),
            meta(8, **i64), meta(exchange_words(2 * 128 * 4096, world), **i64), meta(4, **i64),
            meta(4, **i32), 3, 8, -3, 86, 1e-6, world, True,
        )  # fmt: skip
    return cases
