"""Prefix hits and preemption through the engine loop over the fake step.

The fake reads every place that a step would read, so a wrong page, window or snapshot changes
tokens, and what nobody holds is full of NaN. Every request must give what it gives alone.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_spec import GRID, build_spec
from support.fake_step import open_engine, run_oracle

from inkling_engine.runtime.engine import Engine
from inkling_engine.runtime.requests import Request, Sequence
from inkling_engine.runtime.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def poison_free(engine: Engine) -> None:
    """Fill everything that nobody holds, slot 0 and page 0 included."""
    holdings = engine.scheduler.holdings
    for slot in (0, *holdings.slots.free, *holdings.prefix.slots.free):
        engine.pool.poison_slot(slot)
    for page in (0, *holdings.full_pages.free):
        engine.pool.poison_page("full", page)
    for page in (0, *holdings.window_pages.free):
        engine.pool.poison_page("window", page)


def step(engine: Engine) -> None:
    """A step over poison, and a look at the balance."""
    poison_free(engine)
    engine.step()
    engine.scheduler.check()


def finish(engine: Engine, *requests: Request) -> None:
    """Step until all have ended."""
    while not all(request.finished for request in requests):
        step(engine)


def finish_fairly(engine: Engine, requests: list[Request]) -> None:
    """`finish`, and whoever runs with the best rank gets on in every round of few replays."""
    still, last = 0, tuple[Sequence | None, int]((None, 0))
    while not all(request.finished for request in requests):
        step(engine)
        running = engine.scheduler.prefilling + engine.scheduler.decoding
        best = min(running, key=lambda sequence: sequence.rank, default=None)
        now = (best, best.length if best else 0)
        still, last = still + 1 if best and now == last else 0, now
        assert still < 8, "the best one waits"


def assert_right(engine: Engine, request: Request) -> None:
    """Every choice is what it would have been alone; one that was cut short is its beginning."""
    for choice in request.completion().choices:
        params = request.params
        tokens, reason, logprobs = run_oracle(engine.spec, request.prompt, params, choice.index)
        found = list(choice.token_ids)
        if choice.finish_reason in ("abort", "deadline"):
            assert found == tokens[: len(found)]
            continue
        assert (found, choice.finish_reason) == (tokens, reason)
        if choice.logprobs is not None:
            assert [item.logprob for item in choice.logprobs] == logprobs


def assert_all_right(engine: Engine, requests: list[Request]) -> None:
    """Every answer is the request's own, nothing is held, and the cache can let go of the rest."""
    for request in requests:
        assert_right(engine, request)
    for account in engine.scheduler.accounting().values():
        assert account.live == 0
    prefix = engine.scheduler.holdings.prefix
    assert all(s.block for s in (*prefix._fresh, *prefix._used)), "what never came is given up"
    prefix.clear()
    for account in engine.scheduler.accounting().values():
        assert account.free == account.total, "the cache gives all of it back"


def cached(request: Request) -> int:
    """Tokens of the hit that the request began with."""
    return request.sequences[0].cached


def prompt_of(length: int, branch: int | None = None, tail: int = 0) -> list[int]:
    """A prompt; from `branch` on it is one of its own, `tail`."""
    ids = random.Random(1).choices(range(14, 150), k=length)
    own = random.Random(100 + tail).choices(range(14, 150), k=length)
    return ids if branch is None else ids[:branch] + own[branch:]


def test_a_hit_is_the_longest_grid_point_that_leaves_a_token() -> None:
    spec = build_spec(snapshots=8, full_pages=60, window_pages=40)
    for length in range(1, 41):
        engine = open_engine(spec)
        prompt = prompt_of(length)
        first = engine.submit(prompt, GREEDY)
        finish(engine, first)
        second = engine.submit(prompt, GREEDY)
        finish(engine, second)
        assert cached(first) == 0
        assert cached(second) == (length - 1) // GRID * GRID
        for request in (first, second):
            assert_right(engine, request)


def test_branch_points_hit_the_last_common_grid_point() -> None:
    spec = build_spec(snapshots=8, full_pages=60, window_pages=40)
    for branch in range(1, 25):
        engine = open_engine(spec)
        requests = [engine.submit(prompt_of(30, branch, 1), GREEDY)]
        finish(engine, *requests)
        for tail in (2, 3):
            requests.append(engine.submit(prompt_of(30, branch, tail), GREEDY))
            finish(engine, requests[-1])
            assert cached(requests[-1]) == branch // GRID * GRID
        for request in requests:
            assert_right(engine, request)


