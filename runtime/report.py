"""A chart of a run, from its trace: padding by bucket, and how full the pools were over time.

Plain SVG, written by hand: two panels of bars and lines need no plotting library, and the file opens
anywhere. Many replays are drawn as the fullest moment of each pixel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated
from xml.sax.saxutils import escape

import msgspec

from inkling_engine.runtime.errors import UsageError
from inkling_engine.runtime.trace import COUNTERS, REPLAYS, Event, read_events

WIDTH, LEFT, RIGHT, TOP, PLOT, BAR, LEGEND = 960, 150, 260, 60, 240, 22, 18  # pixels
_ROOM = WIDTH - LEFT - RIGHT
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_USED, _PADDING, _GRID = "#0072b2", "#d9d9d9", "#e8e8e8"

Line = list[tuple[float, float]]
_Count = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(slots=True)
class Bucket:
    """Of one bucket: replays, and token places of its steps, used and in all."""

    replays: int = 0
    used: int = 0
    places: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Run:
    """What a chart shows: buckets by name; by pool what is live, and by pool what the prefix cache
    holds beside it, as microseconds and share of the pool; the last microsecond."""

    buckets: dict[str, Bucket] = field(default_factory=dict)
    live: dict[str, Line] = field(default_factory=dict)
    held: dict[str, Line] = field(default_factory=dict)
    end: float = 0.0


class _Facts(msgspec.Struct):
    """Of a replay's event, what the chart shows."""

    tokens: int
    steps: _Count
    drafted: int
    bucket_tokens: _Count


class _Replay(msgspec.Struct):
    """A replay's event."""

    name: str
    dur: float
    args: _Facts


class _Pool(msgspec.Struct):
    """How many of a pool are what; of the queue's counters none are."""

    live: int = 0
    free: int | None = None
    pinned: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return max(self.live + (self.free or 0) + self.pinned, 1)


class _Counters(msgspec.Struct):
    """An event with counters."""

    name: str
    ts: float
    args: _Pool


def summarise(events: Iterable[Event]) -> Run:
    """Gather what the chart shows. Raises UsageError for events that no trace has."""
    run = Run()
    try:
        for event in events:
            if event.get("cat") == REPLAYS:
                _add_replay(run, msgspec.convert(event, _Replay))
            elif event.get("ph") == COUNTERS:
                _add_counters(run, msgspec.convert(event, _Counters))
    except msgspec.ValidationError as error:
        raise UsageError("TRACE", str(error), "a file that --trace wrote", "give one") from error
    return run


def _add_replay(run: Run, event: _Replay) -> None:
    bucket, args = run.buckets.setdefault(event.name, Bucket()), event.args
    bucket.replays += 1
    bucket.used += args.tokens * args.steps + args.drafted
    bucket.places += args.bucket_tokens * args.steps
    bucket.seconds += event.dur / 1e6


def _add_counters(run: Run, event: _Counters) -> None:
    name, now, args = event.name, event.ts, event.args
    if args.free is None:
        return
    run.live.setdefault(name, []).append((now, args.live / args.total))
    if args.pinned:
        run.held.setdefault(name, []).append((now, (args.live + args.pinned) / args.total))
    run.end = max(run.end, now)


def chart(trace: Path, out: Path) -> Run:
    """Draw the trace file `trace` as the SVG file `out`. Raises UsageError for a file that is no
    trace or has no replay, or cannot be written."""
    run = summarise(read_events(trace))
    if not run.buckets:
        raise UsageError("TRACE", f"{trace} without a replay", "a run", "trace one that runs")
    try:
        out.write_text(render(run))
    except OSError as error:
        found = f"{out} ({error.strerror})"
        raise UsageError("--out", found, "a file to write", "choose another") from error
    return run


def render(run: Run) -> str:
    """The SVG."""
    bars = TOP + (BAR + 8) * len(run.buckets)
    height = bars + TOP + PLOT + 50
    size = f'width="{WIDTH}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">',
        f'<rect {size} fill="white"/>',
        *_bars(run),
        *_occupancy(run, bars + TOP),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _bars(run: Run) -> Iterator[str]:
    """A bar for each bucket: its share of used token places."""
    yield _text(LEFT, 28, "Token places by bucket: used, and padding", size=15)
    for row, (name, bucket) in enumerate(sorted(run.buckets.items())):
        y = TOP - 10 + row * (BAR + 8)
        used = _ROOM * bucket.used / bucket.places
        yield _text(LEFT - 8, y + 15, name, anchor="end")
        yield _box(LEFT, y, used, _USED)
        yield _box(LEFT + used, y, _ROOM - used, _PADDING)
        padding = 1 - bucket.used / bucket.places
        facts = f"{padding:.1%} padding, {bucket.replays} replays, {bucket.seconds:.3g} s"
        yield _text(LEFT + _ROOM + 8, y + 15, facts)


def _occupancy(run: Run, top: float) -> Iterator[str]:
    """A line for each pool: its share of slots or pages that requests held, over time."""
    yield _text(LEFT, top - 16, "Pool occupancy over the run", size=15)
    for percent in range(0, 101, 25):
        y = top + PLOT * (1 - percent / 100)
        yield f'<path d="M{LEFT} {y:.1f}h{_ROOM}" stroke="{_GRID}"/>'
        yield _text(LEFT - 8, y + 4, f"{percent} %", anchor="end")
    for quarter in range(5):
        seconds = run.end / 1e6 * quarter / 4
        x = LEFT + _ROOM * quarter / 4
        yield _text(x, top + PLOT + 20, f"{seconds:.3g} s", anchor="middle")
    for at, (name, points) in enumerate(run.live.items()):
        colour, y = _COLOURS[at % len(_COLOURS)], top + LEGEND * at
        yield _line(points, run.end, top, f'stroke="{colour}" stroke-width="1.5"')
        if held := run.held.get(name):
            yield _line(held, run.end, top, f'stroke="{colour}" stroke-dasharray="3 3"')
        yield _box(LEFT + _ROOM + 8, y, 12, colour, 12)
        peak = max(share for _, share in points)
        yield _text(LEFT + _ROOM + 26, y + 11, f"{name}: peak {peak:.1%}")
    if run.held:
        y = top + LEGEND * len(run.live)
        yield _text(LEFT + _ROOM + 26, y + 11, "dashed: with the prefix cache's")


def _line(points: Line, end: float, top: float, style: str) -> str:
    path = "L".join(f"{LEFT + x} {top + PLOT * (1 - y):.1f}" for x, y in _by_pixel(points, end))
    return f'<path d="M{path}" fill="none" {style}/>'


def _by_pixel(points: Line, end: float) -> list[tuple[int, float]]:
    """The fullest moment of each pixel column."""
    columns: dict[int, float] = {}
    for time, share in points:
        x = int(_ROOM * time / max(end, 1e-9))
        columns[x] = max(share, columns.get(x, 0.0))
    return sorted(columns.items())


def _box(x: float, y: float, width: float, colour: str, height: float = BAR) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f"<text {place}>{escape(text)}</text>"
