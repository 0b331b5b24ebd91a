"""`Plan`: what the scheduler decides, the row buffer says and the collector reads back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from inkling_engine.artifacts.spec import Bucket, EngineSpec
from inkling_engine.runtime.requests import PageLine, Sequence


@dataclass(slots=True)
class Plan:
    """One replay: for each row its sequence, slot, token count and flags.

    `tokens` holds the rows' token ids, packed in row order, or nothing if all rows take theirs
    from the request table; `admissions` are the sequences that enter their slot with this replay;
    `pages` are (table, slot, index, page) lines; `snapshots` are sequences with the destinations of
    the grid boundaries that they cross; `sources` are rows that start from a snapshot, with its
    slot. Rows that go on from their last sampled token do so `steps` times; one that ends on the way
    is inert for the rest. Their count is 1; `drafted` counts the drafts that they verified beside,
    once the results are known.
    """

    bucket: Bucket
    sequences: list[Sequence] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    admissions: list[Sequence] = field(default_factory=list)
    pages: list[PageLine] = field(default_factory=list)
    steps: int = 1
    drafted: int = 0
    sources: dict[int, int] = field(default_factory=dict)
    snapshots: list[tuple[Sequence, list[int]]] = field(default_factory=list)


class Flight(NamedTuple):
    """A replay that has begun: its plan, first step's number, when, and what waits for its end."""

    plan: Plan
    step: int
    began: float
    wait: Callable[[], None]


def page_lines(bucket: Bucket, spec: EngineSpec) -> int:
    """How many page lines a replay takes: those of its tokens and drafts, in two tables, and two a row
    more."""
    ahead = bucket.rows * spec.spec_depth
    return 2 * ((bucket.tokens + ahead) // spec.page_size + 2 * bucket.rows)


def smallest(buckets: list[Bucket], plan: Plan, spec: EngineSpec) -> Bucket:
    """The first of `buckets`, sorted by size, that holds the plan; the last one always does."""
    tokens, rows, lines = sum(plan.counts), len(plan.slots), len(plan.pages)
    fits = (b for b in buckets if b.tokens >= tokens and b.rows >= rows)
    return next(b for b in fits if page_lines(b, spec) >= lines)
