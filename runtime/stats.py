"""What an engine has done: `EngineStats`, a plain snapshot, and the same as Prometheus text.

A `StatsCollector` is an observer of an engine's replays. It counts, and keeps latencies in bins
that grow by 2 %, so that its memory does not grow with the traffic. Attach it right after the load.
Without one nothing is counted and a step costs nothing more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING

from inkling_engine.artifacts.layout import program_name
from inkling_engine.kernels.table import FROM_TABLE, SAMPLE, WHOLE_SAMPLES, WHOLE_STEPS
from inkling_engine.runtime.capacity import Account
from inkling_engine.runtime.drafts import DraftStats
from inkling_engine.runtime.plan import Plan
from inkling_engine.runtime.requests import FinishReason, Sequence, Status

if TYPE_CHECKING:
    from inkling_engine.runtime.engine import Engine

QUANTILES = (0.5, 0.9, 0.99)
_GROWTH = math.log(1.02)
_LEAST = 1e-7  # seconds; all that is shorter shares a bin


@dataclass(slots=True)
class BucketStats:
    """Replays of one bucket. Rows and tokens are summed over steps: those that a plan named (and the
    drafts that were verified), and those that only filled the shape. `seconds` are those of the
    device, replay after replay."""

    replays: int = 0
    steps: int = 0
    rows: int = 0
    row_padding: int = 0
    tokens: int = 0
    token_padding: int = 0
    seconds: float = 0.0

    def add(self, plan: Plan, seconds: float) -> None:
        """Count one replay."""
        steps, bucket = plan.steps, plan.bucket
        rows, tokens = len(plan.slots), sum(plan.counts) * steps + plan.drafted
        self.replays += 1
        self.steps += steps
        self.rows += rows * steps
        self.row_padding += (bucket.rows - rows) * steps
        self.tokens += tokens
        self.token_padding += bucket.tokens * steps - tokens
        self.seconds += seconds


@dataclass(frozen=True, slots=True)
class Latency:
    """How long something took: how often, seconds in all, and seconds by quantile (to 1 %)."""

    count: int
    seconds: float
    quantiles: dict[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot. Requests are counted by choice; `first_token` is measured from the arrival of the
    request, `per_token` is a choice's mean over the tokens after its first one. `whole_logits` are steps
    in which ranks gathered whole logits since the load, and the samples that were drawn from them."""

    seconds: float
    waiting: int
    running: int
    finished: dict[FinishReason, int]
    prompt_tokens: int
    generated_tokens: int
    buckets: dict[str, BucketStats]
    pools: dict[str, Account]
    prefix_hits: int
    prefix_tokens: int
    preemptions: int
    whole_logits: tuple[int, int]
    drafts: DraftStats
    first_token: Latency
    per_token: Latency


@dataclass(slots=True)
class Histogram:
    """Seconds in bins that grow by 2 %."""

    count: int = 0
    seconds: float = 0.0
    bins: Counter[int] = field(default_factory=Counter)

    def add(self, seconds: float) -> None:
        """Count one."""
        self.count += 1
        self.seconds += seconds
        self.bins[round(math.log(max(seconds, _LEAST)) / _GROWTH)] += 1

    def latency(self) -> Latency:
        """The snapshot; quantiles are the middles of their bins, none without a count."""
        quantiles = {q: self._quantile(q) for q in QUANTILES} if self.count else {}
        return Latency(self.count, self.seconds, quantiles)

    def _quantile(self, q: float) -> float:
        left = math.ceil(q * self.count)
        for at in sorted(self.bins):
            left -= self.bins[at]
            if left <= 0:
                break
        return math.exp(at * _GROWTH)


