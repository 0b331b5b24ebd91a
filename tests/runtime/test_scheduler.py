"""The scheduler alone: order, chunks, buckets, and the life of slots and pages, with and without
drafts (`support.fake_device` replays the plans)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_device import Device
from support.fake_device import fake_sequence as _sequence
from support.fake_spec import RING, build_spec

from inkling_engine.runtime.errors import UsageError
from inkling_engine.runtime.requests import Request, Sequence, Status, open_request
from inkling_engine.runtime.sampling import SamplingParams
from inkling_engine.runtime.scheduler import Scheduler

pytestmark = pytest.mark.null


@settings(max_examples=150)
@given(
    jobs=st.lists(
        st.tuples(st.integers(1, 50), st.integers(1, 14), st.integers(0, 6), st.integers(1, 30)),
        max_size=25,
    ),
    aborts=st.sets(st.integers(0, 120)),
    running=st.integers(1, 6),
    full_pages=st.integers(17, 40),
    window_pages=st.integers(6, 16),
    ring=st.integers(3, 7),
    extends=st.sampled_from([((8, 2), (16, 4)), ((16, 1),), ((8, 8), (32, 2)), ((4, 4),)]),
    decodes=st.sampled_from([(1, 2, 4), (2,), (1,), (8,)]),
    steps=st.sampled_from([1, 1, 2, 3, 5, 8]),
    overlap=st.booleans(),
)
def test_slot_and_page_life(
    jobs: list[tuple[int, int, int, int]],
    aborts: set[int],
    running: int,
    full_pages: int,
    window_pages: int,
    ring: int,
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
    )
    device = Device(spec, steps, overlap=overlap)
    sequences = [_sequence(spec, prompt, new) for prompt, new, *_ in jobs]
    device.stops = {s: stop for s, (*_, stop) in zip(sequences, jobs, strict=True)}
    arrivals = list(zip(sequences, itertools.accumulate(gap for *_, gap, _ in jobs), strict=True))
    for clock in range(5000):
        while arrivals and arrivals[0][1] <= clock:
            sequence, _ = arrivals.pop(0)
            device.holdings.require_fit(sequence)
            device.scheduler.add(sequence)
        unfinished = device.scheduler.unfinished()
        if clock in aborts and unfinished:
            device.end(unfinished[clock % len(unfinished)])
        if device.step() is None and not arrivals:
            break
    assert all(s.status is Status.FINISHED for s in sequences), "everything finishes"
    assert device.started == [s for s in sequences if s in device.lengths], "order is kept"
    for s in device.started:
        assert device.fed[s] == list(s.prompt)[: len(device.fed[s])]
        if device.is_over(s):
            assert device.fed[s] == list(s.prompt)
    for account in device.scheduler.accounting().values():
        assert (account.free, account.live, account.pinned) == (account.total, 0, 0)


def _run(device: Device, *jobs: tuple[int, int]) -> list[Sequence]:
    sequences = [_sequence(device.spec, *job) for job in jobs]
    for sequence in sequences:
        device.scheduler.add(sequence)
    return sequences


def test_smallest_bucket_that_fits() -> None:
    device = Device(build_spec())
    _run(device, (3, 9))
    kinds = [(plan.bucket.kind, plan.bucket.rows) for plan in iter(device.step, None)]
    assert kinds == [("extend", 2)] + [("decode", 1)] * 8
    _run(device, (3, 3), (3, 2), (3, 3))
    kinds = [(plan.bucket.kind, plan.bucket.rows) for plan in iter(device.step, None)]
    assert kinds == [("extend", 4), ("decode", 4), ("decode", 2)]


def test_long_prompts_are_chunked_and_decoding_rows_ride_along() -> None:
    device = Device(build_spec())
    (short,) = _run(device, (2, 20))
    device.step()
    (long,) = _run(device, (40, 1))
    plans = [device.step() for _ in range(3)]
    for plan in plans:
        assert plan and plan.bucket.tokens == 16 and plan.sequences == [short, long]
    assert [plan.counts for plan in plans if plan] == [[1, 15], [1, 13], [1, 12]]


def test_chunks_end_where_the_ring_is_full() -> None:
    """A prompt alone has 16 tokens of budget, but a ring of three pages holds 12 at first."""
    device = Device(build_spec(ring=3))
    _run(device, (30, 1))
    plans = [plan for plan in iter(device.step, None) if plan]
    assert [plan.counts[0] for plan in plans] == [12, 4, 4, 4, 4, 2]


def test_more_rows_than_the_largest_decode_bucket_take_turns() -> None:
    device = Device(build_spec(running=5, decodes=(1, 2), extends=((16, 8),)))
    sequences = _run(device, *[(2, 6)] * 5)
    plans = [plan for plan in iter(device.step, None) if plan]
    assert [len(plan.slots) for plan in plans] == [5] + [2, 2, 1] * 5
    assert plans[1].sequences + plans[2].sequences + plans[3].sequences == sequences


def test_a_row_that_leaves_while_it_is_owed_a_turn_is_not_run() -> None:
    device = Device(build_spec(running=3, decodes=(1,), extends=((16, 8),)))
    first, second, third = _run(device, (2, 6), (2, 6), (2, 6))
    device.step()
    device.step()  # the first one's turn; the others wait for theirs
    device.end(second)
    plan = device.step()
    assert plan and plan.sequences == [third]
    plan = device.step()
    assert plan and plan.sequences == [first]


def test_decoding_is_not_starved_by_prompts() -> None:
    """While prompts keep coming through an extend bucket of one row, decoding rows advance."""
    device = Device(build_spec(extends=((8, 1),)))
    first, *_ = _run(device, (2, 12), *[(24, 1)] * 6)
    for _ in range(26):
        device.step()
    assert first.status is Status.FINISHED


def test_capacity_is_exact_and_the_queue_keeps_order() -> None:
    device = Device(build_spec(running=2, extends=((32, 8),)))
    a, b, c = _run(device, (2, 3), (2, 5), (2, 1))
    device.step()
    assert (a.slot, b.slot, c.status) == (1, 2, Status.WAITING)
    while a.status is not Status.FINISHED:
        device.step()
    device.step()
    assert c.slot == 1, "the freed slot goes to the next in order"


def test_a_large_head_of_the_queue_is_not_overtaken() -> None:
    device = Device(build_spec(full_pages=17))
    first, large, small = _run(device, (20, 8), (50, 10), (1, 1))
    while first.status is not Status.FINISHED:
        device.step()
        assert large.status is small.status is Status.WAITING
    device.step()
    assert large.status is Status.RUNNING


def test_many_steps_only_while_no_prompt_waits() -> None:
    device = Device(build_spec(running=2, extends=((8, 2),)), 4)
    _run(device, (2, 20), (20, 12), (2, 1))
    plans = [plan for plan in iter(device.step, None) if plan]
    told = [(plan.bucket.kind, plan.steps) for plan in plans]
    one, four = ("decode", 1), ("decode", 4)
    assert told[:3] == [("extend", 1)] * 3, "the second prompt comes in three chunks"
    assert told[3:14] == [one] * 11, "the third one waits for a slot"
    assert told[14:] == [("extend", 1), four, four], "four more tokens, and the last two"


def test_many_steps_take_no_more_pages_than_the_end_needs() -> None:
    device = Device(build_spec(full_pages=5, window_pages=5), 8)
    (sequence,) = _run(device, (6, 10))
    assert [plan.steps for plan in iter(device.step, None) if plan] == [1, 8, 8]
    assert len(device.outputs[sequence]) == 10


def test_a_plan_ahead_leaves_out_what_is_known_to_end() -> None:
    device = Device(build_spec(extends=((16, 4),)), overlap=True)
    one, short, long = _run(device, (3, 1), (3, 2), (3, 4))
    plans = [plan for plan in iter(device.step, None) if plan]
    assert [plan.sequences for plan in plans] == [[one, short, long], [short, long], [long], [long]]


def test_nothing_to_do_is_no_plan() -> None:
    scheduler = Scheduler(build_spec())
    assert [scheduler.next() for _ in range(3)] == [None] * 3
    scheduler.check()


def test_a_plan_in_flight_protects_what_it_names() -> None:
    device = Device(build_spec())
    (sequence,) = _run(device, (3, 3))
    device.scheduler.next()
    with pytest.raises(AssertionError, match="not completed"):
        device.scheduler.next()
    with pytest.raises(AssertionError, match="about to begin"):
        device.scheduler.release(sequence)


def test_sequences_that_can_never_run_are_refused() -> None:
    spec = build_spec(full_pages=5, window_pages=4)
    scheduler = Scheduler(spec)
    scheduler.holdings.require_fit(_sequence(spec, 8, 4))
    with pytest.raises(UsageError, match="5 full pages.*at most 4 pages"):
        scheduler.holdings.require_fit(_sequence(spec, 16, 1))
    with pytest.raises(UsageError, match="4 window pages.*at most 3 pages"):
        scheduler.holdings.require_fit(_sequence(spec, 12, 4))


def test_window_pages_are_bounded_by_the_window() -> None:
    device = Device(build_spec())
    (sequence,) = _run(device, (4, 56))
    most = 0
    while device.step():
        most = max(most, len(sequence.window_pages))
    assert most == 3 < RING, "a window of 8 over pages of 4 spans at most 3"


def test_a_ring_shorter_than_the_window_is_refused() -> None:
    with pytest.raises(AssertionError, match="ring"):
        Scheduler(build_spec(ring=2))


def test_a_lost_page_is_noticed() -> None:
    device = Device(build_spec())
    _run(device, (3, 3))
    device.step()
    device.holdings.full_pages.free.pop()
    with pytest.raises(AssertionError, match="full_pages"):
        device.scheduler.check()


def test_requests_share_prompts_but_not_state() -> None:
    spec = build_spec()
    request: Request = open_request(0, [3, 4], SamplingParams(n=3, max_tokens=2), spec, 5)
    device = Device(spec)
    for sequence in request.sequences:
        device.scheduler.add(sequence)
    while device.step():
        pass
    assert [s.status for s in request.sequences] == [Status.FINISHED] * 3
