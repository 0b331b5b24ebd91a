"""Cases of sampling over several ranks: the first one's launches, without the others' answers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from bench.token_ops import sample_calls, work
from bench.work import Case, Target, Work, kind_of

from inkling_engine.kernels._candidates import BUDGET, record_words
from inkling_engine.kernels._cases import Ranks
from inkling_engine.kernels._exchange import exchange_words
from inkling_engine.kernels.candidates import candidates
from inkling_engine.kernels.resample import resample


def cases(target: Target, rows: int) -> Iterator[Case]:
    """The cases at `rows` rows."""
    if kind_of(rows) == "decode":
        for name, temperature in (("greedy", 0.0), ("top-p", 0.8)):
            make = partial(candidates_work, target, rows, temperature)
            yield Case("candidates", name, rows, 0, make)
        for name, unsure in (("sure", 0), ("unsure", 1)):
            yield Case("resample", name, rows, 0, partial(resample_work, target, rows, unsure))


def candidates_work(target: Target, rows: int, temperature: float) -> Work:
    """Greedy rows, or rows at a temperature with top-p 0.95."""
    calls = sample_calls(target, rows, temperature)
    words = exchange_words(8 * rows * record_words(calls[0][14], BUDGET), target.tp)
    ranks = [tensor.to(target.device) for tensor in Ranks(target.tp, words=words).tensors]
    numbers = BUDGET, 0, 1, target.tp, target.shape.vocab
    moved = 4.0 * rows * target.shape.vocab
    calls = [(*call, *ranks, *numbers) for call in calls]
    return work(candidates, calls, moved, 0, "cpu", unequal=0.02 if temperature else 0.0)


def resample_work(target: Target, rows: int, unsure: int) -> Work:
    """All greedy rows, or none."""
    device, calls = target.device, []
    for *before, emits, stops, biases, top, drafts in sample_calls(target, rows, 0.0):
        results = (
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.zeros(rows, device=device),
            torch.zeros(rows, top, dtype=torch.int32, device=device),
            torch.zeros(rows, top, device=device),
        )
        calls.append((*before, emits * unsure, stops, biases, top, drafts, *results))
    moved = 4.0 * rows * (1 + unsure * target.shape.vocab)
    return work(resample, calls, moved, 0, "cpu")
