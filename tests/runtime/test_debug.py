"""The debug interface over the fake step, whose tokens show every place that was read: scripts,
poison, digests, accounting and the self-check."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_spec import build_spec
from support.fake_step import open_engine, run_oracle

from inkling_engine.artifacts.spec import Bucket
from inkling_engine.runtime import debug
from inkling_engine.runtime.engine import Engine
from inkling_engine.runtime.requests import Request
from inkling_engine.runtime.sampling import SamplingParams
from inkling_engine.runtime.script import Script

SPEC = build_spec(results=16, full_pages=80, window_pages=60)


def greedy(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)


def assert_right(request: Request) -> None:
    tokens, reason, _ = run_oracle(SPEC, request.prompt, request.params)
    (choice,) = request.completion().choices
    assert (list(choice.token_ids), choice.finish_reason) == (tokens, reason)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with open_engine(SPEC) as engine:
        yield engine


def test_a_script_runs_what_it_says(engine: Engine) -> None:
    a, b = engine.submit([30] * 20, greedy(4)), engine.submit([31] * 5, greedy(3))
    seen: list[tuple[str, list[int], list[int]]] = []
    engine.observers.append(
        lambda plan, *_: seen.append((plan.bucket.kind, list(plan.counts), plan.slots))
    )
    with Script(engine) as script:
        script.step((b, 2))
        script.step((a, 3), (b, 1))
        script.step((b, 2), (a, 13))
        script.step((b, 1), (a, 4))
        assert [len(r.sequences[0].tokens) for r in (a, b)] == [1, 2]
        script.step((a, 1), (b, 1))
        assert engine.step() == [], "without a line nothing runs"
    slots = {name: r.sequences[0].slot for name, r in (("a", a), ("b", b))}
    assert [(kind, counts) for kind, counts, _ in seen] == [
        ("extend", [2]),
        ("extend", [3, 1]),
        ("extend", [2, 13]),
        ("extend", [1, 4]),
        ("decode", [1, 1]),
    ]
    assert [line for *_, line in seen][1:3] == [[slots["a"], slots["b"]], [slots["b"], slots["a"]]]
    assert b.finished and not a.finished
    while not a.finished:
        engine.step()
    assert_right(a)
    assert_right(b)
    debug.check(engine)


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), overlap=st.booleans())
def test_any_script_gives_solo_results(seed: int, overlap: bool) -> None:
    draw = random.Random(seed)
    with open_engine(SPEC, steps=4, overlap=overlap) as engine:
        requests = [
            engine.submit(
                [draw.randrange(14, 150)] * draw.randint(1, 40), greedy(draw.randint(1, 9))
            )
            for _ in range(4)
        ]
        engine.step()  # begins one ahead, in `overlap`
        with Script(engine) as script:
            for _ in range(12):
                rows, room = [], 16
                for request in draw.sample(requests, 3):
                    (sequence,) = request.sequences
                    left = len(sequence.prompt) - sequence.length
                    if sequence.length < sequence.total - 1 and not request.finished:
                        rows.append((request, min(draw.randint(1, 5), left) if left > 0 else 1))
                if rows and sum(count for _, count in rows) <= room:
                    script.step(*rows)
        engine.generate([50], greedy(3))
        while engine.scheduler.unfinished():
            engine.step()
        for request in requests:
            assert_right(request)
        debug.check(engine)


def test_a_script_chooses_buckets_and_steps() -> None:
    with open_engine(SPEC, steps=5) as engine:
        a = engine.submit([30, 31], greedy(12))
        buckets: list[tuple[Bucket, int]] = []
        engine.observers.append(lambda plan, *_: buckets.append((plan.bucket, plan.steps)))
        extend = Bucket(kind="extend", rows=4, tokens=16)
        decode = Bucket(kind="decode", rows=4, tokens=4)
        with Script(engine) as script:
            script.step((a, 2), bucket=extend)
            script.step((a.sequences[0], 1), bucket=decode, steps=5)
            script.step((a, 1), bucket=extend)
            script.step((a, 1))
            assert len(a.sequences[0].tokens) == 8
            with pytest.raises(AssertionError, match="only decode"):
                script.step((a, 1), bucket=extend, steps=2)
        assert buckets[:3] == [(extend, 1), (decode, 5), (extend, 1)]
        assert buckets[3][0].rows == 1
        while not a.finished:
            engine.step()
        assert_right(a)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([("a", 21)], "no bucket"),
        ([("a", 9), ("b", 6)], "of 6 prompt tokens"),
        ([("c", 2)], "decodes takes 1 token"),
        ([("n", 1)], "name the sequence"),
        ([("d", 1)], "has ended"),
    ],
)
def test_impossible_scripts(engine: Engine, rows: list[tuple[str, int]], words: str) -> None:
    requests = {
        "c": engine.submit([32], greedy(9)),
        "d": engine.submit([32], greedy(1)),
    }
    engine.step()
    requests["a"], requests["b"] = engine.submit([30] * 20, greedy(4)), engine.submit([31] * 5)
    requests["n"] = engine.submit([33], greedy(4, n=2))
    with Script(engine) as script, pytest.raises(AssertionError, match=words):
        script.step(*((requests[name], count) for name, count in rows))


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), overlap=st.booleans())
def test_all_that_was_released_may_be_poisoned(seed: int, overlap: bool) -> None:
    draw = random.Random(seed)
    with open_engine(SPEC, overlap=overlap) as engine:
        debug.poison_releases(engine)
        requests = []
        for _ in range(12):
            prompt = [draw.randrange(14, 150) for _ in range(draw.randint(1, 40))]
            requests.append(engine.submit(prompt, greedy(draw.randint(1, 12))))
            engine.step()
        while engine.scheduler.unfinished():
            engine.step()
        for request in requests:
            assert_right(request)
        debug.check(engine)


def test_poison_reaches_what_is_free_and_nothing_else(engine: Engine) -> None:
    request = engine.submit([30] * 9, greedy(4))
    engine.step()
    sequence = request.sequences[0]
    before = debug.digest(engine, sequence)
    debug.poison_free(engine)
    assert debug.digest(engine, sequence) == before
    pools, held = engine.pool.tensors, {sequence.slot}
    for slot in range(engine.spec.pools.slots):
        assert bool(pools["conv_attn"][:, slot].isnan().all()) == (slot not in held)
    for page in range(engine.spec.pools.full_pages):
        poisoned = bool(pools["kv_full"][:, page].isnan().all())
        assert poisoned == (page not in sequence.full_pages)


def test_a_poisoned_place_that_is_read_shows(engine: Engine) -> None:
    request = engine.submit([30] * 9, greedy(4))
    engine.step()
    engine.pool.poison_page("full", request.sequences[0].full_pages[0])
    with pytest.raises(AssertionError, match="poisoned|window"):
        engine.step()


def test_digests_name_a_state_wherever_it_lies(engine: Engine) -> None:
    prompt = list(range(30, 50))
    a, b, c = (engine.submit(p, greedy(9)) for p in (prompt, prompt, [*prompt[:-1], 90]))
    with Script(engine) as script:
        script.step((a, 16))
        script.step((b, 7), (c, 9))
        script.step((b, 2), (a, 4), (c, 7))
        script.step((b, 11), (c, 4))
        states = [debug.digest(engine, request.sequences[0]) for request in (a, b, c)]
        assert states[0] == states[1] != states[2]
        script.step((a, 1))
        assert debug.digest(engine, a.sequences[0]) != states[0]
        script.step((b, 1))
    assert debug.digest(engine, b.sequences[0]) == debug.digest(engine, a.sequences[0])
    assert engine.pool.digest_slot(a.sequences[0].slot) == engine.pool.digest_slot(
        b.sequences[0].slot
    )


@pytest.mark.parametrize("at", [12, 13, 18, 19])
def test_a_digest_covers_the_window_and_no_more(engine: Engine, at: int) -> None:
    request = engine.submit([30] * 20, greedy(9))
    engine.step()
    engine.step()
    sequence = request.sequences[0]
    before, first = debug.digest(engine, sequence), sequence.window_first
    assert sequence.length == 20
    page = sequence.window_pages[at // 4 - first]
    engine.pool.tensors["kv_window"][:, page, :, :, at % 4] += 1
    assert (debug.digest(engine, sequence) != before) == (at >= 20 - (8 - 1))


def test_a_digest_is_of_the_last_conv_inputs_in_a_ring_of_any_length(engine: Engine) -> None:
    """And of the target's: an engine that drafts has longer rings and more of them."""
    request = engine.submit([30] * 20, greedy(9))
    engine.step()
    engine.step()
    (sequence,), tensors = request.sequences, engine.pool.tensors
    before, ring = debug.digest(engine, sequence), tensors["conv_attn"]
    longer = torch.full((*ring.shape[:2], 7, ring.shape[3]), torch.nan)
    last = torch.arange(sequence.length - 3, sequence.length)
    longer[:, sequence.slot, last % 7] = ring[:, sequence.slot, last % 3]
    tensors |= {"conv_attn": longer, "conv_draft_attn": longer.clone()}
    assert debug.digest(engine, sequence) == before
    longer[:, sequence.slot, last[0] % 7] += 1
    assert debug.digest(engine, sequence) != before


