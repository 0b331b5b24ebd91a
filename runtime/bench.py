"""Latency and throughput of an engine folder: what `inkling-engine bench` prints.

The same prompts are run again and again through the engine's own loop. Decoding is measured in each
way the engine knows, turn by turn: synchronously (replay, copy the token, wait), with the next
replay begun before the last one's results are read, and with several steps in one replay.
"""

from __future__ import annotations

import os
import platform
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, quantiles, stdev
from time import perf_counter
from typing import TYPE_CHECKING, Any

from inkling_engine.artifacts.compat import Environment
from inkling_engine.artifacts.store import open_manifest
from inkling_engine.runtime import usage
from inkling_engine.runtime.debug import force_accept
from inkling_engine.runtime.drafts import render_drafts, replay_steps
from inkling_engine.runtime.engine import Engine
from inkling_engine.runtime.errors import FailedError, UsageError
from inkling_engine.runtime.requests import Sequence as Row
from inkling_engine.runtime.sampling import SamplingParams
from inkling_engine.runtime.stats import whole_logits
from inkling_engine.runtime.trace import tracing

if TYPE_CHECKING:
    import torch

_STEPS = 16  # in one replay, unless told otherwise


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is run: `batch` prompts of `context` random tokens, `tokens` new ones for each, `repeat`
    times in each way. With `accept`, every round of drafting accepts so many drafts: what a model that
    guesses so well would take, with other tokens."""

    batch: int = 1
    context: int = 128
    tokens: int = 128
    repeat: int = 5
    accept: int | None = None


@dataclass
class Way:
    """One way to decode, and what its runs took: seconds of each step (with drafting: of each token of
    the slowest row), tokens a second of all rows; seconds to each row's first token, and to all rows'."""

    name: str
    overlap: bool
    steps: int
    step: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)


def measure(folder: Path, work: Work, trace: Path | None = None, **load: Any) -> dict[str, Any]:
    """Load the engine with `load`, run `work`, and tell what it took as plain JSON values.

    A `trace` of all runs costs some of the speed that is measured.
    """
    if "steps_per_replay" not in load:
        spec = open_manifest(folder).spec
        load["steps_per_replay"] = min(_STEPS, replay_steps(spec))
    load.setdefault("prefix_cache", False)  # the same prompts come again and again
    started = _process_age()
    with Engine.load(folder, **load) as engine, tracing(engine, trace):
        _require_fit(work, engine)
        ways = _ways(engine)
        for way in ways:
            _run(engine, work, way)
        counted = [Way(way.name, way.overlap, way.steps) for way in ways]  # the first was to warm
        before = engine.drafts.copy()
        for _ in range(work.repeat):
            for way in counted:
                _run(engine, work, way)
        return {
            "engine_id": engine.manifest.engine_id,
            **_about(engine.pool.tensors["kv_full"].device),
            **usage.report(engine),
            "work": asdict(work),
            "load": {"process": started, **engine.timings},
            "prefill": _prefill(work, counted),
            "decode": [_decode(way, counted[0]) for way in counted],
            "drafts": engine.drafts.since(before).report() if before.proposed else None,
            "whole_logits": dict(zip(("steps", "samples"), whole_logits(engine), strict=True)),
        }


def render(report: dict[str, Any]) -> str:
    """The report for people."""
    work, prefill = report["work"], report["prefill"]
    phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in report["load"].items())
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    first = prefill["first_token_ms"]
    facts = {
        "engine": report["engine_id"],
        "device": report["device"],
        "versions": versions,
        "load": f"{sum(report['load'].values()):.3f} s: {phases}",
        "work": f"batch {work['batch']}, context {work['context']}, tokens {work['tokens']}, "
        f"{work['repeat']} times",
        "prefill": f"{prefill['tokens_per_second']:,.0f} tokens/s; first token after "
        f"{first['mean']:.3f} ms (p50 {first['p50']:.3f}, p95 {first['p95']:.3f})",
    }
    if ranks := report.get("ranks"):
        facts["ranks"] = usage.render(ranks)
    if report["drafts"]:
        facts["drafts"] = render_drafts(report["drafts"])
    if report["whole_logits"]["steps"]:
        facts["gathered"] = "whole logits in {steps} steps, for {samples} samples".format(
            **report["whole_logits"]
        )
    columns = ("mean", "stdev", "p50", "p95")
    lines = [f"{name:<9} {text}" for name, text in facts.items()]
    names = "".join(f"{name:>9}" for name in columns)
    unit = "token" if report["drafts"] else "step"
    lines.append(f"{f'decode, ms a {unit}':28}{names}{'tokens/s':>12}{'ratio':>7}")
    for way in report["decode"]:
        step = way["step_ms"]
        numbers = "".join(f"{step[name]:9.4f}" for name in columns)
        rate = f"{way['tokens_per_second']:12,.1f}{way['ratio']:7.3f}"
        lines.append(f"  {way['name']:26}{numbers}{rate}")
    return "\n".join(lines)


def _ways(engine: Engine) -> list[Way]:
    """The synchronous loop first; then what this engine can do beside it."""
    steps = engine.scheduler.steps
    ways = [Way("synchronous", False, 1)]
    if engine.overlap:
        ways.append(Way("overlapped", True, 1))
    if steps > 1:
        ways.append(Way(f"{steps} steps in one replay", engine.overlap, steps))
    return ways


def _require_fit(work: Work, engine: Engine) -> None:
    """Raise UsageError for more rows, tokens or drafts than the engine was built for."""
    spec = engine.spec
    if work.batch > spec.max_running:
        most = f"at most {spec.max_running} (max_running)"
        raise UsageError("--batch", work.batch, most, "use a smaller batch")
    if work.context + work.tokens > spec.max_context:
        found = work.context + work.tokens
        most = f"at most {spec.max_context} (max_context)"
        raise UsageError("--context + --tokens", found, most, "lower one of them")
    if work.accept is not None and not 0 <= work.accept <= spec.spec_depth:
        most = f"0 to {spec.spec_depth} (spec_depth)"
        raise UsageError("--accept", work.accept, most, "choose one of them, or leave it out")


def _run(engine: Engine, work: Work, way: Way) -> None:
    """Run the prompts once in `way` until each row has its tokens; add the times to `way`."""
    engine.overlap, engine.scheduler.steps = way.overlap, way.steps
    draw, spec = random.Random(0), engine.spec
    # Rows whose prompts come first decode while the others' come, and must not end before them.
    chunks = 2 * work.batch * work.context // max(bucket.tokens for bucket in spec.buckets)
    ahead = (chunks + work.batch + way.steps) * (1 + spec.spec_depth)
    most = min(work.tokens + ahead, spec.max_context - work.context)
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False)
    prompts = [
        draw.choices(range(spec.shape.real_vocab), k=work.context) for _ in range(work.batch)
    ]
    start = perf_counter()
    requests = [engine.submit(prompt, params) for prompt in prompts]
    for request in requests if work.accept is not None else ():
        force_accept(engine, request, work.accept or 0)
    rows = [request.sequences[0] for request in requests]
    first: dict[int, float] = {}
    marks: list[tuple[int, float]] = []  # when the last row had so many tokens
    while not marks or marks[-1][0] < work.tokens:
        _require_running(rows)
        engine.step()
        now = perf_counter() - start
        for at, row in enumerate(rows):
            if row.tokens:
                first.setdefault(at, now)
        least = min(len(row.tokens) for row in rows)
        if least > (marks[-1][0] if marks else 0):
            marks.append((least, now))
    for request in requests:
        engine.abort(request)
    engine.step()  # reads what was begun ahead
    way.step += [
        (later - earlier) / (many - few) for (few, earlier), (many, later) in pairwise(marks)
    ]
    (few, begin), (many, end) = marks[0], marks[-1]
    way.rate.append(len(rows) * (many - few) / (end - begin))
    way.first += first.values()
    way.prefill.append(max(first.values()))


def _require_running(rows: Sequence[Row]) -> None:
    """Raise unless all rows go on: they decode together, or it is another measurement."""
    for row in rows:
        if row.finish_reason == "error":
            remedy = "check the weights, or draw others"
            raise FailedError("bench", "non-finite logits", "finite logits", remedy)
        if row.finish_reason:
            remedy = "use a smaller batch or a shorter context"
            raise UsageError("--batch", len(rows), "rows that fit in together", remedy)


def _prefill(work: Work, ways: Sequence[Way]) -> dict[str, Any]:
    seconds = mean(value for way in ways for value in way.prefill)
    first = [value for way in ways for value in way.first]
    rate = work.batch * work.context / seconds
    return {"tokens_per_second": rate, "first_token_ms": _spread(first)}


def _decode(way: Way, base: Way) -> dict[str, Any]:
    """Numbers of one way; `ratio` is how many times the rate of `base` it has."""
    return {
        "name": way.name,
        "overlap": way.overlap,
        "steps_per_replay": way.steps,
        "step_ms": _spread(way.step),
        "tokens_per_second": mean(way.rate),
        "ratio": mean(way.rate) / mean(base.rate),
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, deviation and quantiles in milliseconds."""
    values = [1e3 * value for value in seconds]
    cuts = quantiles(values, n=20, method="inclusive") if len(values) > 1 else values * 19
    deviation = stdev(values) if len(values) > 1 else 0.0
    return {"mean": mean(values), "stdev": deviation, "p50": cuts[9], "p95": cuts[18]}


def _process_age() -> float:
    """Seconds since this process began, to the system's clock tick; 0 where that is not told."""
    path = Path("/proc/self/stat")
    if not path.is_file():
        return 0.0
    ticks = int(path.read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _about(device: torch.device) -> dict[str, Any]:
    """Where, and with what."""
    found = Environment.current()
    versions = {
        "engine": found.engine,
        "python": platform.python_version(),
        "torch": found.torch,
        "cuda": found.cuda,
    }
    return {"device": usage.device_name(device), "versions": versions}
