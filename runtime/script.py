"""Scheduling by hand, for tests and the curious: which rows, which chunk sizes, which bucket.

    with Script(engine) as script:
        script.step((a, 3))          # the first 3 tokens of request a's prompt
        script.step((a, 61), (b, 5)) # one replay, rows in this order
        script.step((b, 1), (a, 1))  # a row whose prompt is behind it decodes

A script takes the place of the scheduler's choice and of nothing else: slots, pages and accounting
are its own. Requests are submitted as usual; what is left after the block runs on as usual.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from inkling_engine.artifacts.spec import Bucket
from inkling_engine.runtime.plan import Plan, page_lines
from inkling_engine.runtime.requests import Request, Sequence, Status

if TYPE_CHECKING:
    from inkling_engine.runtime.engine import Engine

Row = tuple[Request | Sequence, int]


class Script:
    """Decides what `engine` runs while its block lasts, one replay at a time."""

    def __init__(self, engine: Engine) -> None:
        """Nothing changes before the block begins."""
        self._engine, self._scheduler = engine, engine.scheduler
        self._planned: Plan | None = None

    def __enter__(self) -> Self:
        """Take over; a replay begun ahead is collected first."""
        if self._engine._ahead:
            self._engine.step()
        self._scheduler.next = self._next  # type: ignore[method-assign]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Let the scheduler choose again."""
        del self._scheduler.next

    def step(self, *rows: Row, bucket: Bucket | None = None, steps: int = 1) -> list[Request]:
        """Run one replay with `rows`, each a request of one choice or a sequence, and its count:
        so many prompt tokens (behind those of a prefix hit), or 1 if its prompt is behind it. Returns
        the requests that it ended.

        `bucket` is the smallest that holds the rows unless given; `steps` more than 1 is for rows
        that all decode.
        """
        chosen = [(_sequence(row), count) for row, count in rows]
        extends = any(s.length < len(s.feed) for s, _ in chosen)
        fitting = self._fitting(extends, sum(count for _, count in chosen), len(chosen))
        plan = Plan(bucket or fitting[0], steps=steps)
        for sequence, count in chosen:
            self._add(plan, sequence, count)
        spec, pages = self._engine.spec, len(plan.pages)
        plan.bucket = bucket or next(b for b in fitting if page_lines(b, spec) >= pages)
        enough = page_lines(plan.bucket, spec) >= pages
        assert plan.bucket in fitting and enough, "a small bucket"
        decodes = plan.bucket.kind != "extend"
        assert steps == 1 or decodes, "replays of several steps only decode"
        if decodes:
            plan.tokens.clear()
        self._planned = plan
        return self._engine.step()

    def _fitting(self, extends: bool, tokens: int, rows: int) -> list[Bucket]:
        """Buckets that hold the rows, smallest first; an extend one also serves rows that decode."""
        buckets = [b for b in self._engine.spec.buckets if b.kind == "extend" or not extends]
        order = sorted(buckets, key=lambda b: (b.kind == "extend", b.tokens, b.rows))
        found = [b for b in order if b.tokens >= tokens and b.rows >= rows]
        assert found, f"no bucket holds {rows} rows with {tokens} tokens"
        return found

    def _add(self, plan: Plan, sequence: Sequence, count: int) -> None:
        """Add a row as the scheduler would."""
        scheduler = self._scheduler
        assert sequence.status is not Status.FINISHED, "the sequence has ended"
        if sequence.length >= len(sequence.feed):
            assert count == 1, f"a row that decodes takes 1 token, not {count}"
            assert sequence.left > 0, "the sequence has no token left"
            scheduler._add_decoding(plan, [sequence])
            assert plan.sequences[-1:] == [sequence], "there is no page for the sequence"
            return
        if sequence.status is Status.WAITING:
            scheduler.waiting.remove(sequence)
            scheduler.waiting.insert(0, sequence)
            scheduler._short = False
            assert scheduler._admit(), "there is no slot or page for the sequence"
        taken = scheduler._add_chunk(plan, sequence, count, 0)
        assert taken == count, f"{taken} of {count} prompt tokens are left or have room"

    def _next(self) -> Plan | None:
        """What the engine asks the scheduler for."""
        plan, self._planned = self._planned, None
        if plan:
            self._scheduler._owed, self._scheduler._in_flight = [], plan
        return plan


def _sequence(row: Request | Sequence) -> Sequence:
    if isinstance(row, Sequence):
        return row
    assert len(row.sequences) == 1, "a request of several choices: name the sequence"
    return row.sequences[0]
