"""Sampling through the runtime and the exported step, recomputed in plain Python.

Logits come from the ops' references by teacher forcing; everything after them (bias, penalties,
masks, stops, budgets, seeds) is computed here a second time, from lists.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.engines import open_engine
from support.rig import Model, StepCode, record, reference_step

from inkling_engine.runtime.engine import Engine
from inkling_engine.runtime.requests import Choice
from inkling_engine.runtime.sampling import SamplingParams, choice_seed

pytestmark = pytest.mark.usefixtures("native_library")

REAL, PADDED, MARGIN = 151, 160, 1e-3
CHOOSE = random.Random(9)
PROMPTS = [CHOOSE.choices(range(3, REAL), k=n) for n in (5, 1, 19, 12)]


@pytest.fixture
def engine(served: Model, exported: StepCode) -> Engine:
    """An engine over the exported step of the random model."""
    return open_engine(served, exported)[0]


def sampling(**values: Any) -> SamplingParams:
    """Parameters with short, complete outputs unless told otherwise."""
    return SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "logprobs": 3} | values)


def one(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> Choice:
    """The single choice of a prompt that runs alone."""
    return engine.generate(list(prompt), params)[0].choices[0]


def changed(model: Model, **tensors: torch.Tensor) -> Model:
    """The model with some weights replaced; dots in names are written as two underscores."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return Model(model.spec, {**model.weights, **named})


def test_a_seed_alone_decides_the_draws(engine: Engine) -> None:
    """Alone, beside unseeded, seeded and greedy neighbours, in any slot, row and bucket."""
    mine = sampling(seed=42, temperature=1.3, top_p=0.95, top_k=60)
    alone = one(engine, PROMPTS[0], mine)
    assert len(set(alone.token_ids)) > 3
    neighbours = [
        sampling(),
        sampling(seed=42),
        sampling(seed=7, min_p=0.1),
        sampling(temperature=0),
    ]
    for count in (1, 2, 7):
        for place in range(0, count + 1, 3):
            prompts = [PROMPTS[i % 4] for i in range(count)]
            params = [neighbours[(count + i) % 4] for i in range(count)]
            prompts.insert(place, PROMPTS[0])
            params.insert(place, mine)
            found = engine.generate(prompts, params)[place].choices[0]
            assert found == alone, f"row {place} of {count + 1}"


def test_choices_have_the_seeds_that_are_documented(engine: Engine) -> None:
    several = engine.generate(PROMPTS[2], sampling(n=4, seed=5))[0].choices
    for index, choice in enumerate(several):
        alone = one(engine, PROMPTS[2], sampling(seed=choice_seed(5, index)))
        assert (choice.token_ids, choice.logprobs) == (alone.token_ids, alone.logprobs)
    assert len({choice.token_ids for choice in several}) == 4
    greedy = engine.generate(PROMPTS[2], sampling(n=3, temperature=0))[0].choices
    assert len({choice.token_ids for choice in greedy}) == 1


def test_requests_without_a_seed_differ(engine: Engine) -> None:
    found = {one(engine, PROMPTS[0], sampling()).token_ids for _ in range(4)}
    assert len(found) == 4


def test_many_choices_are_spread_over_the_real_vocabulary(
    served: Model, exported: StepCode
) -> None:
    """On a flat distribution 604 choices of one seed are uniform over 151 ids (chi-square)."""
    flat = changed(served, head=torch.zeros_like(served.weights["head"]))
    engine, _ = open_engine(flat, exported)
    params = sampling(n=604, seed=3, max_tokens=1, logprobs=0)
    counts = [0] * REAL
    for choice in engine.generate([7], params)[0].choices:
        counts[choice.token_ids[0]] += 1
        assert choice.cumulative_logprob == pytest.approx(-math.log(REAL), abs=1e-6)
    assert sum((count - 4) ** 2 / 4 for count in counts) < 220, "p < 2e-4 for 150 degrees"


