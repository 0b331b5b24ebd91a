"""The scheduler with drafts: lengths are known only from results, and nothing is lost by that.

`support.fake_device` draws how many drafts a round has and how many of them are right, and holds every
position that is written or read to the page that was mapped for it.
"""

from __future__ import annotations

import itertools

import msgspec
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


@settings(max_examples=400)
@given(
    drafts=st.integers(1, 4),
    jobs=st.lists(JOB, min_size=3, max_size=14),
    aborts=st.sets(st.integers(0, 60), max_size=4),
    preempted=st.sets(st.integers(0, 60), max_size=4),
    running=st.integers(2, 6),
    full_pages=st.integers(18, 26) | st.just(60),
    more_window=st.integers(0, 10),
    more_ring=st.sampled_from([0, 0, 1, 4]),
    snapshots=st.sampled_from([0, 1, 2, 3, 8]),
    extends=st.sampled_from([((8, 2), (16, 4)), ((16, 1),), ((8, 8), (32, 2)), ((4, 4),)]),
    decodes=st.sampled_from([(1, 2, 4), (2,), (1,), (8,)]),
    steps=st.integers(1, 4),
    overlap=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_acceptance_keeps_the_balance(
    drafts: int,
    jobs: list[tuple[int, int, int, int, int | None, int]],
    aborts: set[int],
    preempted: set[int],
    running: int,
    full_pages: int,
    more_window: int,
    more_ring: int,
    snapshots: int,
    extends: tuple[tuple[int, int], ...],
    decodes: tuple[int, ...],
    steps: int,
    overlap: bool,
    seed: int,
) -> None:
    ring = least_ring(drafts) + more_ring
    spec = build_spec(
        running=running,
        full_pages=full_pages,
        window_pages=1 + ring + more_window,
        ring=ring,
        extends=extends,
        decodes=decodes,
        snapshots=snapshots,
        results=8,
        drafts=drafts,
    )
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
        if clock in preempted and decoding and not overlap:
            device.preempt(decoding[clock % len(decoding)])
        if device.step() is None and not arrivals:
            break
    assert all(s.status is Status.FINISHED for s in sequences), "everything finishes"
    for s in device.started:
        assert device.fed[s] == list(s.feed)[: len(device.fed[s])]
        if device.is_over(s):
            assert aborts or s.tokens == device.outputs[s]
    assert_idle(device)
