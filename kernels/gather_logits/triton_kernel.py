"""Logits of the whole vocabulary in one launch (see `_exchange_triton.py`)."""
# mypy: disable-error-code="import-untyped"

import torch
import triton
from torch import Tensor

from inkling_engine.kernels._conv_triton import LAYER_UNIT
from inkling_engine.kernels._exchange import ABSENT_LOGIT, exchange_words, half_words
from inkling_engine.kernels._exchange_triton import blocks_of, gather_kernel
from inkling_engine.kernels._triton import CompileCase, launchable, launches, meta


def gather_logits(
    logits: Tensor,
    unsure: Tensor,
    peers: Tensor,
    exchange: Tensor,
    step_counter: Tensor,
    rank: Tensor,
    call: int,
    calls: int,
    world: int,
    vocab: int,
) -> Tensor:
    """Gather the ranks' columns; see the package docstring."""
    rows, columns = logits.shape
    whole = logits.new_empty(rows, vocab)
    block, warps, programs, rounds = blocks_of(rows * columns, 1024)
    launchable(gather_kernel)[(programs,)](
        logits, unsure, peers, exchange, step_counter, rank, whole, rows * columns,
        LAYER_UNIT.value * call, CALLS=calls, WORLD=world, HALF=half_words(exchange.shape[0], world),
        SAMPLES=rows, LANES=triton.next_power_of_2(rows), COLUMNS=columns, VOCAB=vocab,
        ABSENT=ABSENT_LOGIT, BLOCK=block, ROUNDS=rounds,
        num_warps=warps, num_stages=1,
    )  # fmt: skip
    return whole


def compile_cases() -> list[CompileCase]:
    """Sampled rows of inkling-small at TP 8 and TP 2."""
    i64, cases = {"dtype": torch.int64}, []
    for rows, world in ((1, 8), (32, 8), (8, 2)):
        columns = 201024 // world
        cases += launches(
            f"gather_logits-{rows}-tp{world}", gather_logits,
            meta(rows, columns, dtype=torch.float32), meta(rows, dtype=torch.int32),
            meta(8, **i64),
            meta(exchange_words(4 * rows * columns, world), **i64), meta(4, **i64),
            meta(4, dtype=torch.int32), 85, 86, world, 200058,
        )  # fmt: skip
    return cases