def test_accounting_has_every_state(engine: Engine) -> None:
    engine.submit([30] * 9, greedy(4))
    engine.step()
    assert debug.accounting(engine)["slots"] == {"free": 3, "live": 1, "pinned": 0}
    assert debug.accounting(engine)["full_pages"]["live"] == 3


@pytest.mark.parametrize("pool", ["slots", "full_pages", "window_pages"])
@pytest.mark.parametrize("fault", ["lost", "twice", "held"])
def test_the_check_finds_what_is_wrong(engine: Engine, pool: str, fault: str) -> None:
    request = engine.submit([30] * 9, greedy(4))
    engine.step()
    debug.check(engine)
    free, (sequence,) = getattr(engine.scheduler.holdings, pool).free, request.sequences
    if fault == "lost":
        free.pop()
    elif fault == "twice":
        free[0] = free[1]
    else:
        free[0] = sequence.slot if pool == "slots" else getattr(sequence, pool)[0]
    with pytest.raises(AssertionError, match=pool):
        debug.check(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_check_at_rest_finds_what_was_not_given_back(overlap: bool) -> None:
    with open_engine(SPEC, overlap=overlap) as engine:
        engine.generate([30] * 9, greedy(4))
        debug.check(engine)
        engine.scheduler.holdings.full_pages.take()
        with pytest.raises(AssertionError, match="full_pages"):
            debug.check(engine)
