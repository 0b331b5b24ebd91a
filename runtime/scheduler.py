"""What runs next: continuous batching, first come, first served. No torch, decisions over ints.

Each `next()` plans one replay. Prompts are cut into chunks by the extend bucket's token budget and
decoding rows ride along; decoding rows that find no place follow in decode replays of the same
round, so every running sequence advances once a round. Admission reserves all pages that a
sequence can ever need, so nothing running waits for memory; pages are taken as it grows. Pages of
window layers sit in a ring and return when no later token can see them. Slot 0 and page 0 are
never handed out. Replays run in the order of their plans, so what one gives back the next may name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from inkling_engine.artifacts.errors import UsageError
from inkling_engine.artifacts.spec import Bucket, EngineSpec
from inkling_engine.kernels.table import FROM_TABLE, FULL_TABLE, SAMPLE, WINDOW_TABLE
from inkling_engine.runtime.capacity import Account, Stock
from inkling_engine.runtime.requests import Sequence, Status


@dataclass(slots=True)
class Plan:
    """One replay: for each row its sequence, slot, token count and flags.

    `tokens` holds the rows' token ids, packed in row order, or nothing if all rows take theirs
    from the request table; `admissions` are the sequences that enter their slot with this replay;
    `pages` are (table, slot, index, page) lines. Rows that go on from their last sampled token do
    so `steps` times; one that ends on the way is inert for the rest.
    """

    bucket: Bucket
    sequences: list[Sequence] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    admissions: list[Sequence] = field(default_factory=list)
    pages: list[tuple[int, int, int, int]] = field(default_factory=list)
    steps: int = 1


class Scheduler:
    """Owner of free slots and pages, and of the order in which sequences run."""

    def __init__(self, spec: EngineSpec, steps: int = 1) -> None:
        """Set up from an engine's buckets and pool sizes; `steps` is the most of one replay."""
        pools, shape, self.steps = spec.pools, spec.shape, steps
        by_size = sorted(spec.buckets, key=lambda bucket: (bucket.tokens, bucket.rows))
        self._extends = [bucket for bucket in by_size if bucket.kind == "extend"]
        self._decodes = [bucket for bucket in by_size if bucket.kind == "decode"]
        assert self._extends and self._decodes, "an engine has extend and decode buckets"
        self._page = spec.page_size
        self._past = shape.local.window - 1  # positions before a token that window layers read
        self._ring = pools.window_ring if shape.count(local=True) else 0
        self._has_full = shape.count(local=False) > 0
        whole = self._ring >= pools.table_width  # no two pages share an entry
        assert not self._ring or whole or (self._ring - 1) * self._page >= self._past, "short ring"
        self.slots = Stock(1 + spec.max_running)
        self.full_pages, self.window_pages = Stock(pools.full_pages), Stock(pools.window_pages)
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self._owed: list[Sequence] = []  # decoding rows that this round has not advanced yet
        self._in_flight: Plan | None = None

    def require_fit(self, sequence: Sequence) -> None:
        """Raise UsageError for a sequence that could not run even alone."""
        full, window = self._needs(sequence)
        for name, need, pool in (
            ("full", full, self.full_pages),
            ("window", window, self.window_pages),
        ):
            if need > pool.total:
                found = f"{sequence.total} tokens, {need} {name} pages of {self._page}"
                remedy = "shorten them or build with more pages"
                raise UsageError(
                    "prompt + max_tokens", found, f"at most {pool.total} pages", remedy
                )

    def unfinished(self) -> list[Sequence]:
        """All that waits or runs."""
        return [*self.prefilling, *self.decoding, *self.waiting]

    def next(self) -> Plan | None:
        """Plan the next replay, or None if nothing can run. Follow it with `complete`.

        The last replay's results need not be known: rows that ended in it are inert in this one.
        """
        assert self._in_flight is None, "the last replay is not completed"
        going = [sequence for sequence in self.decoding if _left(sequence)]
        plan = None if self._owed else self._extend(going)
        if plan is None:
            self._owed = self._owed or going
            plan = self._decode() if self._owed else None
        self._in_flight = plan
        return plan

    def complete(self) -> None:
        """Account for the planned replay, which has begun: lengths advance, dead pages return."""
        plan, self._in_flight = self._in_flight, None
        assert plan is not None, "nothing was planned"
        for sequence, count in zip(plan.sequences, plan.counts, strict=True):
            count = min(count * plan.steps, _left(sequence))
            length = sequence.length = sequence.length + count
            if length == len(sequence.prompt):
                self.prefilling.remove(sequence)
                self.decoding.append(sequence)
            if self._ring and length >= (sequence.window_first + 1) * self._page + self._past:
                self._free_window(sequence)

    def release(self, sequence: Sequence) -> None:
        """Take back all that a sequence holds, or its place in the queue. Not before `complete`."""
        assert self._in_flight is None, "a replay that names the sequence is about to begin"
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
            return
        held = self.prefilling if sequence in self.prefilling else self.decoding
        held.remove(sequence)
        if sequence in self._owed:
            self._owed.remove(sequence)
        full, _ = self._needs(sequence)
        self.full_pages.reserve(len(sequence.full_pages) - full)
        self.window_pages.reserve(len(sequence.window_pages) - sequence.window_reserved)
        for page in sequence.full_pages:
            self.full_pages.give(page)
        for page in sequence.window_pages:
            self.window_pages.give(page)
        self.slots.give(sequence.slot)
        sequence.full_pages.clear()
        sequence.window_pages.clear()

    def accounting(self) -> dict[str, Account]:
        """Balance of slots and pages, live ones counted from the running sequences."""
        running = self.prefilling + self.decoding
        return {
            "slots": self.slots.account(len(running)),
            "full_pages": self.full_pages.account(sum(len(s.full_pages) for s in running)),
            "window_pages": self.window_pages.account(sum(len(s.window_pages) for s in running)),
        }

    def check(self) -> None:
        """Assert that nothing is lost or held twice; cheap enough for every idle moment."""
        for name, account in self.accounting().items():
            assert account.free + account.live == account.total, f"{name}: {account}"
            assert account.reserved <= account.free, f"{name}: {account}"

    def _needs(self, sequence: Sequence) -> tuple[int, int]:
        """Most pages of full and of window layers that the sequence holds at once."""
        pages = -(-sequence.total // self._page)
        chunk = max(min(len(sequence.prompt), self._extends[-1].tokens), self.steps)
        spanned = -(-(self._past + chunk - 1) // self._page) + 1
        return pages * self._has_full, min(pages, spanned, self._ring)

    def _extend(self, going: list[Sequence]) -> Plan | None:
        """A replay with prompt chunks in order of arrival and rows that are `going` on, or None
        without any chunk."""
        if not (prompts := len(self.prefilling) + len(self.waiting)):
            return None
        largest = self._extends[-1]
        rows = max(largest.rows - prompts, largest.rows // 2)
        riders = min(len(going), largest.tokens // 2, rows)
        plan, budget = Plan(largest), largest.tokens - riders
        for sequence in self._prompts():
            if budget == 0 or len(plan.slots) == largest.rows - riders:
                break
            if sequence.status is Status.WAITING and not self._admit(sequence, plan):
                break
            budget -= self._add_chunk(plan, sequence, budget)
        if not plan.slots:
            return None
        riders = min(len(going), budget + riders, largest.rows - len(plan.slots))
        self._owed = going[riders:]
        self._add_decoding(plan, going[:riders])
        plan.tokens += [0] * riders
        plan.bucket = _smallest(self._extends, len(plan.tokens), len(plan.slots))
        return plan

    def _prompts(self) -> Iterator[Sequence]:
        """Prompts begun, then the queue's head for as long as each one is admitted."""
        yield from self.prefilling.copy()
        while self.waiting:
            yield self.waiting[0]

    def _decode(self) -> Plan:
        """A replay of the next owed rows: of many steps, unless a prompt waits or a ring is full."""
        most = self._decodes[-1].rows
        rows, self._owed = self._owed[:most], self._owed[most:]
        plan = Plan(_smallest(self._decodes, len(rows), len(rows)))
        fits = all(self._room(row) >= min(self.steps, _left(row)) for row in rows)
        plan.steps = self.steps if fits and not (self.waiting or self.prefilling) else 1
        self._add_decoding(plan, rows)
        return plan

    def _admit(self, sequence: Sequence, plan: Plan) -> bool:
        """Give the head of the queue its slot and reservations if they are there."""
        full, window = self._needs(sequence)
        if (
            self.slots.available < 1
            or self.full_pages.available < full
            or self.window_pages.available < window
        ):
            return False
        assert self.waiting.popleft() is sequence, "the queue is served in order"
        self.slots.reserve(1)
        self.full_pages.reserve(full)
        self.window_pages.reserve(window)
        sequence.window_reserved = window
        sequence.start(self.slots.take())
        self.prefilling.append(sequence)
        plan.admissions.append(sequence)
        return True

    def _add_chunk(self, plan: Plan, sequence: Sequence, budget: int) -> int:
        """Add a row with up to `budget` prompt tokens; return how many."""
        start, prompt = sequence.length, sequence.prompt
        count = min(budget, len(prompt) - start, self._room(sequence))
        self._grow(plan, sequence, start + count)
        plan.sequences.append(sequence)
        plan.slots.append(sequence.slot)
        plan.counts.append(count)
        plan.flags.append(SAMPLE if start + count == len(prompt) else 0)
        plan.tokens += prompt[start : start + count]
        return count

    def _add_decoding(self, plan: Plan, rows: list[Sequence]) -> None:
        """Add one-token rows that go on from their last sampled token."""
        for sequence in rows:
            length = sequence.length + min(plan.steps, _left(sequence))
            if length > sequence.capacity:
                self._grow(plan, sequence, length)
        plan.sequences += rows
        plan.slots += [sequence.slot for sequence in rows]
        plan.counts += [1] * len(rows)
        plan.flags += [SAMPLE | FROM_TABLE] * len(rows)

    def _room(self, sequence: Sequence) -> int:
        """Tokens that one replay may add: later pages would overwrite ring entries still read."""
        end = (sequence.window_first + self._ring) * self._page
        return end - sequence.length if self._ring else sequence.total

    def _grow(self, plan: Plan, sequence: Sequence, length: int) -> None:
        """Take the pages that `length` tokens need."""
        slot = sequence.slot
        for index in range(sequence.capacity // self._page, -(-length // self._page)):
            if self._has_full:
                sequence.full_pages.append(page := self.full_pages.take())
                plan.pages.append((FULL_TABLE, slot, index, page))
            if self._ring:
                sequence.window_pages.append(page := self.window_pages.take())
                plan.pages.append((WINDOW_TABLE, slot, index % self._ring, page))
            sequence.capacity += self._page

    def _free_window(self, sequence: Sequence) -> None:
        """Return window pages that the token at `length` and later ones cannot see."""
        first = (sequence.length - self._past) // self._page
        while sequence.window_first < first:
            self.window_pages.give(sequence.window_pages.popleft())
            self.window_pages.reserve(1)
            sequence.window_first += 1


def _left(sequence: Sequence) -> int:
    """Tokens that a sequence has yet to process; its last one is sampled and never processed."""
    return sequence.total - 1 - sequence.length


def _smallest(buckets: list[Bucket], tokens: int, rows: int) -> Bucket:
    """The smallest bucket that holds as much; the largest one always does."""
    return next(b for b in buckets if b.tokens >= tokens and b.rows >= rows)
