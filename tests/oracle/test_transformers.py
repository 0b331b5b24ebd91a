"""The compiled fp32 engine of the trained tiny model against transformers: tokens and logits.

Prompt lengths lie on both sides of everything that changes with length: the conv window (3), the
page (64), the local window (128), the extent and largest extend bucket (256) and the floor of
the log scaling (512). Transformers judges by teacher forcing (see `support.oracle`).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support.oracle import TINY, Oracle, gaps
from support.program_logits import Generated, LogitsEngine
from support.prompts import python_prompts
from torch import Tensor

from inkling_engine.runtime.sampling import SamplingParams

ALONE = (1, 3, 129, 449)
TOGETHER = (2, 4, 5, 17, 33, 63, 64, 65, 100, 127, 200, 255, 257, 300, 513, 700)
NEW_TOKENS, TOLERANCE, NEAR_TIE, MOST_NEAR_TIES = 64, 1e-4, 1e-4, 2
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=5)


class Compared(NamedTuple):
    """What the engine generated and transformers' logits at the same positions [64, vocab]."""

    found: Generated
    expected: Tensor


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    """The tiny model in transformers."""
    return Oracle(TINY)


@pytest.fixture(scope="module")
def compared(tiny_engine: Path, native_library: Path, oracle: Oracle) -> list[Compared]:
    """Four prompts one by one, then sixteen submitted at once, more than there are slots."""
    engine = LogitsEngine(tiny_engine)
    prompts = python_prompts((*ALONE, *TOGETHER))
    found = [engine.generate([prompt], GREEDY)[0] for prompt in prompts[: len(ALONE)]]
    found += engine.generate(prompts[len(ALONE) :], GREEDY)
    return [Compared(item, teacher_forced(oracle, item)) for item in found]


def teacher_forced(oracle: Oracle, found: Generated) -> Tensor:
    """Transformers' logits at each position where the engine took a token."""
    taken = found.choice.token_ids
    return oracle.logits([*found.prompt, *taken[:-1]])[-len(taken) :]


def agreement(pair: Compared) -> int:
    """Positions, from the first, at which the engine took the oracle's best token."""
    same = torch.tensor(pair.found.choice.token_ids) == pair.expected.argmax(-1)
    return int(same.long().cumprod(0).sum())


def test_twenty_prompts_ran_to_their_ends(compared: list[Compared]) -> None:
    assert len(compared) == 20
    for pair in compared:
        assert len(pair.found.choice.token_ids) == NEW_TOKENS
        assert pair.found.choice.finish_reason == "length"


def test_greedy_tokens_are_identical(
    compared: list[Compared], capsys: pytest.CaptureFixture[str]
) -> None:
    ended = []
    for pair in compared:
        if (count := agreement(pair)) < NEW_TOKENS:
            gap = gaps(pair.expected)[count]
            where = f"prompt of {len(pair.found.prompt)} tokens, new token {count}"
            assert gap < NEAR_TIE, f"{where}: another token despite a gap of {gap:.2e}"
            ended.append(where)
    smallest = min(float(gaps(pair.expected).min()) for pair in compared)
    with capsys.disabled():
        print(
            f"\n{len(compared)} prompts x {NEW_TOKENS} greedy tokens against transformers: "
            f"{len(ended)} comparisons ended at a near tie, smallest gap {smallest:.1e}"
        )
    assert len(ended) <= MOST_NEAR_TIES, ended


def test_program_logits_are_close(compared: list[Compared]) -> None:
    for pair in compared:
        scale = float(pair.expected.abs().max())
        error = float((pair.found.logits - pair.expected).abs().max())
        assert error <= TOLERANCE * scale, f"{len(pair.found.prompt)} tokens: {error:.1e}"


def test_logprobs_are_those_of_the_raw_distribution(compared: list[Compared]) -> None:
    for pair in compared:
        expected, bound = (
            pair.expected.log_softmax(-1),
            TOLERANCE * float(pair.expected.abs().max()),
        )
        assert pair.found.choice.logprobs is not None
        for row, item in zip(expected, pair.found.choice.logprobs, strict=True):
            assert float(row[item.token_id]) == pytest.approx(item.logprob, abs=bound)
            best = row.topk(5).values.tolist()
            assert [value for _, value in item.top] == pytest.approx(best, abs=bound)
            for token, value in item.top:
                assert float(row[token]) == pytest.approx(value, abs=bound)


def test_teacher_forcing_finds_the_oracles_own_continuation(oracle: Oracle) -> None:
    for prompt in python_prompts((5, 140)):
        own = oracle.greedy(prompt, 16)
        forced = oracle.logits([*prompt, *own.tokens[:-1]])[-16:]
        assert forced.argmax(-1).tolist() == list(own.tokens)
        assert torch.allclose(forced, own.logits, rtol=0, atol=1e-4)
