"""Engines that draft, over the real step: every token, logprob and state is plain decoding's.

The random model's own drafts are seldom right, so right and wrong ones are planted: `truth` is what
plain decoding gave. What nobody holds is full of NaN. In float32 on the CPU equal means equal bits.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.engines import Exported, open_engine
from support.prompts import python_prompts
from support.rig import Model, native_step
from support.stepper import convert

from inkling_engine.runtime.debug import (
    check,
    digest,
    draft_digest,
    force_accept,
    poison_free,
    write_drafts,
)
from inkling_engine.runtime.engine import Engine
from inkling_engine.runtime.errors import UsageError
from inkling_engine.runtime.requests import Choice, Request
from inkling_engine.runtime.sampling import SamplingParams
from inkling_engine.runtime.script import Script

from .conftest import SMALL, VOCABULARY

pytestmark = pytest.mark.usefixtures("native_library")

DEPTHS = (1, 2, 3)
PATTERNS = ((0,), (1,), (3,), (0, 2), (1, 3, 0, 2))
Open = Callable[..., Engine]
Truths = Mapping[Request, Sequence[int]]
BIAS = dict.fromkeys(range(6), 6.0)
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.2, "seed": 2, "top_p": 0.8},
    {"temperature": 0.9, "seed": 3, "top_k": 5},
    {"temperature": 1.1, "seed": 4, "min_p": 0.05},
    {"temperature": 0, "presence_penalty": 1.5, "logit_bias": BIAS},
    {"temperature": 0.7, "seed": 5, "frequency_penalty": 1.1, "logit_bias": BIAS},
    {"temperature": 0.7, "seed": 6, "repetition_penalty": 1.4, "logit_bias": BIAS},
)


def params(tokens: int, **values: Any) -> SamplingParams:
    """Greedy and complete unless told otherwise."""
    given = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 5}
    return SamplingParams(**given | values)


def prompt_of(length: int, seed: int = 1) -> list[int]:
    """Random ids of the small model."""
    return random.Random(seed).choices(range(VOCABULARY), k=length)


@pytest.fixture(scope="module")
def opened(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Opens engines that make so many drafts (0: plain ones), over exported steps that all share."""
    scratch, exported = tmp_path_factory.mktemp("drafting"), cache(lambda depth: Exported())

    @cache
    def model(depth: int) -> Model:
        options = SMALL | {"decode_buckets": "2,8", "extend_buckets": "16x8", "spec_depth": depth}
        machine = convert(small_checkpoint, scratch, **options)
        return Model(machine.spec, machine.weights)

    def make(depth: int, *, prefix_cache: bool = True, steps: int = 1, **pools: int) -> Engine:
        whole = model(depth)
        sizes = msgspec.structs.replace(whole.spec.pools, **pools)
        found = Model(msgspec.structs.replace(whole.spec, pools=sizes), whole.weights)
        run = native_step if pools else exported(depth)
        engine, _ = open_engine(found, run, prefix_cache=prefix_cache)
        engine.scheduler.steps = steps
        return engine

    return make


def plant(engine: Engine, truths: Truths, right: Iterator[int]) -> None:
    """Give every row that decodes its next `right` drafts as they will be, and a wrong one behind."""
    depth = engine.spec.spec_depth
    for sequence in engine.scheduler.decoding:
        truth = truths[sequence.request]
        behind = truth[len(sequence.tokens) :][: min(depth, sequence.drafts)]
        count = next(right)
        wrong = [(token + 1) % VOCABULARY for token in behind[count:]]
        write_drafts(engine, sequence, [*behind[:count], *wrong])


def finish(
    engine: Engine,
    truths: Truths,
    pattern: Iterable[int] = (),
    see: Callable[[], None] = lambda: None,
) -> list[Choice]:
    """Run requests over poison to their ends, with drafts planted by `pattern` if there is one;
    calls `see` after each step. Their choices."""
    right = itertools.cycle(pattern)
    for _ in range(2000):
        if all(request.finished for request in truths):
            break
        poison_free(engine)
        if pattern and engine.spec.spec_depth:
            plant(engine, truths, right)
        engine.step()
        engine.scheduler.check()
        see()
    return [choice for request in truths for choice in request.completion().choices]


