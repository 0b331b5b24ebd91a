"""How a batch job goes: counts while it runs, a line or a bar on stderr, a summary at its end.

Totals are of the whole job, those that an earlier run finished included; rates and latencies are
of this run. A token counts when its request has ended.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final

from inkling_engine.runtime.drafts import render_drafts

PERCENTILES: Final = (50, 90, 99, 100)
_LINE_SECONDS, _BAR_SECONDS = 10.0, 0.25
_UNWRITABLE: Final = (OSError, ValueError)  # full or read by nobody, closed


class Meter:
    """Counts of a job of `total` lines; `written` of them are in the output, `resumed` from before.

    `errors` counts failed lines by code; `cached_tokens` are those of this run that the prefix cache
    saved; `latencies` are seconds from submission to end.
    """

    def __init__(self, total: int) -> None:
        """Nothing is done; the clock starts."""
        self.total, self.written, self.resumed = total, 0, 0
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = 0
        self.errors: Counter[str] = Counter()
        self.latencies = array("f")
        self.start()

    def start(self) -> None:
        """What was counted so far is of earlier runs: rates count from here."""
        self.resumed, self._started = self.written, time.perf_counter()
        self._before = self.prompt_tokens, self.completion_tokens

    def count(self, error: str | None, usage: Mapping[str, int]) -> None:
        """One line more: its error's code or its usage."""
        self.written += 1
        if error is not None:
            self.errors[error] += 1
        self.prompt_tokens += usage.get("prompt_tokens", 0)
        self.completion_tokens += usage.get("completion_tokens", 0)

    @property
    def failed(self) -> int:
        """Lines answered with an error."""
        return self.errors.total()

    @property
    def seconds(self) -> float:
        """Since this run started."""
        return time.perf_counter() - self._started

    def rates(self) -> dict[str, float]:
        """Requests, prompt tokens and completion tokens a second."""
        seconds = max(self.seconds, 1e-9)
        prompt, completion = self._before
        return {
            "requests": (self.written - self.resumed) / seconds,
            "prompt_tokens": (self.prompt_tokens - prompt) / seconds,
            "completion_tokens": (self.completion_tokens - completion) / seconds,
        }

    def text(self) -> str:
        """Where the job is, in one line."""
        rates = self.rates()
        speed = f"{rates['prompt_tokens']:,.0f} in, {rates['completion_tokens']:,.0f} out tokens/s"
        left = "?"
        if rates["requests"] > 0:
            left = str(timedelta(seconds=round((self.total - self.written) / rates["requests"])))
        failed = f", {self.failed} failed" if self.failed else ""
        hits = f", {self.cached_tokens:,} from the cache" if self.cached_tokens else ""
        return f"{self.written}/{self.total} requests{failed}, {speed}{hits}, ETA {left}"

    def summary(self) -> dict[str, Any]:
        """Counts, tokens, rates and latencies, as `inkling-engine batch` prints them."""
        ordered = sorted(self.latencies)
        last = len(ordered) - 1
        latency = {f"p{p}": ordered[round(last * p / 100)] for p in PERCENTILES} if ordered else {}
        return {
            "requests": {
                "total": self.total,
                "succeeded": self.written - self.failed,
                "failed": self.failed,
                "resumed": self.resumed,
            },
            "errors": dict(sorted(self.errors.items())),
            "tokens": {
                "prompt": self.prompt_tokens,
                "completion": self.completion_tokens,
                "cached": self.cached_tokens,
            },
            "seconds": self.seconds,
            "per_second": self.rates(),
            "latency_seconds": latency,
        }


Watch = Callable[[Meter], object]  # shows how a job goes; called after every step


@contextmanager
def shown() -> Iterator[Watch]:
    """A watch that shows progress on stderr: a bar on a terminal, else a line every 10 seconds.

    It says no more once stderr cannot be written, which is no reason to end a job.
    """
    if sys.stderr is None or sys.stderr.closed:
        yield lambda meter: None
        return
    if not sys.stderr.isatty():
        yield _Every(
            _LINE_SECONDS, lambda m: print(f"batch: {m.text()}", file=sys.stderr, flush=True)
        )
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (BarColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, auto_refresh=False, transient=True)
    task = bar.add_task("")

    def show(meter: Meter) -> None:
        done = meter.written
        bar.update(task, total=meter.total, completed=done, description=meter.text())
        bar.refresh()

    try:
        with suppress(*_UNWRITABLE):
            bar.start()
        yield _Every(_BAR_SECONDS, show)
    finally:
        with suppress(*_UNWRITABLE):
            bar.stop()


def render(summary: Mapping[str, Any]) -> str:
    """A summary as lines for people."""
    requests, tokens, rates = summary["requests"], summary["tokens"], summary["per_second"]
    latency = ", ".join(
        f"{name} {value:.3f} s" for name, value in summary["latency_seconds"].items()
    )
    errors = ", ".join(f"{code} {count}" for code, count in summary["errors"].items())
    failed = f"{requests['failed']} failed" + (f" ({errors})" if errors else "")
    done = f"{requests['total']}, {requests['succeeded']} succeeded, {failed}"
    speed = ", ".join(f"{value:.1f} {name.replace('_', ' ')}/s" for name, value in rates.items())
    lines = [
        f"requests: {done}, {requests['resumed']} from before",
        f"tokens: {tokens['prompt']} in, {tokens['completion']} out, {tokens['cached']} from the cache",
        f"rates: {speed} over {summary['seconds']:.1f} s",
    ]
    lines += [f"latency: {latency}"] if latency else []
    lines += [f"drafts: {render_drafts(summary['drafts'])}"] if "drafts" in summary else []
    return "\n".join(lines)


class _Every:
    """Calls `show` at most once in `seconds`, beginning after as many."""

    def __init__(self, seconds: float, show: Watch) -> None:
        self._seconds, self._show, self._last = seconds, show, time.monotonic()

    def __call__(self, meter: Meter) -> None:
        """Show, if it is time."""
        if time.monotonic() - self._last >= self._seconds:
            try:
                self._show(meter)
            except _UNWRITABLE:
                self._seconds = float("inf")
            self._last = time.monotonic()
