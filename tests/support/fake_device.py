"""A device for the scheduler alone: it replays plans as the step would, with one owner for every
slot, page, ring entry and snapshot slot, so that one handed out twice, freed too early or too
late, or read in another state than was wanted, is an assertion.

Verified drafts are drawn: how many a round has, and how many of them are right.
"""

from __future__ import annotations

import itertools
import random

from support.fake_spec import GRID, PAGE, WINDOW

from inkling_engine.artifacts.spec import EngineSpec
from inkling_engine.kernels.table import FROM_TABLE, FULL_TABLE, SAMPLE
from inkling_engine.runtime.plan import Plan, page_lines
from inkling_engine.runtime.prefix import Snapshot
from inkling_engine.runtime.requests import Sequence, Status, open_request
from inkling_engine.runtime.sampling import SamplingParams
from inkling_engine.runtime.scheduler import Scheduler

_ids = itertools.count()
State = tuple[int, ...]  # the tokens that a snapshot is the state of


def fake_sequence(
    spec: EngineSpec, prompt: int, new: int, max_drafts: int | None = None, priority: int = 0
) -> Sequence:
    """A sequence of `prompt` tokens and a budget of `new` ones."""
    params = SamplingParams(max_tokens=new, max_drafts=max_drafts)
    ids = list(range(3, 3 + prompt))
    return open_request(next(_ids), ids, params, spec, 0, priority).sequences[0]