def run(
    engine: Engine,
    prompt: Sequence[int],
    chosen: SamplingParams,
    pattern: Iterable[int],
    truth: Any,
) -> Choice:
    """One request alone."""
    return finish(engine, {engine.submit(list(prompt), chosen): truth}, pattern)[0]


def plain(opened: Open, prompt: Sequence[int], chosen: SamplingParams) -> Choice:
    """What plain decoding gives, from nothing."""
    return opened(0, prefix_cache=False).generate(list(prompt), chosen)[0].choices[0]


@pytest.mark.parametrize("depth", DEPTHS)
def test_any_sampling_is_plain_decodings(opened: Open, depth: int) -> None:
    """Each kind alone with its own drafts, then all together with right and wrong ones planted."""
    asks = [params(14, **kind) for kind in KINDS]
    prompts = [prompt_of(n, n) for n in (1, 2, 3, 4, 7, 8, 9, 21)]
    expected = [plain(opened, *pair) for pair in zip(prompts, asks, strict=True)]
    engine = opened(depth)
    for prompt, ask, wanted in zip(prompts, asks, expected, strict=True):
        assert run(engine, prompt, ask, (), ()) == wanted
    for steps, pattern in ((1, (0,)), (1, (depth,)), (1, (1, 0, 2)), (2, ())):
        engine = opened(depth, steps=steps)
        pairs = zip(prompts, asks, expected, strict=True)
        truths = {engine.submit(prompt, ask): w.token_ids for prompt, ask, w in pairs}
        assert finish(engine, truths, pattern) == expected
        if pattern:
            assert bool(engine.drafts.accepted[0]) == (pattern != (0,))


def states(
    engine: Engine,
    prompt: Sequence[int],
    chosen: SamplingParams,
    truth: Sequence[int] = (),
    pattern: Iterable[int] = (),
) -> dict[int, tuple[str, str]]:
    """Digests of target and draft state by length, after every step of a request's decoding."""
    request, found = engine.submit(list(prompt), chosen), dict[int, tuple[str, str]]()
    (sequence,) = request.sequences

    def see() -> None:
        if sequence.tokens and not request.finished:
            drafts = draft_digest(engine, sequence) if engine.spec.spec_depth else ""
            found[sequence.length] = digest(engine, sequence), drafts

    finish(engine, {request: truth}, pattern, see)
    return found


@pytest.mark.parametrize("depth", DEPTHS)
def test_state_is_that_of_the_tokens_alone(opened: Open, depth: int) -> None:
    """After any rounds the target's state is plain decoding's, and the draft depths' is that of rounds
    that accepted nothing; beyond window, extent and grid."""
    chosen = params(30)
    for length in (1, 2, 3, 9):
        prompt = prompt_of(length, length)
        truth = plain(opened, prompt, chosen).token_ids
        target = states(opened(0, prefix_cache=False), prompt, chosen)
        every = states(opened(depth), prompt, chosen, truth, (0,))
        assert {at: seen[0] for at, seen in every.items()} == {at: s[0] for at, s in target.items()}
        for pattern in PATTERNS[1:]:
            found = states(opened(depth), prompt, chosen, truth, pattern)
            assert found.items() <= every.items(), f"prompt of {length}, accepted {pattern}"
            assert max(pattern) > depth or len(found) < len(every)