def test_ids_beyond_the_real_vocabulary_are_never_emitted(
    served: Model, exported: StepCode
) -> None:
    """Rows 151 to 159 of the head are the largest: no draw, no alternative, no share of the sum."""
    head = served.weights["head"].clone()
    head[REAL:] = 1e3 * head[:9]
    engine, _ = open_engine(changed(served, head=head), exported)
    clean, _ = open_engine(served, exported)
    for values in (
        {"temperature": 0},
        {"seed": 1, "temperature": 2.0},
        {"seed": 2, "top_k": PADDED},
    ):
        params = sampling(**values, logprobs=served.spec.limits.top_logprobs)
        choice = one(engine, PROMPTS[3], params)
        assert choice == one(clean, PROMPTS[3], params)
        assert choice.logprobs is not None
        for item in choice.logprobs:
            assert item.token_id < REAL and all(token < REAL for token, _ in item.top)


def processed(
    logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> list[float]:
    """Logits as the sampler must see them after `output`, element by element."""
    values = list(logits)
    for token, bias in (params.logit_bias or {}).items():
        values[token] += bias
    if len(output) < params.min_tokens:
        for token in params.stop_token_ids or ():
            values[token] = -math.inf
    for token in range(len(values)):
        count = output.count(token)
        if count or token in prompt:
            factor = params.repetition_penalty
            values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        values[token] -= params.frequency_penalty * count
        values[token] -= params.presence_penalty * (count > 0)
    return values


def forced_logits(model: Model, prompt: Sequence[int], output: Sequence[int]) -> list[list[float]]:
    """The references' logits before each token of `output`."""
    trace = record(model, [*prompt, *output[:-1]], run=reference_step)
    return [row.tolist() for row in trace.logits[len(prompt) - 1 :]]


PENALTIES: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.7},
    "frequency": {"frequency_penalty": 0.9},
    "negative": {"frequency_penalty": -0.6, "presence_penalty": -0.5},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": {11: 2.5, 90: -100.0, 150: 1.5}},
    "stops": {"min_tokens": 9, "stop_token_ids": [11, 12, 13]},
    "all": {
        "presence_penalty": 0.4,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
        "logit_bias": {4: 1.5, 9: 1.0},
    },
}


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_are_those_of_a_plain_recomputation(
    served: Model, engine: Engine, name: str
) -> None:
    """Greedy, the prompt longer than a chunk, beside other requests."""
    params = sampling(temperature=0, max_tokens=20, **PENALTIES[name])
    prompts = [PROMPTS[2], PROMPTS[0], PROMPTS[2][:7]]
    others = [sampling(seed=i) for i in range(2)]
    found = list(engine.generate(prompts, [params, *others])[0].choices[0].token_ids)
    plain = list(one(engine, PROMPTS[2], sampling(temperature=0, max_tokens=20)).token_ids)
    assert name == "stops" or found != plain, "the penalty is strong enough to matter"
    compared = 0
    for at, row in enumerate(forced_logits(served, PROMPTS[2], found)):
        values = processed(row, PROMPTS[2], found[:at], params)
        best, second = sorted(values, reverse=True)[:2]
        if best - second > MARGIN:
            assert values.index(best) == found[at], f"token {at}"
            compared += 1
    assert compared >= len(found) - 2