class Device:
    """Runs plans; `outputs` are tokens by sequence, which end at their budget or at `stops`.

    With `overlap`, each plan is made before the ends of the last one are known. `accepted` decides
    for each round how many of so many drafts are right; by default it draws.
    """

    def __init__(
        self,
        spec: EngineSpec,
        steps: int = 1,
        *,
        overlap: bool = False,
        seed: int = 0,
        prefix_cache: bool = True,
    ) -> None:
        self.spec, self.overlap = spec, overlap
        self.scheduler = Scheduler(spec, steps, prefix_cache=prefix_cache)
        self.holdings = self.scheduler.holdings
        self.stops: dict[Sequence, int] = {}
        self.ahead: tuple[Plan, list[tuple[Sequence, list[int]]], list[Sequence]] | None = None
        self.lengths: dict[Sequence, int] = {}
        self.fed: dict[Sequence, list[int]] = {}
        self.outputs: dict[Sequence, list[int]] = {}
        self.full: dict[tuple[int, int], int] = {}
        self.ring: dict[tuple[int, int], tuple[int, int]] = {}
        self.waiting: dict[int, list[int]] = {}  # destinations by slot, until they are taken
        self.snapshots: dict[int, State] = {}
        self.started: list[Sequence] = []
        self.rounds = self.hits = 0
        self._draw = random.Random(seed)

    def proposed(self, most: int) -> int:
        """How many drafts a round has."""
        return self._draw.choice((most, most, self._draw.randint(0, most)))

    def accepted(self, drafts: int) -> int:
        """How many of a round's drafts are right."""
        return self._draw.choice((0, drafts, self._draw.randint(0, drafts)))

    def step(self) -> Plan | None:
        """One replay with all its checks; the sequences that it ended are released."""
        begun, self.ahead = self.ahead or self._begin(), None
        if begun is None:
            return None
        if self.overlap:
            self.ahead = self._begin()
        plan, drawn, ended = begun
        for sequence, tokens in drawn:  # known only now
            if sequence.status is not Status.FINISHED:
                sequence.tokens += tokens
        for sequence in ended:
            if sequence.status is not Status.FINISHED:
                self.end(sequence)
        self.scheduler.settle(plan)
        self._check_owners()
        return plan

    def end(self, sequence: Sequence) -> None:
        """Release a sequence in any state."""
        self.scheduler.release(sequence)
        sequence.finish("length")
        self._check_owners()

    def preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to the queue; no replay that names it may be ahead."""
        self.scheduler.preempt(sequence)
        self._check_owners()

    def is_over(self, sequence: Sequence) -> bool:
        """Whether the device has ended it."""
        most = min(sequence.max_tokens, self.stops.get(sequence, sequence.max_tokens))
        return len(self.outputs[sequence]) == most

    def _begin(
        self,
    ) -> tuple[Plan, list[tuple[Sequence, list[int]]], list[Sequence]] | None:
        """Plan a replay and run it; the plan, who was given tokens, and who ended in it."""
        if (plan := self.scheduler.next()) is None:
            return None
        self._forget()  # those that it has preempted
        self._check_shape(plan)
        for sequence in plan.admissions:
            self.started.append(sequence)
            self.lengths[sequence] = sequence.cached
            self.outputs.setdefault(sequence, [])
            self.fed[sequence] = list(sequence.feed)[: sequence.cached]
            self.waiting[sequence.slot] = []
        self._apply_pages(plan)
        for sequence, slots in plan.snapshots:
            self.waiting[sequence.slot] = list(slots)
        self._check_sources(plan)
        drawn: list[tuple[Sequence, list[int]]] = []
        ended: list[Sequence] = []
        for _ in range(plan.steps):
            start = 0
            for sequence, count, flags in zip(plan.sequences, plan.counts, plan.flags, strict=True):
                tokens = plan.tokens[start : start + count]
                if not self.is_over(sequence):
                    found = self._run_row(plan, sequence, count, flags, tokens)
                    drawn += [(sequence, found)] * bool(found)
                    ended += [sequence] * self.is_over(sequence)
                start += count
        self.scheduler.complete()
        self._check_owners()
        return plan, drawn, ended

    def _check_shape(self, plan: Plan) -> None:
        rows = len(plan.slots)
        assert 0 <= rows <= plan.bucket.rows and (rows or plan.pages)
        assert sum(plan.counts) <= plan.bucket.tokens
        assert all(count > 0 for count in plan.counts), "a row without tokens is no row"
        assert len(set(plan.slots)) == rows and all(
            0 < s <= self.spec.max_running for s in plan.slots
        )
        assert [sequence.slot for sequence in plan.sequences] == plan.slots
        assert set(map(id, plan.admissions)) <= set(map(id, plan.sequences))
        assert (
            len(plan.pages) <= page_lines(plan.bucket, self.spec)
            and len(plan.admissions) <= plan.bucket.rows
        )
        assert len(plan.snapshots) <= plan.bucket.rows
        if plan.bucket.kind == "extend":
            assert len(plan.tokens) == sum(plan.counts) and plan.steps == 1
        else:
            assert plan.bucket.kind == ("verify" if self.spec.spec_depth else "decode")
            assert plan.flags == [SAMPLE | FROM_TABLE] * rows and not plan.tokens
            assert plan.counts == [1] * rows and plan.steps in (1, self.scheduler.steps)

    def _apply_pages(self, plan: Plan) -> None:
        held_full = set(self.full.values())
        held_window = {page for page, _ in self.ring.values()}
        for kind, slot, index, page in plan.pages:
            assert page > 0, "page 0 is never handed out"
            sequence = next(
                s for s in self.scheduler.prefilling + self.scheduler.decoding if s.slot == slot
            )
            if kind == FULL_TABLE:
                shared = index * PAGE < sequence.cached
                assert shared or page not in held_full and 0 < page < self.spec.pools.full_pages
                assert index < self.spec.pools.table_width
                held_full.add(page)
                self.full[slot, index] = page
            else:
                logical = sequence.window_first + sequence.window_pages.index(page)
                shared = logical * PAGE < sequence.cached
                assert shared or page not in held_window and 0 < page < self.spec.pools.window_pages
                held_window.add(page)
                assert logical % self.spec.pools.window_ring == index
                self.ring[slot, index] = page, logical

    def _check_sources(self, plan: Plan) -> None:
        """A hit starts from the state of its tokens, which no row of the replay writes."""
        written = {d for s in plan.sequences for d in self.waiting.get(s.slot, ())}
        for row, source in plan.sources.items():
            sequence = plan.sequences[row]
            assert source not in written, "a source is written in the replay"
            wanted = tuple(sequence.feed[: sequence.cached])
            assert self.snapshots[source] == wanted, "another state than the hit's"
            self.hits += 1

    def _run_row(
        self, plan: Plan, sequence: Sequence, count: int, flags: int, tokens: list[int]
    ) -> list[int]:
        """Run a row; the tokens that it gives. Every position is written before it is read."""
        length, drafts, most = self.lengths[sequence], 0, self.spec.spec_depth
        if flags & FROM_TABLE:
            assert count == 1 and length >= len(sequence.feed)
            left = sequence.max_tokens - len(self.outputs[sequence]) - 1
            drafts = self.proposed(min(plan.bucket.drafts, sequence.drafts, max(left, 0)))
        else:
            self.fed[sequence] += tokens
            assert bool(flags & SAMPLE) == (length + count == len(sequence.feed))
        given: list[int] = []
        if flags & SAMPLE:
            good = self.accepted(drafts)
            while len(given) < 1 + good and not self.is_over(sequence):
                given.append(100 + len(self.outputs[sequence]) % 40)
                self.outputs[sequence].append(given[-1])
            self.rounds += plan.bucket.kind == "verify"
        end = length + (len(given) if flags & FROM_TABLE else count)
        self._touch(sequence, length, max(length + count + drafts, end + most))
        self._scatter(sequence, length, length + count + drafts, end)
        self.lengths[sequence] = end
        return given

    def _touch(self, sequence: Sequence, length: int, end: int) -> None:
        """Positions up to `end` are written, those from the window before `length` on are read."""
        for at in range(end):
            assert (sequence.slot, at // PAGE) in self.full, f"{at} has no page"
        for at in range(max(0, length - WINDOW + 1), end):
            page = self.ring[sequence.slot, at // PAGE % self.spec.pools.window_ring]
            assert page[1] == at // PAGE, "a ring entry was overwritten while it is still read"

    def _scatter(self, sequence: Sequence, length: int, tried: int, end: int) -> None:
        """Destinations of boundaries up to `tried` are written, those up to `end` are taken."""
        waiting = self.waiting[sequence.slot]
        known = [*sequence.prompt, *self.outputs[sequence]]
        boundaries = range((length // GRID + 1) * GRID, tried + 1, GRID)
        passed = [boundary for boundary in boundaries if boundary <= end]
        for boundary, slot in zip(boundaries, waiting, strict=False):
            if slot:
                assert slot > self.spec.max_running, "a live slot is no destination"
                self.snapshots[slot] = tuple(known[:boundary]) if boundary <= end else (-1,)
        del waiting[: len(passed)]

    def _forget(self) -> list[Sequence]:
        """Forget the tables of slots that no sequence runs in, and window pages given back."""
        running = self.scheduler.prefilling + self.scheduler.decoding
        slots = {s.slot: s for s in running}
        self.full = {key: page for key, page in self.full.items() if key[0] in slots}
        self.ring = {
            (slot, index): entry
            for (slot, index), entry in self.ring.items()
            if slot in slots and entry[1] >= slots[slot].window_first
        }
        return running

    def _check_owners(self) -> None:
        """What the scheduler says it holds is what the tables must keep."""
        running = self._forget()
        assert len({s.slot for s in running}) == len(running)
        for s in running:
            first = max(0, s.length - WINDOW + 1) // PAGE
            if s.length > s.cached and not self.is_over(s):
                assert s.window_first == first, "window pages return as soon as none can see them"
                assert s.length <= self.lengths[s] <= s.reach, "a length out of its bounds"
            most = s.total + self.spec.spec_depth
            assert len(s.full_pages) * PAGE < most + PAGE, "no more than was promised"
        prefix = self.holdings.prefix
        for snapshot in (*prefix._fresh, *prefix._used):
            if snapshot.block:
                assert self.snapshots[snapshot.slot] == _tokens(snapshot), (
                    "another state is entered"
                )
        self.scheduler.check()


def _tokens(snapshot: Snapshot) -> State:
    """The tokens that a snapshot in the tree says it is the state of."""
    parts, block = list[State](), snapshot.block
    while block is not None:
        parts.append(block.tokens)
        block = block.parent
    return tuple(itertools.chain(*reversed(parts)))
