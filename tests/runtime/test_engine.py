"""The engine loop over the fake step: results, batching, aborts, slot and page life."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_spec import EOS, REAL_VOCAB, build_spec
from support.fake_step import NON_FINITE_TOKEN, open_engine, run_oracle

from inkling_engine.runtime.debug import poison_free
from inkling_engine.runtime.engine import Engine
from inkling_engine.runtime.errors import FailedError, UsageError
from inkling_engine.runtime.requests import Request
from inkling_engine.runtime.sampling import SamplingParams

SPEC = build_spec()


def _assert_idle(engine: Engine) -> None:
    engine.scheduler.check()
    for account in engine.scheduler.accounting().values():
        assert account.live == 0


def _assert_right(request: Request) -> None:
    """Every choice is what it would have been alone; an aborted one is its beginning."""
    for choice in request.completion().choices:
        tokens, reason, logprobs = run_oracle(SPEC, request.prompt, request.params, choice.index)
        found = list(choice.token_ids)
        if choice.finish_reason == "abort":
            assert found == tokens[: len(found)]
            continue
        assert (found, choice.finish_reason) == (tokens, reason)
        assert choice.logprobs is not None
        assert [item.logprob for item in choice.logprobs] == logprobs
        assert choice.cumulative_logprob == sum(logprobs)


def _prompts(count: int, seed: int = 0) -> list[list[int]]:
    random_ids = random.Random(seed)
    lengths = [random_ids.randint(1, 40) for _ in range(count)]
    return [[random_ids.randrange(14, REAL_VOCAB) for _ in range(n)] for n in lengths]


def test_one_prompt() -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with open_engine(SPEC) as engine:
        (done,) = engine.generate([5, 6, 7], params)
        choice = done.choices[0]
        tokens, reason, _ = run_oracle(SPEC, [5, 6, 7], params)
        assert (list(choice.token_ids), choice.finish_reason) == (tokens, reason)
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (3, 20)
        assert (done.usage.total_tokens, done.prompt_token_ids) == (23, (5, 6, 7))
        assert choice.logprobs is None and choice.cumulative_logprob is None and choice.text == ""
        _assert_idle(engine)


def test_many_prompts_of_all_lengths_at_once() -> None:
    prompts = _prompts(40)
    with open_engine(SPEC) as engine:
        params = [
            SamplingParams(
                temperature=i % 2, seed=i, max_tokens=1 + i % 20, min_tokens=i % 2, logprobs=0
            )
            for i in range(len(prompts))
        ]
        requests = [engine.submit(*pair) for pair in zip(prompts, params, strict=True)]
        while not all(request.finished for request in requests):
            poison_free(engine)
            engine.step()
        for request in requests:
            _assert_right(request)
        _assert_idle(engine)


Event = tuple[str, int, int]


@settings(max_examples=40)
@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(("submit", "submit", "step", "abort")),
            st.integers(1, 50),
            st.integers(1, 30),
        ),
        max_size=40,
    ),
    running=st.integers(1, 4),
    pages=st.integers(17, 30),
)
def test_any_traffic_gives_solo_results(events: list[Event], running: int, pages: int) -> None:
    spec = build_spec(running=running, full_pages=pages, window_pages=14, decodes=(1, 2))
    with open_engine(spec) as engine:
        requests: list[Request] = []
        for kind, first, second in events:
            if kind == "submit":
                prompt = [14 + (first * 7 + i * 3) % 100 for i in range(min(first, 63 - second))]
                seeded = SamplingParams(
                    seed=second,
                    temperature=first % 3,
                    max_tokens=second,
                    n=1 + first % 2,
                    logprobs=1,
                )
                requests.append(engine.submit(prompt, seeded))
            elif kind == "abort" and requests:
                engine.abort(requests[first % len(requests)])
            else:
                poison_free(engine)
                engine.step()
        while engine.scheduler.unfinished():
            poison_free(engine)
            engine.step()
        for request in requests:
            _assert_right(request)
        _assert_idle(engine)


def test_threads_may_share_an_engine() -> None:
    params = SamplingParams(temperature=0, max_tokens=15, ignore_eos=True, logprobs=1)
    prompts = _prompts(12, seed=5)
    with open_engine(SPEC) as engine, ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda prompt: engine.generate(prompt, params)[0], prompts))
        for prompt, completion in zip(prompts, done, strict=True):
            assert list(completion.choices[0].token_ids) == run_oracle(SPEC, prompt, params)[0]
        _assert_idle(engine)


def test_slots_are_reused_without_a_trace() -> None:
    """The same prompt gives the same tokens after every kind of predecessor in the one slot."""
    spec = build_spec(running=1)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with open_engine(spec) as engine:
        first = engine.generate([20, 21, 22], params)[0].choices
        for length in (1, 45, 2, 17):
            engine.generate([30] * length, params)
            assert engine.generate([20, 21, 22], params)[0].choices == first


def test_choices_are_independent_and_reproducible() -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=10, ignore_eos=True)
    with open_engine(SPEC) as engine:
        first, again = (engine.generate([40, 41], params)[0] for _ in range(2))
        alone = engine.generate([40, 41], SamplingParams(seed=7, max_tokens=10, ignore_eos=True))[0]
    assert first.choices == again.choices
    assert first.choices[0] == alone.choices[0], "choice 0 uses the seed itself"
    assert len({choice.token_ids for choice in first.choices}) == 3
    assert first.usage.completion_tokens == 30


def test_unseeded_requests_differ() -> None:
    with open_engine(SPEC) as engine:
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        results = {engine.generate([40, 41], params)[0].choices[0].token_ids for _ in range(4)}
    assert len(results) == 4


def test_stop_ids_and_end_tokens() -> None:
    plain = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with open_engine(SPEC) as engine:
        tokens = engine.generate([50, 51], plain)[0].choices[0].token_ids
        stop = tokens[4]
        where = tokens.index(stop) + 1
        listed = SamplingParams(
            temperature=0, max_tokens=30, stop_token_ids=[stop], ignore_eos=True
        )
        choice = engine.generate([50, 51], listed)[0].choices[0]
        assert (choice.token_ids, choice.finish_reason, choice.stop_reason) == (
            tokens[:where],
            "stop",
            stop,
        )
        ends = [
            p
            for p in _prompts(60, seed=3)
            if EOS in run_oracle(SPEC, p, SamplingParams(temperature=0))[0]
        ]
        choice = engine.generate(ends[0], SamplingParams(temperature=0))[0].choices[0]
        assert (choice.token_ids[-1], choice.finish_reason, choice.stop_reason) == (
            EOS,
            "stop",
            None,
        )


def test_non_finite_logits_end_only_their_request() -> None:
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2)
    with open_engine(SPEC) as engine:
        good, bad, other = engine.generate([[30], [30, NON_FINITE_TOKEN], [31]], params)
        assert (bad.choices[0].finish_reason, bad.choices[0].token_ids) == ("error", ())
        for done in (good, other):
            assert (
                list(done.choices[0].token_ids)
                == run_oracle(SPEC, done.prompt_token_ids, params)[0]
            )
        _assert_idle(engine)


def test_logprobs_carry_the_asked_number_of_alternatives() -> None:
    with open_engine(SPEC) as engine:
        for count in (0, 1, 3):
            params = SamplingParams(temperature=0, logprobs=count, max_tokens=3, ignore_eos=True)
            choice = engine.generate([60], params)[0].choices[0]
            assert choice.logprobs is not None
            for item, token in zip(choice.logprobs, choice.token_ids, strict=True):
                expected = [((token + i) % REAL_VOCAB, item.logprob - i) for i in range(count)]
                assert (item.token_id, list(item.top)) == (token, expected)


def test_abort_anywhere_frees_everything() -> None:
    with open_engine(build_spec(running=2)) as engine:
        params = SamplingParams(max_tokens=20, ignore_eos=True, n=2, detokenize=False)
        requests = [engine.submit([30] * 30, params) for _ in range(3)]
        engine.abort(requests[2])  # while it waits
        engine.step()
        engine.abort(requests[0])  # inside its prompt
        for _ in range(8):
            engine.step()
        engine.abort(requests[1])  # while it decodes
        engine.abort(requests[1])  # again: nothing
        reasons = [c.finish_reason for r in requests for c in r.completion().choices]
        assert reasons == ["abort"] * 6
        assert requests[1].completion().usage.completion_tokens > 0
        _assert_idle(engine)


def test_idle_steps_do_nothing() -> None:
    with open_engine(SPEC) as engine:
        before = engine.pool.digest_slot(1), engine.pool.digest_page("full", 1)
        assert [engine.step() for _ in range(50)] == [[]] * 50
        assert (engine.pool.digest_slot(1), engine.pool.digest_page("full", 1)) == before
        assert engine.steps == 0


def test_step_tells_which_requests_finished() -> None:
    with open_engine(SPEC) as engine:
        short = engine.submit([30], SamplingParams(max_tokens=1))
        long = engine.submit([31], SamplingParams(max_tokens=3, ignore_eos=True))
        assert engine.step() == [short]
        assert engine.step() == []
        assert engine.step() == [long]


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([], "prompt"),
        ([REAL_VOCAB], "prompt token id"),
        ([-1], "prompt token id"),
        ([1.5], "prompt token id"),
        ([True], "prompt token id"),
        ("text", "prompt"),
        (b"bytes", "prompt"),
        ({"prompt_token_ids": [1], "prompt": "x"}, "prompt"),
        ({"ids": [1]}, "prompt"),
        ([1] * 60, "prompt + max_tokens"),
    ],
)
def test_bad_prompts_are_refused_by_name(prompt: Any, field: str) -> None:
    with open_engine(SPEC) as engine:
        with pytest.raises(UsageError) as caught:
            engine.generate([prompt, [5]], SamplingParams(max_tokens=5))
        assert caught.value.field == field
        assert "\n" not in str(caught.value)
        assert not engine.scheduler.unfinished(), "nothing runs if one is refused"


def test_prompt_forms() -> None:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with open_engine(SPEC) as engine:
        forms: list[Any] = [[5, 6], (5, 6), {"prompt_token_ids": [5, 6]}]
        singles = [engine.generate(form, params) for form in forms]
        assert len({done[0].choices for done in singles}) == 1
        assert len(engine.generate(forms, params)) == 3
        assert engine.generate([], params) == []
        with pytest.raises(UsageError, match="params"):
            engine.generate([[5], [6]], [params])


def test_context_is_exact() -> None:
    with open_engine(SPEC) as engine:
        fits = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        assert len(engine.generate([5] * 60, fits)[0].choices[0].token_ids) == 4
        rest = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        assert len(engine.generate([5] * 40, rest)[0].choices[0].token_ids) == 24
        for prompt, params in (([5] * 61, fits), ([5] * 64, rest)):
            with pytest.raises(UsageError, match="max_context"):
                engine.generate(prompt, params)


def test_request_larger_than_the_pools_is_refused() -> None:
    with (
        open_engine(build_spec(full_pages=6)) as engine,
        pytest.raises(UsageError, match="full pages"),
    ):
        engine.generate([5] * 20, SamplingParams(max_tokens=4))


def test_a_failed_step_closes_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(SPEC)
    monkeypatch.setattr(engine._replayer, "replay", _raise)
    with pytest.raises(OSError, match="broken"):
        engine.generate([5])
    with pytest.raises(FailedError, match="load it again"):
        engine.generate([5])
    engine.close()


def _raise(name: str, steps: int) -> None:
    raise OSError(f"broken {name}")


def test_close_aborts_and_refuses() -> None:
    engine = open_engine(SPEC)
    request = engine.submit([5])
    engine.close()
    engine.close()
    assert request.completion().choices[0].finish_reason == "abort"
    with pytest.raises(FailedError, match="closed"):
        engine.step()
    with pytest.raises(FailedError, match="closed"):
        engine.submit([5])