class StatsCollector:
    """Observes an engine from its creation on; `stats` may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        """Attach to `engine`."""
        self._engine, self._start = engine, perf_counter()
        self._prompt_tokens = self._generated_tokens = self._hits = 0
        self._buckets: dict[str, BucketStats] = {}
        self._first_token, self._per_token = Histogram(), Histogram()
        self._began: dict[Sequence, float] = {}  # when the first token was there
        self._most = engine.spec.max_running
        self._last = 0.0
        engine.observers.append(self)

    def __call__(self, plan: Plan, began: float, ended: float, tokens: int) -> None:
        """Count a replay."""
        bucket = self._buckets.setdefault(program_name(plan.bucket), BucketStats())
        bucket.add(plan, ended - max(began, self._last))
        self._last = ended
        self._generated_tokens += tokens
        self._hits += len(plan.sources)
        if plan.tokens:
            self._start_rows(plan, ended)
        self._end_rows(plan, ended)

    def stats(self) -> EngineStats:
        """The snapshot. Waits for a running step to end: not for use in an observer."""
        engine = self._engine
        with engine._lock:
            scheduler = engine.scheduler
            return EngineStats(
                seconds=perf_counter() - self._start,
                waiting=len(scheduler.waiting),
                running=len(scheduler.prefilling) + len(scheduler.decoding),
                finished=dict(engine.finished),
                prompt_tokens=self._prompt_tokens,
                generated_tokens=self._generated_tokens,
                buckets={name: replace(bucket) for name, bucket in self._buckets.items()},
                pools=scheduler.accounting(),
                prefix_hits=self._hits,
                prefix_tokens=scheduler.cached_tokens,
                preemptions=scheduler.preemptions,
                whole_logits=whole_logits(engine),
                drafts=engine.drafts.copy(),
                first_token=self._first_token.latency(),
                per_token=self._per_token.latency(),
            )

    def _start_rows(self, plan: Plan, ended: float) -> None:
        """Count prompt tokens, and the first tokens of prompts that this replay completed."""
        for sequence, count, flags in zip(plan.sequences, plan.counts, plan.flags, strict=True):
            if flags & FROM_TABLE:
                continue
            self._prompt_tokens += count
            if flags & SAMPLE and sequence.tokens and sequence not in self._began:
                self._first_token.add(ended - sequence.request.arrived)
                self._began[sequence] = ended

    def _end_rows(self, plan: Plan, ended: float) -> None:
        """Count the pace of rows that ended; forget those that were aborted, now and then."""
        for sequence in plan.sequences:
            if sequence.status is Status.FINISHED and sequence in self._began:
                seconds, count = ended - self._began.pop(sequence), len(sequence.tokens) - 1
                if count and sequence.finish_reason != "abort":
                    self._per_token.add(seconds / count)
        if len(self._began) > self._most:
            left = [s for s in self._began if s.status is not Status.FINISHED]
            self._began = {sequence: self._began[sequence] for sequence in left}
            self._most = 2 * max(len(left), self._engine.spec.max_running)


def whole_logits(engine: Engine) -> tuple[int, int]:
    """Steps of several ranks whose candidates did not prove every token, and samples that they did not
    prove, since the load; zeros of one rank, and once the engine is closed."""
    counter = engine.pool.tensors.get("step_counter")
    counts = [0] * 4 if counter is None else counter.tolist()
    return counts[WHOLE_STEPS], counts[WHOLE_SAMPLES]


def by_state(account: Account) -> dict[str, int]:
    """Counts that add up to the total."""
    counts = asdict(account)
    total = counts.pop("total")
    assert sum(counts.values()) == total, f"an account does not add up: {account}"
    return counts


Sample = tuple[Mapping[str, object], float]


def prometheus(stats: EngineStats) -> str:
    """The snapshot in Prometheus' text format 0.0.4, for a scrape or a node exporter's textfile."""
    lines = []
    for name, kind, text, samples in _families(stats):
        full = f"inkling_engine_{name}"
        lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
        lines += [f"{full}{_labels(labels)} {value}" for labels, value in samples]
    for name, text, latency in (
        ("time_to_first_token_seconds", "From arrival to the first token.", stats.first_token),
        ("time_per_output_token_seconds", "Mean of a choice's later tokens.", stats.per_token),
    ):
        full = f"inkling_engine_{name}"
        lines += [f"# HELP {full} {text}", f"# TYPE {full} summary"]
        lines += [f'{full}{{quantile="{q}"}} {value}' for q, value in latency.quantiles.items()]
        lines += [f"{full}_sum {latency.seconds}", f"{full}_count {latency.count}"]
    return "\n".join(lines) + "\n"


def _families(stats: EngineStats) -> Iterator[tuple[str, str, str, list[Sample]]]:
    """Name, type, help and samples of everything but latencies."""
    for name, text, value in (
        ("requests_waiting", "Choices in the queue.", stats.waiting),
        ("requests_running", "Choices in a slot.", stats.running),
    ):
        yield name, "gauge", text, [({}, value)]
    finished: list[Sample] = [({"reason": r}, count) for r, count in stats.finished.items()]
    yield "requests_finished_total", "counter", "Choices that ended.", finished
    for name, text, value in (
        ("prompt_tokens_total", "Prompt tokens computed.", stats.prompt_tokens),
        ("generation_tokens_total", "Tokens generated.", stats.generated_tokens),
        ("prefix_hits_total", "Prompts that began from the prefix cache.", stats.prefix_hits),
        ("prefix_hit_tokens_total", "Prompt tokens not computed.", stats.prefix_tokens),
        ("preemptions_total", "Times that a running choice lost its pages.", stats.preemptions),
        ("whole_logits_steps_total", "Steps that gathered whole logits.", stats.whole_logits[0]),
        ("whole_logits_samples_total", "Samples drawn from these.", stats.whole_logits[1]),
    ):
        yield name, "counter", text, [({}, value)]
    yield from _draft_families(stats.drafts)
    by_bucket = {name: asdict(bucket) for name, bucket in stats.buckets.items()}
    for name, text, key in (
        ("replays_total", "Replays.", "replays"),
        ("steps_total", "Steps of replays.", "steps"),
        ("replay_seconds_total", "Time of replays.", "seconds"),
    ):
        values: list[Sample] = [({"bucket": b}, found[key]) for b, found in by_bucket.items()]
        yield name, "counter", text, values
    for name, text, used, padding in (
        ("rows_total", "Rows of steps.", "rows", "row_padding"),
        ("token_places_total", "Token places of steps.", "tokens", "token_padding"),
    ):
        samples: list[Sample] = []
        for bucket, found in by_bucket.items():
            for label, key in (("used", used), ("padding", padding)):
                samples.append(({"bucket": bucket, "kind": label}, found[key]))
        yield name, "counter", text, samples
    occupancy: list[Sample] = [
        ({"pool": pool, "state": state}, count)
        for pool, account in stats.pools.items()
        for state, count in by_state(account).items()
    ]
    yield "pool", "gauge", "Slots and pages by state.", occupancy


def _draft_families(drafts: DraftStats) -> Iterator[tuple[str, str, str, list[Sample]]]:
    """The same of drafting, where there is some."""
    if not drafts.proposed:
        return
    for name, text, value in (
        ("draft_rounds_total", "Rounds that had drafts.", drafts.rounds),
        ("draft_round_tokens_total", "Tokens that these rounds gave.", drafts.tokens),
    ):
        yield name, "counter", text, [({}, value)]
    for name, text, counts in (
        ("drafts_proposed_total", "Drafts verified, by depth.", drafts.proposed),
        ("drafts_accepted_total", "Drafts accepted, by depth.", drafts.accepted),
    ):
        samples: list[Sample] = [({"depth": at}, count) for at, count in enumerate(counts, 1)]
        yield name, "counter", text, samples


def _labels(labels: Mapping[str, object]) -> str:
    inside = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""
