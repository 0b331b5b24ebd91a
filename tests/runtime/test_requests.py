"""Requests, the states of their sequences, and the forms that prompts may take."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_spec import build_spec

from inkling_engine.runtime.errors import UsageError
from inkling_engine.runtime.requests import (
    Cursor,
    Prompt,
    Request,
    Status,
    TokenLogprob,
    open_request,
    pair_prompts,
    read_prompt,
)
from inkling_engine.runtime.sampling import SamplingParams, choice_seed

pytestmark = pytest.mark.null

SPEC = build_spec()


def _request(**values: Any) -> Request:
    return open_request(9, [3, 4, 5], SamplingParams(**values), SPEC, 77)


def test_choices_have_their_own_seeds_and_budgets() -> None:
    request = _request(n=3, max_tokens=7)
    assert [s.index for s in request.sequences] == [0, 1, 2]
    assert [s.seed for s in request.sequences] == [choice_seed(77, i) for i in range(3)]
    assert {(s.total, s.max_tokens) for s in request.sequences} == {(10, 7)}
    assert _request(seed=5).sequences[0].seed == 5
    assert _request(max_tokens=None).sequences[0].max_tokens == 61


def test_a_sequence_only_moves_on() -> None:
    (sequence,) = _request().sequences
    assert sequence.status is Status.WAITING
    with pytest.raises(AssertionError):
        sequence.start(0)
    sequence.start(2)
    assert (sequence.status, sequence.slot) == (Status.RUNNING, 2)
    with pytest.raises(AssertionError):
        sequence.start(2)
    with pytest.raises(AssertionError, match="not finished"):
        sequence.choice()
    sequence.finish("length")
    with pytest.raises(AssertionError, match="ends once"):
        sequence.finish("abort")


def test_a_completion_counts_the_prompt_once() -> None:
    request = _request(n=2, logprobs=0)
    for count, sequence in enumerate(request.sequences, start=1):
        assert not request.finished
        sequence.tokens += [6] * count
        assert sequence.logprobs is not None
        sequence.logprobs += [TokenLogprob(6, -0.5, ())] * count
        sequence.finish("stop", 6)
    assert request.finished
    done = request.completion()
    assert (done.request_id, done.prompt_token_ids) == (9, (3, 4, 5))
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (3, 3)
    assert done.usage.total_tokens == 6
    assert [choice.cumulative_logprob for choice in done.choices] == [-0.5, -1.0]
    assert [choice.stop_reason for choice in done.choices] == [6, 6]


def test_a_cursor_hands_out_everything_once() -> None:
    (sequence,) = _request().sequences
    cursor = Cursor(sequence)
    assert cursor.take() is None
    sequence.tokens += [6, 7]
    delta = cursor.take()
    assert delta and (delta.token_ids, delta.finish_reason) == ((6, 7), None)
    assert cursor.take() is None
    sequence.text = "done"
    sequence.finish("length")
    delta = cursor.take()
    assert delta and (delta.token_ids, delta.text, delta.finish_reason) == ((), "done", "length")
    assert cursor.exhausted and cursor.take() is None


class Letters:
    """An encoder of one id a letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def test_prompt_forms() -> None:
    assert read_prompt("ab", Letters()) == [97, 98]
    assert read_prompt({"prompt": "ab"}, Letters()) == [97, 98]
    assert read_prompt({"prompt_token_ids": (1, 2)}, None) == [1, 2]
    source = [1, 2]
    ids = read_prompt(source, None)
    source.append(3)
    assert ids == [1, 2], "the caller's list may change later"


@pytest.mark.parametrize(
    "prompt", ["ab", {"prompt": "ab"}, {}, {"a": 1}, {1: 1, "a": 1}, 5, None, b"x", {1, 2}]
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(UsageError, match="prompt"):
        read_prompt(prompt, None)


@pytest.mark.parametrize("power", [5000, None])
def test_ids_that_cannot_be_shown_are_refused(power: int | None) -> None:
    token: Any = 10**power if power else []
    for _ in range(0 if power else 100_000):
        token = [token]
    with pytest.raises(UsageError, match="prompt token id: found a huge (int|list)"):
        open_request(9, [3, token], SamplingParams(), SPEC, 77)


def test_prompts_are_paired_with_sampling() -> None:
    one, two = SamplingParams(n=1), SamplingParams(n=2)
    assert pair_prompts("ab", one) == (["ab"], [one])
    assert pair_prompts([1, 2], one) == ([[1, 2]], [one])
    assert pair_prompts({"prompt": "ab"}, None) == ([{"prompt": "ab"}], [SamplingParams()])
    mixed: list[Prompt] = [[1], "b"]
    assert pair_prompts(mixed, one) == (mixed, [one, one])
    assert pair_prompts([[1], [2]], [one, two]) == ([[1], [2]], [one, two])
    with pytest.raises(UsageError, match="2 for 1 prompts"):
        pair_prompts(["a"], [one, two])
