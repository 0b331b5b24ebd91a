"""`--trace FILE`: steps, buckets and rows of a run, as a file that Perfetto and Chrome open.

Chrome's JSON array format, one event a line: a track of replays, a track for each slot with the rows
that named it, counters of the pools and the queue. Each replay is one write of whole lines, so the
file of a process that died lacks nothing but its closing bracket, which readers do without.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec

from inkling_engine.artifacts.layout import program_name
from inkling_engine.kernels.table import FROM_TABLE
from inkling_engine.runtime.errors import UsageError
from inkling_engine.runtime.plan import Plan
from inkling_engine.runtime.stats import by_state

if TYPE_CHECKING:
    from inkling_engine.runtime.engine import Engine

log = logging.getLogger("inkling_engine.trace")
Event = dict[str, Any]
REPLAYS, COUNTERS, PROCESS = "replay", "C", 1  # category, phase, and the one process id


class Trace:
    """Observes an engine and writes each replay down. Times are microseconds since the creation."""

    def __init__(self, engine: Engine, path: Path) -> None:
        """Begin the file at `path`, replacing what is there, and attach to `engine`."""
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:
            found = f"{path} ({error.strerror})"
            raise UsageError("--trace", found, "a file to write", "choose another") from error
        self._engine, self._separator = engine, b"[\n"
        self._start = self._last = perf_counter()
        self._named: set[int] = set()
        self._broken = False
        self._write([_name("process_name", 0, engine.manifest.engine_id), _name_track(0)])
        engine.observers.append(self)

    def __call__(self, plan: Plan, began: float, ended: float, tokens: int) -> None:
        """Write a replay, its rows and the pools after it."""
        start = max(began, self._last)  # one begun ahead runs when the one before it has ended
        self._last = ended
        ts, dur = self._us(start), round(1e6 * (ended - start), 1)
        bucket, rows = plan.bucket, zip(plan.counts, plan.flags, strict=True)
        facts = {
            "rows": len(plan.slots),
            "bucket_rows": bucket.rows,
            "tokens": sum(plan.counts),
            "drafted": plan.drafted,
            "bucket_tokens": bucket.tokens,
            "steps": plan.steps,
            "prompt_tokens": sum(count for count, flags in rows if not flags & FROM_TABLE),
            "new_tokens": tokens,
            "ahead_us": round(1e6 * (start - began), 1),
        }
        replay = {
            "ph": "X",
            "cat": REPLAYS,
            "pid": PROCESS,
            "tid": 0,
            "name": program_name(bucket),
            "ts": ts,
            "dur": dur,
            "args": facts,
        }
        fresh = sorted(set(plan.slots) - self._named)
        self._named.update(fresh)
        counters = self._counters(self._us(ended))
        self._write([*map(_name_track, fresh), replay, *counters], _rows(plan, ts, dur))

    def close(self) -> None:
        """Detach, and close the array. Twice does no harm."""
        if self in self._engine.observers:
            self._engine.observers.remove(self)
            self._separator = b"\n]\n"
            self._write([])
            os.close(self._file)

    def _counters(self, now: float) -> Iterator[Event]:
        """How full the pools and how long the queue are."""
        scheduler = self._engine.scheduler
        counts = {name: by_state(account) for name, account in scheduler.accounting().items()}
        for name, values in {**counts, "queue": {"waiting": len(scheduler.waiting)}}.items():
            yield {"ph": COUNTERS, "pid": PROCESS, "name": name, "ts": now, "args": values}

    def _us(self, seconds: float) -> float:
        return round(1e6 * (seconds - self._start), 1)

    def _write(self, events: list[Event], encoded: Iterable[str] = ()) -> None:
        lines = [*map(msgspec.json.encode, events), *map(str.encode, encoded)]
        data = memoryview(self._separator + b",\n".join(lines))
        self._separator = b",\n"
        try:
            while data and not self._broken:
                data = data[os.write(self._file, data) :]
        except OSError as error:  # a full disk ends the trace, not the run
            self._broken = True
            log.warning("the trace ends here: %s", error)


@contextmanager
def tracing(engine: Engine, path: Path | None) -> Iterator[None]:
    """Write a trace of the block to `path`, or do nothing without one."""
    trace = Trace(engine, path) if path else None
    try:
        yield
    finally:
        if trace:
            trace.close()


def read_events(path: Path) -> Iterator[Event]:
    """The events of a trace file, whether it was closed or not, line by line.

    Raises UsageError for what is no such file.
    """
    try:
        with path.open("rb") as file:
            if file.readline() != b"[\n":
                raise ValueError("the first line is not `[`")
            for line in file:
                try:
                    yield msgspec.json.decode(line.rstrip(b",\n"), type=Event)
                except msgspec.DecodeError:
                    if line != b"]\n" and file.read(1):  # but a last line may be torn
                        raise
    except (OSError, ValueError) as error:
        found = f"{path}: {' '.join(str(error).split())}"
        raise UsageError("TRACE", found, "a file that --trace wrote", "give one") from error


def _rows(plan: Plan, ts: float, dur: float) -> Iterator[str]:
    """The spans of a plan's rows. By hand: they are many, and this takes a third of the time."""
    span, when = f'{{"ph":"X","pid":{PROCESS},"ts":{ts},"dur":{dur},"tid":', '"args":{"tokens":'
    rows = zip(plan.sequences, plan.slots, plan.counts, plan.flags, strict=True)
    for sequence, slot, count, flags in rows:
        kind = "decode" if flags & FROM_TABLE else "prompt"
        name = f"{kind} {sequence.request.id}.{sequence.index}"
        yield f'{span}{slot},"cat":"{kind}","name":"{name}",{when}{count * plan.steps}}}}}'


def _name(what: str, track: int, name: str) -> Event:
    return {"ph": "M", "pid": PROCESS, "tid": track, "name": what, "args": {"name": name}}


def _name_track(slot: int) -> Event:
    """The name of a slot's track, or of the replays', which is track 0."""
    return _name("thread_name", slot, f"slot {slot}" if slot else "replays")
