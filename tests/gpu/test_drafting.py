"""The tiny model's fp32 engine with drafting on a GPU: built, verified, captured, replayed in rounds.

Its answers must be those of the same rows without drafts, whatever is accepted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.compiler import compile_engine
from support.prompts import python_prompts

from inkling_engine.runtime import Engine, SamplingParams, debug

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DRAFTS, STEPS = 4, 3
PROMPTS = python_prompts([1, 3, 65, 130, 300])
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=1)
KINDS = [
    GREEDY,
    dataclasses.replace(GREEDY, temperature=0.8, seed=1),
    dataclasses.replace(GREEDY, temperature=1.1, seed=2, top_p=0.9),
    dataclasses.replace(GREEDY, temperature=0.9, seed=3, top_k=20, repetition_penalty=1.2),
    dataclasses.replace(GREEDY, temperature=1.0, seed=4, min_p=0.05),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One verify and one extend program; several rounds may share a replay."""
    folder = tmp_path_factory.mktemp("cuda") / "engine"
    command = "--model inkling-tiny --device cuda --dtype fp32 --decode-buckets 8"
    command += f" --extend-buckets 256 --spec-depth {DRAFTS} --jobs 2 --quiet"
    done = compile_engine(*command.split(), "--out", folder, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    with Engine.load(folder, steps_per_replay=STEPS, prefix_cache=False) as opened:
        yield opened


def tokens(engine: Engine, params: list[SamplingParams]) -> list[tuple[int, ...]]:
    """Answers to all prompts."""
    return [tuple(c.choices[0].token_ids) for c in engine.generate(PROMPTS, params)]


@pytest.mark.parametrize("steps", [1, STEPS])
@pytest.mark.parametrize("overlap", [False, True])
def test_answers_are_those_without_drafts(engine: Engine, steps: int, overlap: bool) -> None:
    engine.overlap, engine.scheduler.steps = overlap, steps
    plain = [dataclasses.replace(params, max_drafts=0) for params in KINDS]
    before = engine.drafts.copy()
    assert tokens(engine, KINDS) == tokens(engine, plain)
    assert engine.drafts.since(before).acceptance_length > 1
    debug.check(engine)


def test_planted_drafts_are_accepted_as_far_as_they_are_right(engine: Engine) -> None:
    engine.overlap, engine.scheduler.steps = False, 1
    prompt, params = PROMPTS[2], dataclasses.replace(GREEDY, logprobs=None)
    truth = engine.generate(prompt, params)[0].choices[0].token_ids
    for right in range(DRAFTS + 1):
        request = engine.submit(prompt, params)
        (sequence,) = request.sequences
        while not sequence.tokens:
            engine.step()
        known = len(sequence.tokens)
        guesses = [*truth[known : known + right], *[3] * DRAFTS][:DRAFTS]
        if right < DRAFTS and truth[known + right] == 3:
            guesses[right] = 4
        debug.write_drafts(engine, sequence, guesses)
        engine.step()
        assert list(sequence.tokens) == list(truth[: known + right + 1])
        while not request.finished:
            engine.step()
        assert request.completion().choices[0].token_ids == truth


def test_what_was_released_may_hold_nan(engine: Engine) -> None:
    engine.overlap, engine.scheduler.steps = True, STEPS
    before = tokens(engine, KINDS)
    debug.poison_releases(engine)
    try:
        assert tokens(engine, KINDS) == before
    finally:
        engine.observers.clear()
    debug.check(engine)