@pytest.mark.parametrize("values", [{"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.4}, {"top_k": 1}])
def test_draws_stay_in_the_recomputed_set(
    served: Model, engine: Engine, values: dict[str, Any]
) -> None:
    params = sampling(seed=8, temperature=1.5, max_tokens=25, **values)
    found = one(engine, PROMPTS[0], params).token_ids
    for at, row in enumerate(forced_logits(served, PROMPTS[0], found)):
        shares = [math.exp(value / 1.5) for value in row]
        total, order = sum(shares), sorted(range(REAL), key=lambda token: -shares[token])
        better = sum(shares[token] for token in order[: order.index(found[at])]) / total
        assert order.index(found[at]) < (params.top_k or REAL)
        assert params.top_p == 1 or better < params.top_p + MARGIN
        assert shares[found[at]] >= params.min_p * shares[order[0]] * (1 - MARGIN)


def test_logprobs_are_those_of_the_raw_logits(served: Model, engine: Engine) -> None:
    """Before bias, penalties and temperature, over the real vocabulary."""
    params = sampling(seed=1, temperature=0.7, repetition_penalty=1.5, logit_bias={5: 3.0})
    choice = one(engine, PROMPTS[3], params)
    assert choice.logprobs is not None
    rows = forced_logits(served, PROMPTS[3], choice.token_ids)
    for row, item in zip(rows, choice.logprobs, strict=True):
        normaliser = math.log(sum(math.exp(value) for value in row))
        assert item.logprob == pytest.approx(row[item.token_id] - normaliser, abs=1e-4)
        best = sorted(row, reverse=True)[:3]
        assert [v for _, v in item.top] == pytest.approx([v - normaliser for v in best], abs=1e-4)
    total = sum(item.logprob for item in choice.logprobs)
    assert choice.cumulative_logprob == pytest.approx(total)


def test_stops_and_budgets(engine: Engine) -> None:
    """Every stop position and budget cuts the same greedy output."""
    whole = one(engine, PROMPTS[2], sampling(temperature=0, max_tokens=24)).token_ids[:20]
    for count in (1, 2, 19):
        cut = one(engine, PROMPTS[2], sampling(temperature=0, max_tokens=count))
        assert (cut.token_ids, cut.finish_reason) == (whole[:count], "length")
    for stop in dict.fromkeys(whole):
        first = whole.index(stop)
        params = sampling(temperature=0, max_tokens=24, stop_token_ids=[stop])
        cut = one(engine, PROMPTS[2], params)
        assert cut.token_ids == whole[: first + 1]
        assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
        late = sampling(temperature=0, max_tokens=24, stop_token_ids=[stop], min_tokens=first + 2)
        kept = one(engine, PROMPTS[2], late)
        assert stop not in kept.token_ids[: first + 1] and len(kept.token_ids) > first + 1
        assert kept.token_ids[:first] == whole[:first]


def test_non_finite_logits_end_their_own_request_alone(
    served: Model, exported: StepCode, engine: Engine
) -> None:
    """A token whose embedding is NaN: in a prompt, or sampled on the way; then the slot is reused."""
    greedy = sampling(temperature=0)
    clean = [one(engine, prompt, greedy) for prompt in PROMPTS]
    bad = clean[3].token_ids[4]
    at = clean[3].token_ids.index(bad)
    embed = served.weights["embed"].clone()
    embed[bad] = torch.nan
    broken, _ = open_engine(changed(served, embed=embed), exported)
    prompts = [*PROMPTS, [1, bad, 2], [*PROMPTS[2], bad]]
    found = [done.choices[0] for done in broken.generate(prompts, greedy)]
    for prompt, choice in zip(prompts[4:], found[4:], strict=True):
        assert (choice.token_ids, choice.finish_reason) == ((), "error"), prompt
    assert found[3].token_ids == clean[3].token_ids[: at + 1]
    assert found[3].finish_reason == "error"
    unharmed = 0
    for prompt, choice, wanted in zip(PROMPTS, found, clean, strict=False):
        if bad not in prompt and bad not in wanted.token_ids:
            assert choice == wanted
            assert one(broken, prompt, greedy) == wanted, "a slot that held NaN is as good as new"
            unharmed += 1
    assert unharmed >= 2


def test_an_expert_that_overflows_ends_only_who_meets_it(
    served: Model, exported: StepCode, engine: Engine
) -> None:
    """Whoever is routed to an expert with an infinite channel ends with an error, token 0 is no way
    out; all others have the bits of the clean model."""
    params = sampling(temperature=0, max_tokens=3)
    down = served.weights["layers.4.experts_w2"].clone()
    down[2, :, 0] = torch.inf
    broken, _ = open_engine(changed(served, layers__4__experts_w2=down), exported)
    prompts = [[token] for token in range(REAL)]
    wanted = [done.choices[0] for done in engine.generate(prompts, params)]
    found = [done.choices[0] for done in broken.generate(prompts, params)]
    ended = [i for i, choice in enumerate(found) if choice.finish_reason == "error"]
    assert 10 < len(ended) < REAL - 10
    for i, (choice, clean) in enumerate(zip(found, wanted, strict=True)):
        if i in ended:
            assert choice.token_ids == clean.token_ids[: len(choice.token_ids)]
        else:
            assert choice == clean
