"""Through the whole runtime: a request's tokens, logprobs, windows and pages are the same bits
alone and in company, whatever the scheduler makes of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.engines import Exported, open_engine
from support.prompts import python_prompts
from support.rig import Model

from inkling_engine.runtime.engine import Engine
from inkling_engine.runtime.requests import Request
from inkling_engine.runtime.requests import Sequence as Choice
from inkling_engine.runtime.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("native_library")


def params(index: int, tokens: int) -> SamplingParams:
    """Greedy and sampled requests in turn."""
    heat, seed = float(index % 2), 40 + index
    return SamplingParams(
        temperature=heat, seed=seed, max_tokens=tokens, ignore_eos=True, logprobs=3
    )


@dataclass(frozen=True)
class Seen:
    """What a request was given and left behind: its choice and digests of its state."""

    choice: object
    windows: str
    full_pages: tuple[str, ...]
    window_pages: tuple[str, ...]


def digests(engine: Engine, sequence: Choice) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """SHA-256 of a running sequence's windows, and of the pages that it has filled."""
    page, pool = engine.spec.page_size, engine.pool
    filled = sequence.length // page
    full = [pool.digest_page("full", number) for number in sequence.full_pages[:filled]]
    held = list(sequence.window_pages)[: max(0, filled - sequence.window_first)]
    window = [pool.digest_page("window", number) for number in held]
    return pool.digest_slot(sequence.slot), tuple(full), tuple(window)


def run(
    engine: Engine, prompts: Sequence[list[int]], numbers: Sequence[int], tokens: int
) -> dict[int, Seen]:
    """Run prompts `numbers` together; digests are taken when all but one token is there."""
    requests: dict[int, Request] = {}
    for number in numbers:
        requests[number] = engine.submit(prompts[number], params(number, tokens))
    state = {}
    while not all(request.finished for request in requests.values()):
        engine.step()
        for number, request in requests.items():
            (sequence,) = request.sequences
            if number not in state and len(sequence.tokens) == tokens - 1:
                state[number] = digests(engine, sequence)
    engine.scheduler.check()
    return {n: Seen(r.completion().choices[0], *state[n]) for n, r in requests.items()}


def assert_company_changes_nothing(engine: Engine, prompts: Sequence[list[int]]) -> None:
    """Each prompt alone, then all of them in shuffled groups of several sizes."""
    alone = {n: run(engine, prompts, [n], 8)[n] for n in range(len(prompts))}
    assert len({seen.windows for seen in alone.values()}) == len(prompts)
    for size in (2, 3, 5, len(prompts)):
        order = random.Random(size).sample(range(len(prompts)), len(prompts))
        for start in range(0, len(order), size):
            for number, seen in run(engine, prompts, order[start : start + size], 8).items():
                assert seen == alone[number], f"prompt {number} in a group of {size}"


def test_company_changes_nothing(served: Model, exported: Exported) -> None:
    choose = random.Random(1)
    lengths = [*range(1, 41, 3), 15, 16, 17, 40]
    prompts = [choose.choices(range(served.spec.shape.real_vocab), k=n) for n in lengths]
    assert_company_changes_nothing(open_engine(served, exported)[0], prompts)


def test_company_changes_nothing_in_a_compiled_engine(tiny_engine: Path) -> None:
    with Engine.load(tiny_engine) as engine:
        lengths = (1, 2, 4, 63, 64, 65, 127, 130, 255, 257, 300, 520)
        assert_company_changes_nothing(engine, python_prompts(lengths))
