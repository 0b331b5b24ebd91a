"""Logits of the whole vocabulary in one launch (see `_exchange_launches.py`)."""

import torch
from torch import Tensor

from inkling_engine.kernels._exchange import exchange_words
from inkling_engine.kernels._exchange_launches import gathered
from inkling_engine.kernels._triton import CompileCase, launches, meta


def gather_logits(
    logits: Tensor,
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
    ranks = peers, exchange, step_counter, rank
    return gathered(logits, ranks, call, calls, world, vocab)


def compile_cases() -> list[CompileCase]:
    """Sampled rows of inkling-small at TP 8 and TP 2."""
    i64, cases = {"dtype": torch.int64}, []
    for rows, world in ((1, 8), (32, 8), (8, 2)):
        columns = 201024 // world
        cases += launches(
            f"gather_logits-{rows}-tp{world}", gather_logits,
            meta(rows, columns, dtype=torch.float32), meta(8, **i64),
            meta(exchange_words(4 * rows * columns, world), **i64), meta(4, **i64),
            meta(4, dtype=torch.int32), 85, 86, world, 200058,
        )  # fmt: skip
    return cases
