"""Several steps in one replay, and a replay begun before the last one was read: the same answers.

Over the fake step with traffic of any kind, and over a compiled engine with everything that a
request may ask for.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_spec import PAGE, build_spec, tiny_tokenizer
from support.fake_step import open_engine, run_oracle
from support.prompts import python_prompts

from inkling_engine.runtime.engine import Engine
from inkling_engine.runtime.errors import UsageError
from inkling_engine.runtime.requests import Request
from inkling_engine.runtime.sampling import SamplingParams

WAYS = [(1, True), (2, False), (5, False), (5, True), (8, False), (8, True)]
Event = tuple[str, int, int]


def _params(first: int, second: int) -> SamplingParams:
    stops: dict[str, Any] = {} if first % 4 else {"stop_token_ids": [20 + first], "min_tokens": 1}
    return SamplingParams(
        seed=second, temperature=first % 3, max_tokens=second, n=1 + first % 2, logprobs=1, **stops
    )


@settings(max_examples=80)
@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(("submit", "submit", "step", "abort")),
            st.integers(1, 50),
            st.integers(1, 30),
        ),
        max_size=30,
    ),
    running=st.integers(1, 4),
    pages=st.integers(17, 30),
    way=st.sampled_from(WAYS),
)
def test_any_traffic_gives_solo_results(
    events: list[Event], running: int, pages: int, way: tuple[int, bool]
) -> None:
    spec = build_spec(
        running=running, full_pages=pages, window_pages=14, decodes=(1, 2), results=16
    )
    with open_engine(spec, steps=way[0], overlap=way[1]) as engine:
        requests: list[Request] = []
        for kind, first, second in events:
            if kind == "submit":
                prompt = [14 + (first * 7 + i * 3) % 100 for i in range(min(first, 63 - second))]
                requests.append(engine.submit(prompt, _params(first, second)))
            elif kind == "abort" and requests:
                engine.abort(requests[first % len(requests)])
            else:
                engine.step()
        while engine.scheduler.unfinished():
            engine.step()
        for request in requests:
            for choice in request.completion().choices:
                tokens, reason, logprobs = run_oracle(
                    spec, request.prompt, request.params, choice.index
                )
                found, items = list(choice.token_ids), choice.logprobs or ()
                ended = choice.finish_reason == reason and found == tokens
                assert ended or (choice.finish_reason, found) == ("abort", tokens[: len(found)])
                assert [item.logprob for item in items] == logprobs[: len(found)]
        engine.step()
        engine.scheduler.check()
        for account in engine.scheduler.accounting().values():
            assert account.live == 0


@pytest.mark.parametrize(("steps", "overlap"), WAYS)
def test_a_stop_string_drops_what_the_replay_drew_after_it(steps: int, overlap: bool) -> None:
    spec = build_spec(results=16)
    plain = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with open_engine(spec, tiny_tokenizer()) as engine:
        whole = engine.generate([50, 51], plain)[0].choices[0].text
        stops = [whole[at : at + 3] for at in range(4, len(whole) - 3, 2)]
        params = [SamplingParams(temperature=0, max_tokens=40, stop=stop) for stop in stops]
        expected = [engine.generate([50, 51], one)[0].choices for one in params]
    with open_engine(spec, tiny_tokenizer(), steps=steps, overlap=overlap) as engine:
        found = engine.generate([[50, 51]] * len(params), params)
        assert [done.choices for done in found] == expected
        assert any(choices[0].finish_reason == "stop" for choices in expected)
        deltas = list(engine.stream([50, 51], params[0]))
        assert "".join(delta.text for delta in deltas) == expected[0][0].text
        assert tuple(itertools.chain(*(d.token_ids for d in deltas))) == expected[0][0].token_ids


def test_a_step_hands_out_as_many_tokens_as_the_replay_has_steps() -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with open_engine(build_spec(results=8), steps=5) as engine:
        (sequence,) = engine.submit([30, 31], params).sequences
        counts = []
        while engine.scheduler.unfinished():
            engine.step()
            counts.append(len(sequence.tokens))
        assert counts == [1, 6, 11, 12]
        assert engine.steps == 16, "the last replay's other four steps were inert"


def test_the_next_replay_has_begun_when_results_are_read() -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with open_engine(build_spec(), overlap=True) as engine:
        (sequence,) = engine.submit([30, 31], params).sequences
        seen = []
        while engine.scheduler.unfinished():
            engine.step()
            seen.append((len(sequence.tokens), engine.steps))
        assert seen == [(1, 2), (2, 3), (3, 4), (4, 4)], "nothing is begun past a known end"


def test_a_prompt_that_cannot_enter_yet_does_not_hold_up_the_next_replay() -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with open_engine(build_spec(running=1), overlap=True) as engine:
        first, second = engine.submit([30, 31], params), engine.submit([32], params)
        seen = []
        while not second.sequences[0].tokens:
            engine.step()
            seen.append((len(first.sequences[0].tokens), engine.steps))
        assert seen == [(1, 2), (2, 3), (3, 4), (4, 4), (4, 6)]


def test_an_abort_leaves_the_replay_ahead_without_effect() -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with open_engine(build_spec(running=1), overlap=True) as engine:
        first = engine.submit([30, 31], params)
        engine.step()
        engine.abort(first)
        done = engine.generate([40, 41], params)[0].choices[0]
        assert list(done.token_ids) == run_oracle(engine.spec, [40, 41], params)[0]
        assert len(first.completion().choices[0].token_ids) == 1
        engine.scheduler.check()


def test_results_are_read_before_their_lines_are_written_again() -> None:
    """A ring that holds one replay cannot hold the next one's lines beside it."""
    spec = build_spec(results=7)
    assert not open_engine(spec, steps=4, overlap=True).overlap
    assert open_engine(spec, steps=3, overlap=True).overlap
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2)
    with open_engine(spec, steps=7) as engine:
        choice = engine.generate([30], params)[0].choices[0]
        assert list(choice.token_ids) == run_oracle(spec, [30], params)[0]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fails", [KeyboardInterrupt, OSError, None])
