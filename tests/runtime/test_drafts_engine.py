"""Drafting through the engine loop over the fake step: the tokens, ends and logprobs of plain decoding.

The fake guesses well three times of four, so runs of every length are accepted; it reads every
place that a step would read, and what nobody holds is full of NaN.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime.test_drafts_scheduler import least_ring, specs
from runtime.test_serving import (
    assert_all_right,
    assert_right,
    cached,
    finish,
    finish_fairly,
    prompt_of,
    step,
)
from support.batch_rig import line, read_lines, write_lines
from support.fake_spec import GRID, build_spec, tiny_tokenizer
from support.fake_step import NON_FINITE_TOKEN, open_engine, run_oracle

from inkling_engine.artifacts.spec import EngineSpec
from inkling_engine.runtime.batch import BatchRunner
from inkling_engine.runtime.batch_progress import render
from inkling_engine.runtime.drafts import DraftStats, replay_steps
from inkling_engine.runtime.engine import Engine
from inkling_engine.runtime.errors import UsageError
from inkling_engine.runtime.requests import Request
from inkling_engine.runtime.sampling import SamplingParams
from inkling_engine.runtime.stats import StatsCollector, prometheus
from inkling_engine.runtime.trace import read_events, tracing

DEPTHS = (1, 2, 3, 4)
WAYS = ((1, False), (1, True), (2, False), (2, True))


def drafting(drafts: int, **sizes: Any) -> EngineSpec:
    """A spec that drafts, its ring as small as it may be."""
    given: dict[str, Any] = {"ring": least_ring(drafts), "results": 8, "snapshots": 8}
    return build_spec(drafts=drafts, **{**given, **sizes})


def plain(tokens: int, **more: Any) -> SamplingParams:
    """Greedy, to the budget."""
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)


def settled(engine: Engine) -> None:
    """Read what was begun ahead."""
    while engine._ahead:
        engine.step()


@pytest.mark.parametrize("drafts", DEPTHS)
def test_long_and_short_in_any_order(drafts: int) -> None:
    """Lengths 1 to 45 rising, falling and mixed in one engine: nobody inherits anything."""
    rising = [*range(1, 46, 4)]
    order = [*rising, *reversed(rising), *rising[::3], *rising[1::3], *rising[2::3]]
    for steps, overlap in WAYS:
        spec = drafting(drafts, running=2)
        engine = open_engine(spec, steps=min(steps, replay_steps(spec)), overlap=overlap)
        for length in order:
            request = engine.submit(prompt_of(length, 0, length), plain(9, logprobs=2))
            finish(engine, request)
            assert_right(engine, request)
        assert engine.drafts.tokens > engine.drafts.rounds, "some were accepted"


@pytest.mark.parametrize("drafts", DEPTHS)
def test_a_last_chunk_of_any_length_beside_a_row_that_drafts(drafts: int) -> None:
    """Of one token, of as many as a round has, of one more; in both orders."""
    for length, first in itertools.product(range(1, drafts + 3), (True, False)):
        engine = open_engine(drafting(drafts, extends=((8, 4),)))
        other = engine.submit(prompt_of(3, 0, 9), plain(40), priority=-first)
        while len(other.sequences[0].tokens) < 6:
            step(engine)
        request = engine.submit(prompt_of(8 + length), plain(12))
        finish(engine, other, request)
        for one in (other, request):
            assert_right(engine, one)


@pytest.mark.parametrize("drafts", DEPTHS)
def test_answers_are_prefixes(drafts: int) -> None:
    """A snapshot inside an accepted run is taken where it belongs, or not at all."""
    for (steps, overlap), length in itertools.product(WAYS, (3, 6, 7, 10)):
        spec = drafting(drafts)
        engine = open_engine(spec, steps=min(steps, replay_steps(spec)), overlap=overlap)
        prompt, hits = prompt_of(length, 0, length), []
        for turn in range(3):
            request = engine.submit(prompt, plain(12))
            finish(engine, request)
            assert_right(engine, request)
            hits.append(cached(request))
            prompt = [*prompt, *request.sequences[0].tokens, 20 + turn]
            if NON_FINITE_TOKEN in prompt:
                break
        assert all(hit % GRID == 0 for hit in hits)
        assert all(later > hit for hit, later in itertools.pairwise(hits)), "decoding leaves some"
        settled(engine)


def test_one_drafts_and_another_does_not() -> None:
    engine = open_engine(drafting(3))
    asked = (0, 1, 2, None, 7)
    requests = [engine.submit(prompt_of(5, 0, 3), plain(20, max_drafts=most)) for most in asked]
    finish(engine, *requests)
    for request in requests:
        assert_right(engine, request)
    alone = []
    for most in asked:
        engine = open_engine(drafting(3))
        request = engine.submit(prompt_of(5, 0, 3), plain(20, max_drafts=most))
        finish(engine, request)
        alone.append((engine.steps, [bool(count) for count in engine.drafts.proposed]))
    assert alone[0] == (20, [False] * 3)
    assert alone[1][1] == [True, False, False] and alone[2][1] == [True, True, False]
    assert alone[0][0] > alone[1][0] > alone[3][0] and alone[3] == alone[4]
    with pytest.raises(UsageError, match="max_drafts"):
        SamplingParams(max_drafts=-1)


def test_drafts_are_counted_up_to_the_end() -> None:
    stats = DraftStats.none(3)
    stats.add(0, 1, ended=False)
    stats.add(3, 0, ended=True)
    assert stats == DraftStats.none(3) and (stats.acceptance_length, stats.rates) == (1, [0] * 3)
    for drafted, tokens, ended in ((3, 2, False), (2, 3, False), (3, 2, True), (3, 1, True)):
        stats.add(drafted, tokens, ended=ended)
    assert (stats.rounds, stats.tokens) == (4, 8)
    assert (stats.proposed, stats.accepted) == ([3, 2, 1], [3, 1, 0])
    assert (stats.acceptance_length, stats.rates) == (2, [1, 0.5, 0])
    before = stats.copy()
    stats.add(1, 1, ended=False)
    assert stats.since(before) == DraftStats(1, 1, [1, 0, 0], [0, 0, 0])


@pytest.mark.parametrize("drafts", (1, 2, 3))
def test_what_drafts_gave_adds_up(drafts: int) -> None:
    """Whatever ends a request inside an accepted run: its rounds gave the tokens that it has."""
    whole = run_oracle(build_spec(), [50, 51], plain(30))[0]
    for at in range(1, 20):
        if whole[at] in whole[:at]:
            continue
        engine = open_engine(drafting(drafts))
        watch = StatsCollector(engine)
        request = engine.submit([50, 51], plain(30, stop_token_ids=[whole[at]]))
        finish(engine, request)
        assert request.sequences[0].tokens == whole[: at + 1]
        stats, found = watch.stats(), engine.drafts
        assert found.tokens == found.rounds + sum(found.accepted)
        assert stats.drafts == found and stats.generated_tokens == at + 1
        assert found.tokens == at, "all but the prompt's own token came from rounds with drafts"
        pairs = zip(found.accepted, found.proposed, strict=True)
        assert all(accepted <= proposed <= found.rounds for accepted, proposed in pairs)
        assert "drafts_accepted_total" in prometheus(stats)
        verify = [b for name, b in stats.buckets.items() if name.startswith("verify")]
        assert sum(b.tokens for b in verify) >= found.tokens
        assert all(b.token_padding >= 0 for b in verify)


@pytest.mark.parametrize(("steps", "overlap"), WAYS)
def test_a_stop_string_inside_an_accepted_run(steps: int, overlap: bool) -> None:
    with open_engine(build_spec(), tiny_tokenizer()) as engine:
        text = engine.generate([50, 51], plain(40))[0].choices[0].text
        stops = [text[at : at + 3] for at in range(4, len(text) - 3)]
        params = [plain(40, stop=stop, logprobs=1) for stop in stops]
        expected = [engine.generate([50, 51], one)[0].choices for one in params]
    with open_engine(drafting(3), tiny_tokenizer(), steps=steps, overlap=overlap) as engine:
        found = engine.generate([[50, 51]] * len(params), params)
        assert [done.choices for done in found] == expected
        deltas = list(engine.stream([50, 51], params[0]))
        assert "".join(delta.text for delta in deltas) == expected[0][0].text
        drafts = engine.drafts
        assert drafts.tokens == drafts.rounds + sum(drafts.accepted)


def test_a_batch_job_says_what_drafts_gave(tmp_path: Path) -> None:
    """And takes `max_drafts` as a field: the answers are the same without."""
    whole = [line(str(at), prompt=prompt_of(4, 0, at), max_tokens=9) for at in range(6)]
    some = [one | {"body": {**one["body"], "max_drafts": at % 3}} for at, one in enumerate(whole)]
    summaries, outputs = [], []
    for name, spec, lines in (
        ("plain", build_spec(), whole),
        ("all", drafting(2), whole),
        ("some", drafting(2), some),
    ):
        source, output = write_lines(tmp_path / name, lines), tmp_path / f"{name}.out"
        runner = BatchRunner(open_engine(spec, tiny_tokenizer()))
        summaries.append(runner.run(source, output))
        outputs.append([one["response"]["body"]["choices"] for one in read_lines(output)])
    assert outputs[0] == outputs[1] == outputs[2]
    without, everything, less = summaries
    assert "drafts" not in without
    drafts = everything["drafts"]
    assert drafts["tokens"] == drafts["rounds"] + sum(drafts["accepted"])
    assert (
        0 < drafts["tokens"] + everything["requests"]["total"] <= everything["tokens"]["completion"]
    )
    assert less["drafts"]["proposed"] < drafts["proposed"]
    assert f"{drafts['acceptance_length']:.2f} tokens a round" in render(everything)


def test_a_trace_tells_of_drafts(tmp_path: Path) -> None:
    engine = open_engine(drafting(3))
    with tracing(engine, tmp_path / "run.json"):
        engine.generate([prompt_of(5), prompt_of(7)], plain(12))
    replays = [e["args"] for e in read_events(tmp_path / "run.json") if e.get("cat") == "replay"]
    assert sum(args["new_tokens"] for args in replays) == 24
    drafted = sum(args["drafted"] for args in replays)
    assert drafted >= sum(engine.drafts.proposed) >= sum(engine.drafts.accepted) > 0
    assert all(args["tokens"] + args["drafted"] <= args["bucket_tokens"] for args in replays)


def test_more_rounds_than_a_replay_may_have() -> None:
    """Of lines of the result ring, of page lines, of tokens between two grid points."""
    assert replay_steps(build_spec(results=64)) == 8
    assert replay_steps(build_spec(results=3)) == 3
    assert [replay_steps(drafting(k)) for k in DEPTHS] == [4, 2, 2, 1]


Event = tuple[str, int, int]


@settings(max_examples=80)
@given(
    spec=specs(),
    events=st.lists(
        st.tuples(
            st.sampled_from(("submit", "submit", "submit", "step", "abort")),
            st.integers(1, 50),
            st.integers(1, 30),
        ),
        max_size=30,
    ),
    steps=st.integers(1, 4),
    overlap=st.booleans(),
)
def test_any_traffic_in_tiny_pools_gives_solo_results(
    spec: EngineSpec, events: list[Event], steps: int, overlap: bool
) -> None:
    engine = open_engine(spec, steps=min(steps, replay_steps(spec)), overlap=overlap)
    requests = list[Request]()
    for kind, first, second in events:
        if kind == "submit":
            length = min(first, 63 - second)
            prompt = prompt_of(length, first * second % 40, second % 3)
            params = SamplingParams(
                seed=second,
                temperature=first % 3,
                max_tokens=second,
                n=1 + first % 2,
                logprobs=1,
                max_drafts=(None, None, 0, 1)[first % 4],
            )
            requests.append(engine.submit(prompt, params, priority=first % 3))
        elif kind == "abort" and requests:
            engine.abort(requests[first % len(requests)])
        else:
            step(engine)
    finish_fairly(engine, requests)
    settled(engine)
    assert_all_right(engine, requests)
