"""Every sampling field: what is taken, what is refused, and with which name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from support.fake_spec import EOS, REAL_VOCAB, build_spec

from inkling_engine.runtime.errors import UsageError
from inkling_engine.runtime.sampling import (
    REFUSED,
    SamplingParams,
    check_params,
    choice_seed,
    stop_ids,
)

pytestmark = pytest.mark.null

GOOD: dict[str, list[Any]] = {
    "n": [1, 1024],
    "temperature": [0, 0.0, 1e-9, 0.7, 2, 1e30],
    "top_p": [1e-9, 0.5, 1, 1.0],
    "top_k": [-1, 0, 1, 5000],
    "min_p": [0, 0.5, 1],
    "seed": [None, 0, 2**64 - 1],
    "presence_penalty": [-2, 0, 2.0],
    "frequency_penalty": [-2, 0, 2.0],
    "repetition_penalty": [0.5, 1, 2],
    "logit_bias": [None, {}, {3: -100}, {"3": 100.0}],
    "max_tokens": [None, 1, 2**31 - 1],
    "min_tokens": [0, 16],
    "stop": [None, "x", ["x", "y"], ()],
    "stop_token_ids": [None, [], [1, 2], (3,)],
    "ignore_eos": [True, False],
    "include_stop_str_in_output": [True, False],
    "logprobs": [None, 0, 20],
    "max_drafts": [None, 0, 3],
    "skip_special_tokens": [True, False],
    "detokenize": [True, False],
}
BAD: dict[str, list[Any]] = {
    "n": [0, -1, 1.5, True, "2", None, 1025],
    "temperature": [-0.1, math.nan, math.inf, "1", None, True],
    "top_p": [0, -0.1, 1.1, math.nan, None],
    "top_k": [-2, 1.5, None, True],
    "min_p": [-0.1, 1.1, math.nan],
    "seed": [-1, 2**64, 1.0, True],
    "presence_penalty": [-2.1, 2.1, math.nan, None],
    "frequency_penalty": [-2.1, 2.1, "0"],
    "repetition_penalty": [0, -1, math.inf, math.nan],
    "logit_bias": [
        [1],
        "x",
        {-1: 1},
        {"a": 1},
        {1.5: 1},
        {1: 101},
        {1: math.nan},
        {True: 1},
        {1: None},
    ],
    "max_tokens": [0, -1, 1.5, True, 2**31],
    "min_tokens": [-1, 1.5, None, 17],
    "stop": [1, [1], [""], "", ["x", None], b"x", {"END": 1}],
    "stop_token_ids": [1, "12", [-1], [1.5], [True], [None], {5: 1}],
    "ignore_eos": [1, None, "yes"],
    "include_stop_str_in_output": [0, None],
    "logprobs": [-1, 1.5, True, "3"],
    "max_drafts": [-1, 1.5, True, "3"],
    "skip_special_tokens": [1, None],
    "detokenize": [0, None],
}


def test_the_tables_cover_every_field() -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == GOOD.keys() == BAD.keys()
    assert not names & REFUSED.keys()


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in GOOD.items() for v in vs])
def test_good_values(name: str, value: Any) -> None:
    SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in BAD.items() for v in vs])
def test_bad_values(name: str, value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [*sorted(BAD), "best_of", "wrong"])
def test_values_that_cannot_be_shown_are_refused(name: str) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    huge: tuple[Any, ...] = (10**5000, -(10**5000), deep, [10**5000], {"9" * 5000: 1})
    for value in huge:
        with pytest.raises(UsageError, match=name) as caught:
            SamplingParams(**{name: value})
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_fields_are_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: .*unsupported") as caught:
        SamplingParams(**dict[str, Any]({name: 1}))
    assert REFUSED[name] in str(caught.value)


def test_misspelt_fields_are_refused() -> None:
    values: dict[str, Any] = {"temprature": 1}
    with pytest.raises(UsageError, match="temprature"):
        SamplingParams(**values)


def test_stop_strings_need_text() -> None:
    with pytest.raises(UsageError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_lists_have_one_form() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[3, 3, 1], logit_bias={"7": 1})  # type: ignore[dict-item]
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("x",), (3, 1), {7: 1.0})
    plain = SamplingParams()
    assert (plain.stop, plain.stop_token_ids, plain.logit_bias) == ((), (), {})
    assert (plain.temperature, plain.max_tokens, plain.n) == (1.0, 16, 1)


def test_tiny_temperatures_are_greedy() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=9e-6).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"stop_token_ids": [REAL_VOCAB]}, "stop_token_ids"),
        ({"logit_bias": {REAL_VOCAB: 1.0}}, "logit_bias"),
        ({"stop_token_ids": [3, 4, 5, 6]}, "stop_token_ids"),
        ({"logit_bias": {3: 1.0, 4: 1.0, 5: 1.0, 6: 1.0}}, "logit_bias"),
        ({"logprobs": 4}, "logprobs"),
    ],
)
def test_engine_limits(values: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_params(SamplingParams(**values), build_spec())
    assert caught.value.field == field


def test_values_at_the_limits_are_taken() -> None:
    spec = build_spec()
    bias = {3: 1.0, 4: 1.0, REAL_VOCAB - 1: 1.0}
    check_params(SamplingParams(stop_token_ids=[3, 4, 5], logit_bias=bias, logprobs=3), spec)
    check_params(SamplingParams(stop_token_ids=[3, 4, 5, 6], ignore_eos=True), spec)
    check_params(SamplingParams(stop_token_ids=[3, 4, 5, EOS]), spec)


def test_stop_ids_join_the_models_own() -> None:
    spec = build_spec()
    assert stop_ids(SamplingParams(stop_token_ids=[9]), spec) == (9, EOS)
    assert stop_ids(SamplingParams(stop_token_ids=[EOS, 9]), spec) == (EOS, 9)
    assert stop_ids(SamplingParams(stop_token_ids=[9], ignore_eos=True), spec) == (9,)


def test_choice_seeds_differ_and_stay_in_range() -> None:
    seeds = [choice_seed(seed, index) for seed in (0, 1, 2**64 - 1) for index in range(100)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert [choice_seed(seed, 0) for seed in (0, 42)] == [0, 42]
