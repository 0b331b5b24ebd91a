"""Counts, padding, latencies and the Prometheus text of an observed engine, over the fake step."""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_spec import build_spec
from support.fake_step import NON_FINITE_TOKEN, open_engine

from inkling_engine.runtime import collect, requests, stats
from inkling_engine.runtime.engine import Engine
from inkling_engine.runtime.sampling import SamplingParams
from inkling_engine.runtime.stats import Histogram, StatsCollector, by_state, prometheus

LINE = re.compile(r'([a-z_]+)(\{[a-z]+="[^"]+"(,[a-z]+="[^"]+")*\})? (\S+)')


def greedy(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with open_engine(build_spec(results=16)) as engine:
        yield engine


def test_counts_of_a_small_run(engine: Engine) -> None:
    watch = StatsCollector(engine)
    engine.generate([[30] * 20, [31] * 3, [32, NON_FINITE_TOKEN]], greedy(5))
    engine.abort(engine.submit([40], greedy(5)))
    left = engine.submit([41], greedy(5, n=2))
    seen = watch.stats()
    assert (seen.waiting, seen.running) == (2, 0)
    assert seen.finished == {"length": 2, "error": 1, "abort": 1}
    assert (seen.prompt_tokens, seen.generated_tokens) == (25, 10)
    assert sum(bucket.steps for bucket in seen.buckets.values()) == engine.steps
    assert (seen.first_token.count, seen.per_token.count) == (2, 2)
    assert (seen.prefix_hits, seen.prefix_tokens, seen.preemptions) == (0, 0, 0)
    assert seen.whole_logits == (0, 0)
    engine.step()
    assert (watch.stats().running, watch.stats().pools["slots"].live) == (2, 2)
    assert (seen.running, seen.pools["slots"].live) == (0, 0), "a snapshot does not change"
    engine.abort(left)
    assert watch.stats().finished["abort"] == 3


def test_rows_and_padding_by_bucket(engine: Engine) -> None:
    watch = StatsCollector(engine)
    engine.generate([[30] * 20, [31] * 3, [32] * 2], greedy(3))
    for name, bucket in watch.stats().buckets.items():
        (shape,) = [p.bucket for p in engine.manifest.programs if p.name == name]
        assert bucket.rows + bucket.row_padding == shape.rows * bucket.steps
        assert bucket.tokens + bucket.token_padding == shape.tokens * bucket.steps
    first = watch.stats().buckets["extend-t00016-r0004"]
    assert (first.rows, first.row_padding, first.tokens, first.token_padding) == (4, 4, 25, 7)
    decode = watch.stats().buckets["decode-r0004"]
    assert (decode.rows, decode.row_padding) == (3 * decode.replays, decode.replays)


def test_steps_of_one_replay_are_all_counted() -> None:
    with open_engine(build_spec(results=16), steps=5) as engine:
        watch = StatsCollector(engine)
        engine.generate([30, 31], greedy(11))
        decode = watch.stats().buckets["decode-r0001"]
        assert (decode.replays, decode.steps, decode.rows) == (2, 10, 10)


def test_replays_that_overlap_are_timed_one_after_the_other() -> None:
    with open_engine(build_spec(), overlap=True) as engine:
        watch = StatsCollector(engine)
        engine.generate([[30] * 20, [31] * 3], greedy(20))
        seen = watch.stats()
        assert 0 < sum(bucket.seconds for bucket in seen.buckets.values()) <= seen.seconds


def test_latencies_are_those_of_the_clock(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    for module in (collect, requests, stats):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    watch = StatsCollector(engine)
    request = engine.submit([30, 31], greedy(5))
    for seconds in (3.0, 1.0, 2.0, 1.0, 2.0):
        now[0] += seconds
        engine.step()
    assert request.finished
    seen = watch.stats()
    assert (seen.seconds, seen.first_token.seconds, seen.per_token.seconds) == (9.0, 3.0, 1.5)
    assert seen.per_token.quantiles == {q: pytest.approx(1.5, rel=0.01) for q in stats.QUANTILES}


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=200))
def test_quantiles_are_right_to_a_hundredth(values: list[float]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    found = histogram.latency()
    assert found.count == len(values) and found.seconds == pytest.approx(sum(values))
    assert found.quantiles[0.5] == pytest.approx(statistics.median_low(values), rel=0.0101)
    highest = sorted(values)[-(-99 * len(values) // 100) - 1]
    assert found.quantiles[0.99] == pytest.approx(highest, rel=0.0101)


def test_hits_are_counted() -> None:
    with open_engine(build_spec(snapshots=4)) as engine:
        watch, prompt = StatsCollector(engine), list(range(30, 50))
        for _ in range(3):
            engine.generate(prompt, greedy(2))
        seen = watch.stats()
    assert (seen.prefix_hits, seen.prefix_tokens, seen.prompt_tokens) == (2, 32, 28)
    assert seen.pools["full_pages"].pinned > 0


def test_what_was_aborted_is_forgotten(engine: Engine) -> None:
    watch, draw = StatsCollector(engine), random.Random(0)
    for _ in range(60):
        request = engine.submit([draw.randrange(14, 100)], greedy(9))
        engine.step()
        engine.abort(request)
    assert len(watch._began) <= 2 * engine.spec.max_running
    assert watch.stats().per_token.count == 0


def test_the_text_is_prometheus(engine: Engine) -> None:
    watch = StatsCollector(engine)
    empty = prometheus(watch.stats())
    engine.generate([[30] * 20, [31] * 3], greedy(5))
    text = prometheus(watch.stats())
    values: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name, kinds[name] = line.split()[2], line.split()[3]
        elif not line.startswith("# HELP "):
            match = LINE.fullmatch(line)
            assert match, line
            assert match[1].removesuffix("_sum").removesuffix("_count") in kinds, line
            values[match[1] + (match[2] or "")] = float(match[4])
    assert text.endswith("\n") and all(name.startswith("inkling_engine_") for name in kinds)
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in kinds.items())
    assert values['inkling_engine_requests_finished_total{reason="length"}'] == 2
    assert values["inkling_engine_generation_tokens_total"] == 10
    place = 'inkling_engine_token_places_total{bucket="extend-t00016-r0004",kind="used"}'
    assert values[place] == 16
    assert values["inkling_engine_time_to_first_token_seconds_count"] == 2
    assert values['inkling_engine_time_to_first_token_seconds{quantile="0.5"}'] > 0
    assert values['inkling_engine_pool{pool="slots",state="free"}'] == engine.spec.max_running
    assert kinds.keys() == {line.split()[2] for line in empty.splitlines() if "# TYPE" in line}


def test_states_add_up(engine: Engine) -> None:
    engine.submit([30] * 20, greedy(5))
    engine.step()
    for account in engine.scheduler.accounting().values():
        assert sum(by_state(account).values()) == account.total
    assert by_state(engine.scheduler.accounting()["full_pages"])["live"] > 0