def test_pools_outlive_what_was_begun(
    monkeypatch: pytest.MonkeyPatch, fails: type[BaseException] | None, overlap: bool
) -> None:
    """Even where a step ends in its wait for a replay, or that replay's wait fails again."""
    engine = open_engine(build_spec(), overlap=overlap)
    assert engine._replayer is not None
    begin, begun, ended = engine._replayer.replay, itertools.count(1), list[int]()

    def replay(name: str, steps: int) -> Any:
        begin(name, steps)
        number, times = next(begun), itertools.count()

        def wait() -> None:
            assert engine.pool.tensors, "the pools are still there"
            if fails and number == 3 and not next(times):
                raise fails
            ended.append(number)
            if fails and number > 3:
                raise OSError("fails again")

        return wait

    monkeypatch.setattr(engine._replayer, "replay", replay)
    engine.submit([30], SamplingParams(max_tokens=9, ignore_eos=True))
    for _ in range(2):
        engine.step()
    if fails:
        with pytest.raises(fails):
            engine.step()
    engine.close()
    assert ended[-1] == next(begun) - 1, "replays end in order: the last one was waited for"
    assert not engine.pool.tensors
    before = list(ended)
    engine.close()
    assert ended == before


def _texts(folder: Path, steps: int, overlap: bool) -> list[object]:
    prompts = python_prompts((1, 5, 64, 65, 130, 300))
    asks: list[dict[str, Any]] = [
        {"temperature": 0, "max_tokens": 33, "logprobs": 2},
        {"seed": 3, "max_tokens": 17, "n": 2, "repetition_penalty": 1.2},
        {"temperature": 0, "max_tokens": 40, "stop": ["\n", " the"], "ignore_eos": True},
        {"temperature": 0, "max_tokens": 21, "stop_token_ids": [40, 41, 42, 260, 300]},
        {"seed": 9, "max_tokens": 26, "stop": ["e"], "include_stop_str_in_output": True},
        {"temperature": 0.7, "seed": 1, "max_tokens": 7, "min_tokens": 7, "top_k": 50},
    ]
    with Engine.load(folder, steps_per_replay=steps) as engine:
        engine.overlap = overlap
        params = [SamplingParams(**ask) for ask in asks]
        together = engine.generate(prompts, params)
        alone = [engine.generate(*pair)[0] for pair in zip(prompts, params, strict=True)]
        assert [done.choices for done in together] == [done.choices for done in alone]
        engine.scheduler.check()
        return [done.choices for done in together]


def test_a_compiled_engine_gives_the_same_tokens_logprobs_and_texts(tiny_engine: Path) -> None:
    expected = _texts(tiny_engine, 1, False)
    for steps, overlap in ((1, True), (2, False), (5, True), (16, False), (16, True)):
        assert _texts(tiny_engine, steps, overlap) == expected


@pytest.mark.parametrize("steps", [0, -1, 2 * PAGE + 1])
def test_more_steps_than_a_replay_may_have_are_refused(tmp_path: Path, steps: int) -> None:
    from support.fake_step import FakeStep, seal_engine

    seal_engine(tmp_path / "engine", build_spec(results=64))
    with pytest.raises(UsageError, match=f"steps-per-replay: found {steps}"):
        Engine.load(tmp_path / "engine", programs=FakeStep, steps_per_replay=steps)
