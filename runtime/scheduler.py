"""What runs next: continuous batching by rank (priority, then arrival). No torch, decisions over ints.

Each `next()` plans one replay. Prompts are cut into chunks by the extend bucket's token budget and
decoding rows ride along; decoding rows that find no place follow in decode replays of the same
round, so every running sequence advances once a round. A prompt is admitted when there are pages
for it; when growth finds none, the cache lets go first, then the running sequence of the worst rank
is preempted: it waits again, and what it had computed is computed again. The best one always runs.
Replays run in the order of their plans, so what one gives back the next may name.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from inkling_engine.artifacts.spec import EngineSpec
from inkling_engine.kernels.table import FROM_TABLE, SAMPLE
from inkling_engine.runtime.capacity import Account
from inkling_engine.runtime.drafts import begin_rounds, end_rounds
from inkling_engine.runtime.holdings import Holdings
from inkling_engine.runtime.plan import Plan, page_lines, smallest
from inkling_engine.runtime.requests import Sequence, Status

_RANK = attrgetter("rank")


class Scheduler:
    """The order in which sequences run, and through `holdings` what they hold meanwhile."""

    def __init__(self, spec: EngineSpec, steps: int = 1, *, prefix_cache: bool = True) -> None:
        """Set up from an engine's buckets and pool sizes; `steps` is the most of one replay."""
        self.steps, self._spec = steps, spec
        by_size = sorted(spec.buckets, key=lambda bucket: (bucket.tokens, bucket.rows))
        self._extends = [bucket for bucket in by_size if bucket.kind == "extend"]
        self._decodes = [bucket for bucket in by_size if bucket.kind != "extend"]
        assert self._extends and self._decodes, "an engine has extend and decode buckets"
        self.drafts = self._decodes[-1].drafts
        longest = self._extends[-1].tokens
        self._destinations = (longest - 1) // spec.snapshot_grid + 1  # width of a snapshot line
        self.holdings = Holdings(spec, longest, steps, prefix_cache=prefix_cache)
        self.waiting: list[Sequence] = []  # this and the next two in order of rank
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.preemptions = self.fed_tokens = self.cached_tokens = 0
        self._owed: list[Sequence] = []  # decoding rows that this round has not advanced yet
        self._short = False  # the plan in the making admits nobody
        self._in_flight: Plan | None = None

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        insort(self.waiting, sequence, key=_RANK)

    def unfinished(self) -> list[Sequence]:
        """All that waits or runs."""
        return [*self.prefilling, *self.decoding, *self.waiting]

    def next(self) -> Plan | None:
        """Plan the next replay, or None if nothing can run. Follow it with `complete`.

        The last replay's results need not be known: rows that ended in it are inert in this one.
        """
        assert self._in_flight is None, "the last replay is not completed"
        going = [sequence for sequence in self.decoding if sequence.left]
        turns = (self._decode, self._extend) if self._owed else (self._extend, self._decode)
        plan = turns[0](going) or turns[1](going) or self._decode(going)  # of the next round
        self._in_flight, self._short = plan, False
        return plan

    def complete(self) -> None:
        """Account for the planned replay, which has begun: lengths advance, dead pages return."""
        plan, self._in_flight = self._in_flight, None
        assert plan is not None, "nothing was planned"
        for sequence, slots in plan.snapshots:
            self.holdings.capture(sequence, sequence.length, slots)
        for sequence in plan.admissions:
            self.holdings.read(sequence)
        for sequence, count in zip(plan.sequences, plan.counts, strict=True):
            length = sequence.length = sequence.length + min(count * plan.steps, sequence.left)
            if length == len(sequence.feed):
                self.prefilling.remove(sequence)
                insort(self.decoding, sequence, key=_RANK)
            if length >= sequence.window_end:
                self.holdings.free_window(sequence)
        if self.drafts:
            begin_rounds(plan, self.holdings)

    def settle(self, plan: Plan) -> None:
        """The results of a replay were handed out: what its rounds gave is known."""
        if self.drafts:
            end_rounds(plan, self.holdings)

    def release(self, sequence: Sequence) -> None:
        """Take back all that a sequence holds, or its place in the queue. Not before `complete`."""
        assert self._in_flight is None, "a replay that names the sequence is about to begin"
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence)

    def accounting(self) -> dict[str, Account]:
        """Balance of slots, pages and snapshots, live ones counted from the running sequences."""
        return self.holdings.accounting(self.prefilling + self.decoding)

    def check(self) -> None:
        """Assert that nothing is lost or held twice; cheap enough for every idle moment."""
        for name, account in self.accounting().items():
            balance = account.free + account.live + account.pinned
            assert balance == account.total, f"{name}: {account}"

    def _leave(self, sequence: Sequence) -> None:
        self.holdings.leave(sequence)
        held = self.prefilling if sequence in self.prefilling else self.decoding
        held.remove(sequence)
        if sequence in self._owed:
            self._owed.remove(sequence)

    def _extend(self, going: list[Sequence]) -> Plan | None:
        """A replay with prompt chunks and rows that are `going` on, or None without any chunk."""
        prompts = len(self.prefilling) + len(self.waiting)
        if not (self.prefilling or self._admit()):
            return None
        largest = self._extends[-1]
        rows = max(largest.rows - prompts, largest.rows // 2)
        first = min(len(going), largest.tokens // 2, rows)
        plan, budget, riders = Plan(largest), largest.tokens - first, first
        for sequence in sorted([*self.prefilling, *going[:first]], key=_RANK):
            if sequence.length < len(sequence.feed):
                budget -= self._add_chunk(plan, sequence, budget, riders)
            else:
                riders -= 1
                self._add_decoding(plan, [sequence])
        while budget and len(plan.slots) < largest.rows and (admitted := self._admit()):
            if not (count := self._add_chunk(plan, admitted, budget, 0)):
                break
            budget -= count
        if not (plan.slots or plan.pages):
            return None
        spare = (page_lines(largest, self._spec) - len(plan.pages)) // 2
        last = first + min(budget, largest.rows - len(plan.slots), max(0, spare))
        self._add_decoding(plan, going[first:last])
        self._owed = [sequence for sequence in going[last:] if sequence.status is Status.RUNNING]
        plan.bucket = smallest(self._extends, plan, self._spec)
        return plan

    def _decode(self, going: list[Sequence]) -> Plan | None:
        """A replay of the next owed rows: of many steps, unless a prompt waits or a ring is full."""
        self._owed = self._owed or going
        most = self._decodes[-1]
        while self._owed:
            rows, self._owed = self._owed[: most.rows], self._owed[most.rows :]
            plan = Plan(most)
            if self.steps > 1 and not (self.waiting or self.prefilling):
                fits = all(self.holdings.fits(s, s.ahead(self.steps, most.drafts)) for s in rows)
                plan.steps = self.steps if fits else 1
            self._add_decoding(plan, rows)
            if plan.slots:
                plan.tokens.clear()
                plan.bucket = smallest(self._decodes, plan, self._spec)
                return plan
        return None

    def _admit(self) -> Sequence | None:
        """Give the head of the queue a slot, and a hit, unless a longer one is being computed."""
        if self._short or not self.waiting or not self.holdings.slots.free:
            return None
        sequence, running = self.waiting[0], self.prefilling + self.decoding
        if sequence.tokens:
            sequence.feed = [*sequence.prompt, *sequence.tokens]
        holdings, hit = (
            self.holdings,
            self.holdings.prefix.match(sequence.feed, sequence.most_cached),
        )
        waits = holdings.is_in_the_making(sequence, hit, self.prefilling)
        if waits or not holdings.has_room(sequence, hit, running):
            return None
        holdings.enter(self.waiting.pop(0), hit)
        self.cached_tokens += sequence.cached
        insort(self.prefilling, sequence, key=_RANK)
        return sequence

    def _add_chunk(self, plan: Plan, sequence: Sequence, budget: int, riders: int) -> int:
        """Add a row with up to `budget` prompt tokens beside `riders` more; return how many.

        The page lines of a long hit may be more than a replay takes: then they go ahead in parts.
        """
        largest, feed, start = self._extends[-1], sequence.feed, sequence.length
        lines = max(0, page_lines(largest, self._spec) - len(plan.pages) - 2 * riders)
        if sequence.status is not Status.RUNNING:  # preempted for a row of this plan
            return 0
        plan.pages += (sent := sequence.backlog[:lines])
        lines -= len(sent)
        del sequence.backlog[: len(sent)]
        count = min(budget, len(feed) - start, self.holdings.room(sequence))
        if (
            sequence.backlog
            or count <= 0
            or len(plan.slots) + riders >= largest.rows
            or self.holdings.lines(sequence, start + count) > lines
            or not self._prepare(plan, sequence, start + count)
        ):
            return 0
        if start == sequence.cached:
            plan.admissions.append(sequence)
        if sequence.source:
            plan.sources[len(plan.slots)] = sequence.source.slot
        plan.sequences.append(sequence)
        plan.slots.append(sequence.slot)
        plan.counts.append(count)
        plan.flags.append(SAMPLE if start + count == len(feed) else 0)
        plan.tokens += feed[start : start + count]
        self.fed_tokens += count
        return count

    def _add_decoding(self, plan: Plan, rows: list[Sequence]) -> None:
        """Add one-token rows that go on from their last sampled token, if there are pages."""
        steps, drafts, ready = plan.steps, plan.bucket.drafts, []
        one = steps == 1 and not self.drafts
        for sequence in rows:
            length = sequence.length + 1 if one else sequence.ahead(steps, drafts)
            if length <= sequence.quiet or self._prepare(plan, sequence, length):
                ready.append(sequence)
        count = len(ready)
        plan.sequences += ready
        plan.slots += [sequence.slot for sequence in ready]
        plan.counts += [1] * count
        plan.flags += [SAMPLE | FROM_TABLE] * count
        plan.tokens += [0] * count

    def _prepare(self, plan: Plan, sequence: Sequence, length: int) -> bool:
        """Pages and snapshot destinations to grow to `length`; False if others must end first."""
        while sequence.status is Status.RUNNING and not self.holdings.can_grow(sequence, length):
            self._short = True
            if sequence.slack:  # perhaps it needs less: its results will tell
                return False
            worse = (s for s in self.prefilling + self.decoding if s.rank > sequence.rank)
            victims = [s for s in worse if s not in plan.sequences]
            if not victims:
                return False
            self.preempt(max(victims, key=_RANK))
        if sequence.status is not Status.RUNNING:  # preempted for a row of this plan
            return False
        plan.pages += self.holdings.grow(sequence, length)
        if slots := self.holdings.destinations(sequence, length, self._destinations):
            plan.snapshots.append((sequence, slots))
        sequence.quiet = self.holdings.quiet(sequence)
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to the queue, where a replay that has begun still delivers."""
        self._short = True  # so the next plan admits nobody
        self._leave(sequence)
        sequence.wait()
        self.add(sequence)
        self.preemptions += 1