def test_a_conversation_goes_on_from_its_answer() -> None:
    """What was decoded is cached too, up to the last grid point with a token after it."""
    spec = build_spec(snapshots=8, full_pages=60, window_pages=40)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for steps, overlap in ((1, False), (1, True), (4, False), (8, True)):
        engine = open_engine(build_spec(snapshots=8, results=32), steps=steps, overlap=overlap)
        first = engine.submit(prompt_of(10), params)
        finish(engine, first)
        answer = run_oracle(spec, prompt_of(10), params)[0]
        second = engine.submit(prompt_of(10) + answer + [30, 31], GREEDY)
        finish(engine, second)
        assert cached(second) in (16, 24)
        assert_right(engine, first)
        assert_right(engine, second)


def test_prompts_submitted_together_share_only_what_is_computed() -> None:
    spec = build_spec(snapshots=8, full_pages=60, window_pages=40)
    engine = open_engine(spec)
    requests = [engine.submit(prompt_of(24), GREEDY) for _ in range(5)]
    finish(engine, *requests)
    for request in requests:
        assert_right(engine, request)
    assert list(map(cached, requests)) == [0, 16, 16, 16, 16]


def test_without_the_cache_nothing_is_kept() -> None:
    engine = open_engine(build_spec(snapshots=8), prefix_cache=False)
    for _ in range(2):
        request = engine.submit(prompt_of(30), GREEDY)
        finish(engine, request)
        assert cached(request) == 0
        assert_right(engine, request)
    for account in engine.scheduler.accounting().values():
        assert account.free == account.total


def test_penalties_count_all_that_they_are_fed() -> None:
    """Tokens of a hit are not fed, so what counts them starts cold; what was sampled, always."""
    engine = open_engine(build_spec(snapshots=8))
    finish(engine, engine.submit(prompt_of(30), GREEDY))
    for params, hit in (
        (SamplingParams(max_tokens=2, repetition_penalty=1.5), 0),
        (SamplingParams(max_tokens=2, presence_penalty=1.5), 24),
        (SamplingParams(max_tokens=2, frequency_penalty=1.5), 24),
    ):
        request = engine.submit(prompt_of(30), params)
        finish(engine, request)
        assert cached(request) == hit


def test_lines_of_a_long_hit_go_ahead_in_parts() -> None:
    """A hit of 48 tokens needs 14 lines, a replay of 4 tokens and one row has 6."""
    spec = build_spec(snapshots=8, extends=((4, 1),), decodes=(1,), running=1)
    engine = open_engine(spec)
    requests = []
    for _ in range(2):
        requests.append(engine.submit(prompt_of(50), GREEDY))
        finish(engine, requests[-1])
    assert cached(requests[1]) == 48
    for request in requests:
        assert_right(engine, request)


def test_shared_prompts_are_computed_once() -> None:
    """Of 60 prompts that share 45 of 50 tokens, the first feeds them all, the others 10 each."""
    engine = open_engine(build_spec(snapshots=8, full_pages=80, window_pages=60))
    requests = [engine.submit(prompt_of(50, 45, tail), GREEDY) for tail in range(60)]
    finish(engine, *requests)
    for request in requests:
        assert_right(engine, request)
    scheduler = engine.scheduler
    assert scheduler.fed_tokens + scheduler.cached_tokens == 60 * 50
    assert scheduler.fed_tokens == 50 + 59 * 10


def test_a_snapshot_that_requests_start_from_outlives_others() -> None:
    """With three slots, a system prompt stays while long prompts of no other use pass."""
    engine = open_engine(build_spec(snapshots=3))
    for tail in range(6):
        request = engine.submit(prompt_of(20, 17, tail), GREEDY)
        finish(engine, request)
        assert cached(request) == (16 if tail else 0)
        if tail:
            finish(engine, engine.submit(prompt_of(50, 0, 50 + tail), GREEDY))


def test_preempted_requests_go_on_as_if_nothing_had_been() -> None:
    """Eight pages for four requests of 10 to 16 tokens: somebody has to give way."""
    for snapshots, overlap, steps in ((0, False, 1), (0, True, 4), (6, False, 4), (6, True, 1)):
        spec = build_spec(full_pages=9, snapshots=snapshots, results=32)
        engine = open_engine(spec, steps=steps, overlap=overlap)
        params = SamplingParams(max_tokens=14, ignore_eos=True, seed=3, logprobs=0)
        requests = [engine.submit(prompt_of(n, 0, n), params) for n in (10, 3, 5, 12)]
        finish(engine, *requests)
        assert engine.scheduler.preemptions > 0
        for request in requests:
            assert_right(engine, request)