@pytest.mark.parametrize("depth", DEPTHS)
def test_ends_inside_an_accepted_run(opened: Open, depth: int) -> None:
    """A stop id at each place of a run, and each budget: what was accepted behind it never was."""
    prompt = prompt_of(6, 3)
    truth = plain(opened, prompt, params(20)).token_ids
    engine = opened(depth)
    for at in range(1, 14):
        for chosen in (
            params(20, stop_token_ids=[truth[at]]),
            params(at + 1),
            params(20, stop_token_ids=[truth[at]], min_tokens=at + 1),
        ):
            before = engine.drafts.copy()
            found = run(engine, prompt, chosen, (depth,), truth)
            assert found == plain(opened, prompt, chosen)
            gave = engine.drafts.since(before)
            assert gave.tokens == gave.rounds + sum(gave.accepted) <= len(found.token_ids)
            assert all(
                a <= p <= gave.rounds for a, p in zip(gave.accepted, gave.proposed, strict=True)
            )
    assert all(engine.drafts.accepted)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_last_chunk_that_looks_like_a_round(opened: Open, depth: int) -> None:
    """Of 1 to K + 2 tokens, before or behind a row that drafts in the same step: state and answers are
    those of runs alone."""
    ask = params(12)
    first, second = prompt_of(5, 7), prompt_of(8, 8)
    truth = plain(opened, first, params(40)).token_ids
    for tail, order in itertools.product(range(1, depth + 3), (1, -1)):
        prompt = [*second, *prompt_of(tail, 9)]
        alone = states(opened(0, prefix_cache=False), prompt, ask)
        engine = opened(depth, prefix_cache=False)
        one, other = engine.submit(first, params(40)), engine.submit(prompt, ask)
        with Script(engine) as script:
            script.step((one, 5))
            for _ in range(3):
                plant(engine, {one: truth}, itertools.repeat(depth))
                script.step((one, 1))
            script.step((other, 8))
            plant(engine, {one: truth}, itertools.repeat(depth))
            script.step(*[(one, 1), (other, tail)][::order])
            (sequence,) = other.sequences
            assert digest(engine, sequence) == alone[len(prompt)][0]
        truths = {one: truth, other: plain(opened, prompt, ask).token_ids}
        found = finish(engine, truths, (depth, 0))
        assert [list(choice.token_ids) for choice in found] == list(map(list, truths.values()))


def test_a_prompt_of_one_token_whose_first_round_is_all_wrong(opened: Open) -> None:
    """Beside a row that is new in the same step."""
    engine, ask = opened(3), params(9)
    prompts = ([5], [9], prompt_of(3, 2))
    truths = [plain(opened, prompt, ask).token_ids for prompt in prompts]
    running: dict[Request, Sequence[int]] = {engine.submit(prompts[0], ask): truths[0]}
    engine.step()
    plant(engine, running, itertools.repeat(0))
    engine.step()
    assert engine.drafts.accepted == [0, 0, 0]
    running |= {engine.submit(p, ask): t for p, t in zip(prompts[1:], truths[1:], strict=True)}
    found = finish(engine, running, (0, 3))
    assert [choice.token_ids for choice in found] == truths


@pytest.mark.parametrize("depth", DEPTHS)
def test_answers_are_prefixes(opened: Open, depth: int) -> None:
    """Turns of a conversation begin at snapshots that rounds have left, with the draft depths' state
    of a cold run."""
    for pattern in PATTERNS:
        engine, prompt, hits = opened(depth), prompt_of(5, 11), []
        for turn in range(3):
            ask = params(13)
            truth = plain(opened, prompt, ask).token_ids
            cold = states(opened(depth, prefix_cache=False), prompt, ask, truth, (0,))
            found = states(engine, prompt, ask, truth, pattern)
            assert found.items() <= cold.items(), f"turn {turn}, accepted {pattern}"
            request = engine.submit(prompt, ask)
            assert finish(engine, {request: truth}, pattern)[0].token_ids == truth
            hits.append(request.sequences[0].cached)
            prompt = [*prompt, *truth, 7 + turn]
        assert hits == sorted(hits) and hits[1] >= 16, "decoding leaves snapshots"


@pytest.mark.parametrize("steps", [1, 2])
def test_preemption_and_aborts_leave_no_trace(opened: Open, steps: int) -> None:
    """Pages for one or two of five requests; some are aborted on the way."""
    prompts = [prompt_of(6, n) for n in range(5)]
    asks = [params(25, temperature=0.9 * (n % 2), seed=n) for n in range(5)]
    wanted = [plain(opened, *pair) for pair in zip(prompts, asks, strict=True)]
    engine = opened(3, full_pages=13, window_pages=30, steps=steps)
    truths: dict[Request, Sequence[int]] = {}
    for n, (prompt, ask, choice) in enumerate(zip(prompts, asks, wanted, strict=True)):
        truths[engine.submit(prompt, ask, priority=n % 2)] = choice.token_ids
    extra: dict[Request, Sequence[int]] = {
        engine.submit(prompt_of(9, 20 + n), params(20)): (1,) * 20 for n in range(2)
    }
    count = itertools.count()

    def see() -> None:
        if next(count) == 9:
            for request in extra:
                engine.abort(request)

    found = finish(engine, truths | extra, (3, 0, 2, 1) if steps == 1 else (), see)
    assert engine.scheduler.preemptions
    assert found[:5] == wanted


