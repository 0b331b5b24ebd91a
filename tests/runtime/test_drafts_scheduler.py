"""The scheduler with drafts: lengths are known only from results, and nothing is lost by that.

`support.fake_device` draws how many drafts a round has and how many of them are right, and holds every
position that is written or read to the page that was mapped for it.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_device import Device, fake_sequence
from support.fake_spec import GRID, PAGE, WINDOW, build_spec

from inkling_engine.artifacts.spec import EngineSpec
from inkling_engine.runtime.drafts import replay_steps
from inkling_engine.runtime.errors import UsageError
from inkling_engine.runtime.plan import Plan
from inkling_engine.runtime.requests import Sequence, Status
from inkling_engine.runtime.scheduler import Scheduler

pytestmark = pytest.mark.null


class Oracle(Device):
    """The same, where a round's number decides how many drafts are right."""

    pattern: tuple[int, ...] = (99,)

    def proposed(self, most: int) -> int:
        return most

    def accepted(self, drafts: int) -> int:
        return min(self.pattern[self.rounds % len(self.pattern)], drafts)


def least_ring(drafts: int) -> int:
    """The smallest ring that is allowed."""
    return -(-(WINDOW - 1 + 2 * drafts) // PAGE) + 1


def run_all(device: Device, sequences: list[Sequence]) -> list[Plan]:
    """Run until all have ended."""
    for sequence in sequences:
        device.holdings.require_fit(sequence)
        device.scheduler.add(sequence)
    plans = [plan for plan in iter(device.step, None) if plan]
    assert all(s.status is Status.FINISHED for s in sequences)
    return plans


def assert_idle(device: Device) -> None:
    """Nothing is live, and what the cache holds can be let go of."""
    for account in device.scheduler.accounting().values():
        assert account.live == 0 and account.free + account.pinned == account.total
    device.holdings.prefix.clear()
    for account in device.scheduler.accounting().values():
        assert account.free == account.total


JOB = st.tuples(
    st.integers(1, 12) | st.integers(1, 50),  # prompt
    st.sampled_from([14, 14, 1, 2, 7]) | st.integers(1, 14),  # budget
    st.integers(0, 2),  # steps after the job before
    st.sampled_from([99, 99, 99, 1, 5, 9]),  # its own end
    st.sampled_from([None, None, None, None, 0, 1, 2]),  # most drafts
    st.integers(0, 2),  # priority
)


@st.composite
def specs(draw: st.DrawFn) -> EngineSpec:
    """An engine whose pools are as small as they may be, or a little larger."""
    drafts = draw(st.integers(1, 4))
    ring = least_ring(drafts) + draw(st.sampled_from([0, 0, 1, 4]))
    return build_spec(
        drafts=drafts,
        running=draw(st.integers(1, 6)),
        full_pages=draw(st.integers(18, 26) | st.just(60)),
        window_pages=1 + ring + draw(st.integers(0, 10)),
        ring=ring,
        extends=draw(
            st.sampled_from([((8, 2), (16, 4)), ((16, 1),), ((8, 8), (32, 2)), ((4, 4),)])
        ),
        decodes=draw(st.sampled_from([(1, 2, 4), (2,), (1,), (8,)])),
        snapshots=draw(st.sampled_from([0, 1, 2, 3, 8])),
        results=8,
    )


@settings(max_examples=400)
@given(
    spec=specs(),
    jobs=st.lists(JOB, min_size=3, max_size=14),
    aborts=st.sets(st.integers(0, 60), max_size=4),
    preempted=st.sets(st.integers(0, 60), max_size=4),
    steps=st.integers(1, 4),
    overlap=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_acceptance_keeps_the_balance(
    spec: EngineSpec,
    jobs: list[tuple[int, int, int, int, int | None, int]],
    aborts: set[int],
    preempted: set[int],
    steps: int,
    overlap: bool,
    seed: int,
) -> None:
    device = Device(spec, min(steps, replay_steps(spec)), overlap=overlap, seed=seed)
    sequences = [
        fake_sequence(spec, prompt, new * 3 if prompt < 20 else new, most, priority)
        for prompt, new, _, _, most, priority in jobs
    ]
    device.stops = {s: job[3] for s, job in zip(sequences, jobs, strict=True)}
    times = itertools.accumulate(job[2] for job in jobs)
    arrivals = list(zip(sequences, times, strict=True))
    for clock in range(3000):
        while arrivals and arrivals[0][1] <= clock:
            sequence, _ = arrivals.pop(0)
            device.holdings.require_fit(sequence)
            device.scheduler.add(sequence)
        unfinished = device.scheduler.unfinished()
        if clock in aborts and unfinished:
            device.end(unfinished[clock % len(unfinished)])
        decoding = device.scheduler.decoding
        if clock in preempted and decoding:
            device.preempt(decoding[clock % len(decoding)])
        device.step()
        if not (arrivals or device.scheduler.unfinished()):
            break
    assert all(s.status is Status.FINISHED for s in sequences), "everything finishes"
    for s in device.started:
        assert device.fed[s] == list(s.feed)[: len(device.fed[s])]
        if device.is_over(s):
            assert aborts or s.tokens == device.outputs[s]
    assert_idle(device)


def least_spec(drafts: int, **sizes: Any) -> EngineSpec:
    """Two rows, and the smallest ring."""
    given: dict[str, Any] = {"running": 2, "extends": ((16, 4),), "results": 8}
    return build_spec(drafts=drafts, ring=least_ring(drafts), **{**given, **sizes})


def test_a_round_accepts_any_number() -> None:
    """All right: a fourth of the rounds. None right: one token a round, as without drafts."""
    for pattern, rounds in (((3,), 3), ((0,), 11), ((1,), 6), ((0, 2), 6)):
        device = Oracle(least_spec(3))
        device.pattern = pattern
        sequence = fake_sequence(device.spec, 5, 12)
        plans = run_all(device, [sequence])
        assert len(plans) == 1 + rounds and len(sequence.tokens) == 12
        assert_idle(device)


@pytest.mark.parametrize("drafts", [1, 2, 3, 4])
def test_pages_are_for_what_may_be_accepted_and_no_more(drafts: int) -> None:
    """For the most tokens after a round and the drafts' keys behind them, up to the sequence's end."""
    device = Oracle(least_spec(drafts))
    device.pattern = (0,)
    sequence = fake_sequence(device.spec, 3, 9)
    device.scheduler.add(sequence)
    device.step()
    while sequence.status is not Status.FINISHED:
        before = sequence.length
        device.step()
        most = min(before + 1 + drafts, sequence.total - 1) + drafts
        if sequence.full_pages:
            assert len(sequence.full_pages) == -(-most // PAGE)


def test_what_fits_alone_has_room_for_its_drafts() -> None:
    spec = least_spec(4, full_pages=5)
    fits = Scheduler(spec).holdings.require_fit
    fits(fake_sequence(spec, 8, 4))
    with pytest.raises(UsageError, match="13 tokens, 5 full pages.*at most 4 pages"):
        fits(fake_sequence(spec, 8, 5))


def test_a_ring_without_room_for_drafts_is_refused() -> None:
    with pytest.raises(AssertionError, match="ring"):
        Scheduler(build_spec(drafts=4, ring=least_ring(4) - 1))


def test_a_destination_waits_for_one_boundary_only() -> None:
    """None is armed where the sequence may be behind the boundary already: it would be taken for the
    next one."""
    device = Device(least_spec(3, snapshots=4))
    sequence = fake_sequence(device.spec, 6, 30)
    device.scheduler.add(sequence)
    device.step()
    assert (sequence.length, sequence.slack) == (6, 0)
    holdings = device.holdings
    for slack, length, armed in ((0, 7, 0), (0, 8, 1), (1, 10, 1), (2, 10, 0), (5, 12, 0)):
        sequence.slack = slack
        slots = holdings.destinations(sequence, length, 1)
        assert len(slots) == armed, (slack, length)
        for slot in slots:
            holdings.prefix.slots.give(slot)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_armed_snapshot_is_nobody_elses(overlap: bool) -> None:
    """One slot, awaited by a sequence whose drafts are wrong for long: a prompt does not get it."""
    device = Oracle(least_spec(3, snapshots=1), overlap=overlap)
    device.pattern = (0,)
    slow, other = fake_sequence(device.spec, 4, 20), fake_sequence(device.spec, 20, 4)
    device.scheduler.add(slow)
    while not slow.pending:
        device.step()
    (snapshot, length) = slow.pending, slow.length
    assert snapshot.pins and length < snapshot.length == GRID
    device.scheduler.add(other)
    while slow.pending is snapshot and snapshot.pins:
        assert slow.length < GRID
        device.step()
    while device.step():
        pass
    assert slow.status is other.status is Status.FINISHED
    assert_idle(device)


def test_pages_that_perhaps_are_not_needed_preempt_nobody() -> None:
    """Who may have grown less than was planned for waits for the results."""
    device = Oracle(least_spec(3))
    better, worse = (
        fake_sequence(device.spec, 4, 20, priority=-1),
        fake_sequence(device.spec, 4, 20),
    )
    for sequence in (better, worse):
        device.scheduler.add(sequence)
    device.step()
    free, scheduler = device.holdings.full_pages.free, device.scheduler
    taken, plan = [free.pop() for _ in range(len(free))], Plan(device.spec.buckets[0])
    better.slack = 3
    assert not scheduler._prepare(plan, better, 11) and scheduler.preemptions == 0
    better.slack = 0
    assert scheduler._prepare(plan, better, 8) and scheduler.preemptions == 1
    free += taken
    scheduler.check()