def test_nobody_enters_in_a_plan_that_met_a_lack_of_pages() -> None:
    """Else one could be preempted and enter at once, with a token of its still on its way."""
    engine = open_engine(build_spec(full_pages=17, extends=((16, 4),), ring=3))
    scheduler, params = engine.scheduler, SamplingParams(max_tokens=24, ignore_eos=True)
    low = [engine.submit(prompt_of(4, 0, n), params) for n in range(3)]
    for _ in range(8):
        engine.step()
    high = engine.submit(prompt_of(40), params, priority=-1)
    scheduler.holdings.has_room = lambda *_: True  # type: ignore[method-assign]
    while not scheduler.preemptions:
        engine.step()
    assert low[2].sequences[0] in scheduler.waiting and high.sequences[0] in scheduler.prefilling


def test_a_snapshot_that_was_never_written_is_not_entered() -> None:
    """The next replay, begun before a stop is known, would have crossed the grid."""
    answer = run_oracle(build_spec(), prompt_of(10), GREEDY)[0]
    stop = SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[answer[5]], ignore_eos=True)
    assert answer[5] not in answer[:5]
    for steps in (1, 4):
        engine = open_engine(build_spec(snapshots=8, results=8), steps=steps, overlap=True)
        first = engine.submit(prompt_of(10), stop)
        finish(engine, first)
        while engine._ahead:
            engine.step()
        second = engine.submit(prompt_of(10) + answer + [30, 31], GREEDY)
        finish(engine, second)
        assert cached(second) == 8, "token 16 ended the request before it was processed"
        assert_right(engine, first)
        assert_right(engine, second)


def test_the_better_rank_is_never_preempted_for_a_worse_one() -> None:
    engine = open_engine(build_spec(full_pages=9))
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    low, mid, high = (engine.submit(prompt_of(6, 0, p), params, priority=p) for p in (5, 0, -5))
    ended: list[Request] = []
    while len(ended) < 3:
        ended += engine.step()
    assert ended == [high, mid, low]
    assert engine.scheduler.preemptions > 0
    for request in (low, mid, high):
        assert_right(engine, request)


def test_a_deadline_ends_what_is_unfinished() -> None:
    engine = open_engine(build_spec(running=1))
    clock = [0.0]
    engine._deadlines._clock = lambda: clock[0]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    running = engine.submit([20], params, deadline=5)
    waiting = engine.submit([21], params, deadline=3)
    free = engine.submit([22], params)
    for clock[0], count in ((0.0, 0), (2.9, 0), (3.0, 1), (4.9, 0)):
        assert len(engine.step()) == count
    clock[0] = 5.0
    assert running in engine.step()
    finish(engine, free)
    reasons = [r.completion().choices[0].finish_reason for r in (running, waiting, free)]
    assert reasons == ["deadline", "deadline", "length"]
    assert len(running.sequences[0].tokens) == 4
    for request in (running, waiting, free):
        assert_right(engine, request)


Event = tuple[str, int, int]


@settings(max_examples=120)
@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(("submit", "submit", "submit", "step", "step", "abort", "preempt")),
            st.integers(1, 50),
            st.integers(1, 30),
        ),
        max_size=40,
    ),
    running=st.integers(1, 5),
    full_pages=st.integers(17, 30),
    window_pages=st.integers(6, 16),
    ring=st.integers(3, 7),
    snapshots=st.integers(0, 6),
    extends=st.sampled_from([((8, 2), (16, 4)), ((16, 1),), ((8, 8), (32, 2)), ((4, 4),)]),
    decodes=st.sampled_from([(1, 2, 4), (2,), (8,)]),
    steps=st.sampled_from([1, 1, 3, 8]),
    overlap=st.booleans(),
)
def test_any_traffic_in_tiny_pools_gives_solo_results(
    events: list[Event],
    running: int,
    full_pages: int,
    window_pages: int,
    ring: int,
    snapshots: int,
    extends: tuple[tuple[int, int], ...],
    decodes: tuple[int, ...],
    steps: int,
    overlap: bool,
) -> None:
    spec = build_spec(
        running=running,
        full_pages=full_pages,
        window_pages=max(window_pages, ring + 1),
        ring=ring,
        extends=extends,
        decodes=decodes,
        snapshots=snapshots,
        results=2 * steps,
    )
    engine, requests = open_engine(spec, steps=steps, overlap=overlap), list[Request]()
    for kind, first, second in events:
        if kind == "submit":
            length = min(first, 63 - second)
            prompt = prompt_of(length, first * second % 40, second % 3)
            params = SamplingParams(
                seed=second, temperature=first % 3, max_tokens=second, n=1 + first % 2, logprobs=1
            )
            requests.append(engine.submit(prompt, params, priority=first % 3))
        elif kind == "abort" and requests:
            engine.abort(requests[first % len(requests)])
        elif kind == "preempt":
            if inside := engine.scheduler.prefilling + engine.scheduler.decoding:
                engine.scheduler.preempt(inside[first % len(inside)])
        else:
            step(engine)
    finish_fairly(engine, requests)
    while engine._ahead:
        engine.step()
    assert_all_right(engine, requests)