def test_one_drafts_and_another_does_not(opened: Open) -> None:
    prompts = [prompt_of(4, n) for n in range(4)]
    asks = [params(12, max_drafts=most) for most in (0, 1, None, 2)]
    wanted = [plain(opened, *pair) for pair in zip(prompts, asks, strict=True)]
    engine, steps = opened(3), []
    truths: dict[Request, Sequence[int]] = {}
    for prompt, ask, choice in zip(prompts, asks, wanted, strict=True):
        truths[engine.submit(prompt, ask)] = choice.token_ids
    requests = list(truths)

    def see() -> None:
        steps.append([len(request.sequences[0].tokens) for request in requests])

    assert finish(engine, truths, (3,), see) == wanted
    assert steps[:4] == [[1, 1, 1, 1], [2, 3, 5, 4], [3, 5, 9, 7], [4, 7, 12, 10]]


@pytest.mark.parametrize(("low", "high"), [(0, 0), (1, 1), (3, 3), (0, 2), (3, 1)])
def test_forced_acceptance(opened: Open, low: int, high: int) -> None:
    """So many drafts are accepted whatever they are, by the step's number; the drafts are the tokens."""
    engine, counts = opened(3), []
    request = engine.submit(prompt_of(5, 1), params(60 - 8))
    force_accept(engine, request, low, high)
    (sequence,) = request.sequences
    engine.step()
    while len(sequence.tokens) < 40:
        number, before = engine.steps, len(sequence.tokens)
        drafts = engine.pool.tensors["draft_tokens"][sequence.slot].tolist()
        engine.step()
        given = sequence.tokens[before:]
        assert len(given) == 1 + (high if number % 2 else low)
        assert given[:-1] == drafts[: len(given) - 1]
        counts.append(len(given) - 1)
    assert sum(engine.drafts.accepted) == sum(counts)
    engine.abort(request)
    engine.scheduler.check()


def test_a_compiled_engine_drafts(tiny_engine: Path, drafting_engine: Path) -> None:
    """The trained model's own drafts: texts, tokens and logprobs of an engine that does not draft, in
    every way to decode, across pages, and from the prefix cache."""
    prompts = python_prompts((1, 2, 3, 64, 130, 300))
    asks: list[dict[str, Any]] = [
        {"temperature": 0, "max_tokens": 40, "logprobs": 2},
        {"seed": 3, "max_tokens": 30, "n": 2, "repetition_penalty": 1.2, "logprobs": 1},
        {"temperature": 0, "max_tokens": 40, "stop": ["\n", " the"], "ignore_eos": True},
        {"temperature": 0, "max_tokens": 31, "stop_token_ids": [40, 41, 42, 260, 300]},
        {"seed": 9, "max_tokens": 26, "stop": ["e"], "include_stop_str_in_output": True},
        {"temperature": 0.7, "seed": 1, "max_tokens": 17, "min_tokens": 7, "top_k": 50},
    ]
    chosen = [SamplingParams(**ask) for ask in asks]
    with Engine.load(tiny_engine) as engine:
        expected = [done.choices for done in engine.generate(prompts, chosen)]
    for steps, overlap in ((1, False), (4, True)):
        with Engine.load(drafting_engine, steps_per_replay=steps) as engine:
            engine.overlap = overlap
            for _ in range(2):
                assert [done.choices for done in engine.generate(prompts, chosen)] == expected
            engine.step()
            check(engine)
            assert engine.drafts.acceptance_length > 1.2, "trained depths guess well"
            assert sorted(engine.drafts.accepted, reverse=True) == engine.drafts.accepted
    with pytest.raises(UsageError, match="steps-per-replay: found 26; expected 1 to 25"):
        Engine.load(drafting_engine, steps_per_replay=26)
