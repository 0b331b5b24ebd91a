"""Engines of several ranks over the real step: answers of one rank, whatever the scheduler does.

The ranks are threads of this process. Tokens are equal; logprobs but for the order of sums.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from state.conftest import SMALL, VOCABULARY
from support.engines import open_engine
from support.ranks import AllRanks, convert
from support.rig import Model, StepCode, native_step

from inkling_engine.compile import steps
from inkling_engine.kernels._candidates import BUDGET
from inkling_engine.runtime.engine import Engine
from inkling_engine.runtime.requests import Choice, Request
from inkling_engine.runtime.sampling import SamplingParams
from inkling_engine.runtime.stats import StatsCollector, whole_logits

pytestmark = pytest.mark.usefixtures("native_library")

Opened = tuple[Engine, Engine]


@pytest.fixture
def opened(small_checkpoint: Path, tmp_path: Path) -> Callable[..., Opened]:
    """Opens an engine of one rank and one of several, with page pools of given sizes."""

    def make(tp: int, depth: int, **pools: int) -> Opened:
        options = SMALL | {"decode_buckets": "2,8", "extend_buckets": "16x8", "spec_depth": depth}
        engines = []
        for ranks in (1, tp):
            split = convert(small_checkpoint, tmp_path, ranks, native=True, **options)
            sizes = msgspec.structs.replace(split.spec.pools, **pools)
            spec = msgspec.structs.replace(split.spec, pools=sizes)
            run: StepCode = native_step if ranks == 1 else AllRanks(split)
            engines.append(open_engine(Model(spec, split.machines[0].weights), run)[0])
        return engines[0], engines[1]

    return make


def prompt_of(length: int, seed: int) -> list[int]:
    """Random ids of the small model; the first half of a prompt is the same for all seeds."""
    ids = [random.Random(n).choices(range(VOCABULARY), k=length) for n in (0, 1 + seed)]
    return ids[0][: length // 2] + ids[1][length // 2 :]


def params(number: int, tokens: int) -> SamplingParams:
    """Greedy and sampled requests in turn, of every kind of filter and penalty."""
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 0, "presence_penalty": 1.5},
        {"temperature": 0.8, "top_k": 9, "repetition_penalty": 1.3},
        {"temperature": 1.1, "min_p": 0.03, "frequency_penalty": 0.5},
    )
    given = kinds[number % len(kinds)] | {"seed": number, "max_tokens": tokens}
    return SamplingParams(ignore_eos=True, logprobs=3, **given)


def require_close(found: Choice, expected: Choice) -> None:
    """The same tokens, and logprobs that differ by rounding."""
    assert found.token_ids == expected.token_ids
    for one, other in zip(found.logprobs or (), expected.logprobs or (), strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize(("depth", "budget"), [(0, BUDGET), (2, BUDGET), (0, 2), (2, 2)])
@pytest.mark.parametrize("tp", [2, 4])
def test_hits_and_company(
    opened: Callable[..., Opened],
    monkeypatch: pytest.MonkeyPatch,
    tp: int,
    depth: int,
    budget: int,
) -> None:
    """Prompts that share beginnings, twice, all at once; the second time from the prefix cache. With
    a small budget rows with filters are now and then drawn from whole logits."""
    monkeypatch.setattr(steps, "BUDGET", budget)
    one, several = opened(tp, depth)
    watch = StatsCollector(several)
    prompts = [prompt_of(5 + 4 * n, n) for n in range(9)]
    asks = [params(n, 14) for n in range(9)]
    for _ in range(2):
        expected = one.generate(prompts, asks)
        for found, other in zip(several.generate(prompts, asks), expected, strict=True):
            require_close(found.choices[0], other.choices[0])
    assert several.scheduler.cached_tokens == one.scheduler.cached_tokens > 0
    whole = watch.stats().whole_logits
    assert (budget == 2) <= whole[0] <= whole[1]
    assert whole_logits(one) == (0, 0)
    several.step()
    several.scheduler.check()


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("tp", [2, 4])
def test_preemption(opened: Callable[..., Opened], tp: int, depth: int) -> None:
    """Pages for one or two of five requests."""
    one, several = opened(tp, depth, full_pages=13, window_pages=30)
    asked: list[list[Request]] = []
    for engine in (one, several):
        pairs = [(prompt_of(6, 10 + n), params(n, 25)) for n in range(5)]
        asked.append([engine.submit(*pair) for pair in pairs])
        while not all(request.finished for request in asked[-1]):
            engine.step()
        assert engine.scheduler.preemptions
    for found, expected in zip(*reversed(asked), strict=True):
        require_close(found.completion().choices[0], expected.completion().choices[0])
