#!/usr/bin/env python3
"""What serving costs: shared prompts with and without the prefix cache, and the scheduler's own time.

Prompts that share 90 % of their tokens run on two engines of one folder, with and without the cache,
by turns; stated are medians of whole runs. The scheduler is timed alone, without an engine: plans
and accounting of steady decoding at 256 live rows of inkling-small. `--idle-rows` profiles steady
decoding of a CUDA engine: which share of the time no kernel runs, between replays and in all.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from inkling_engine.compile.models.inkling.shape import preset
from inkling_engine.compile.options import BuildOptions, make_spec
from inkling_engine.runtime.requests import open_request
from inkling_engine.runtime.sampling import SamplingParams
from inkling_engine.runtime.scheduler import Scheduler

PROMPTS, LENGTH, SHARED, TOKENS, ROWS, STEPS = 64, 2000, 1800, 8, 256, 400
WARM, PROFILED, FIRST_KERNEL = 50, 40, "clear_kernel"


def main() -> int:
    """Measure and print; 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", type=Path, help="engine folder, for the shared prompts")
    parser.add_argument("--blocks", type=int, default=3, help="times that the two sides take turns")
    parser.add_argument("--idle-rows", type=int, help="rows of the profiled decoding (CUDA)")
    parser.add_argument("--random-weights", type=int, help="seed, for an engine without weights")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    report: dict[str, Any] = {"scheduler_us_per_step": scheduler_times()}
    if options.idle_rows:
        report["idle"] = idle_share(options.engine, options.idle_rows, options.random_weights)
    elif options.engine:
        report["shared_prompts_seconds"] = shared_prompts(options.engine, options.blocks)
    print(json.dumps(report) if options.json else render(report))
    return 0


def scheduler_times() -> dict[str, float]:
    """Microseconds of a steady decode step's plan and accounting."""
    shape = preset("inkling-small")
    assert shape is not None
    asked = BuildOptions(model="inkling-small", decode_buckets=str(ROWS), max_context=4096)
    spec = make_spec(asked, "inkling-small", shape, "cuda")
    scheduler = Scheduler(spec)
    params = SamplingParams(max_tokens=2 * STEPS, temperature=0)
    for number in range(ROWS):
        ids = [random.Random(number).randrange(1000) for _ in range(100)]
        (sequence,) = open_request(number, ids, params, spec, number, 0).sequences
        scheduler.add(sequence)
    while scheduler.waiting or scheduler.prefilling:
        take_step(scheduler)
    times = [take_step(scheduler) * 1e6 for _ in range(STEPS)]
    return {"mean": mean(times), "p95": quantiles(times, n=20)[-1], "rows": float(ROWS)}


def take_step(scheduler: Scheduler) -> float:
    """Seconds of one step; every row that samples gets a token."""
    start = time.perf_counter()
    plan = scheduler.next()
    assert plan is not None
    scheduler.complete()
    seconds = time.perf_counter() - start
    for sequence in plan.sequences:
        if sequence.length >= len(sequence.prompt):
            sequence.tokens.append(7)
    return seconds


def shared_prompts(folder: Path, blocks: int) -> dict[str, float]:
    """Seconds of all prompts with and without the cache, and how much faster it is."""
    from inkling_engine.runtime import Engine

    draw = random.Random(0)
    times: dict[str, list[float]] = {"with": [], "without": []}
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    sides = {"with": True, "without": False}
    engines = {name: Engine.load(folder, prefix_cache=cache) for name, cache in sides.items()}
    vocabulary = engines["with"].spec.shape.real_vocab
    for _ in range(blocks):
        common = [draw.randrange(3, vocabulary) for _ in range(SHARED)]
        prompts = [
            common + [draw.randrange(3, vocabulary) for _ in range(LENGTH - SHARED)]
            for _ in range(PROMPTS)
        ]
        answers = []
        for name, engine in engines.items():
            start = time.perf_counter()
            completions = engine.generate(prompts, params)
            times[name].append(time.perf_counter() - start)
            answers.append([completion.choices[0].token_ids for completion in completions])
        assert answers[0] == answers[1], "the cache changed an answer"
    found = {name: median(seconds) for name, seconds in times.items()}
    return found | {"ratio": found["without"] / found["with"]}


def idle_share(folder: Path, rows: int, seed: int | None) -> dict[str, float]:
    """Shares of the time in which no kernel runs, while `rows` greedy rows decode."""
    sys.path.append(str(Path(__file__).resolve().parent))
    from bench.timing import device_events, idle_before

    from inkling_engine.runtime import Engine

    draw = random.Random(0)
    params = SamplingParams(max_tokens=2 * STEPS, temperature=0, ignore_eos=True, detokenize=False)
    with Engine.load(folder, random_weights=seed) as engine:
        vocabulary = engine.spec.shape.real_vocab
        for _ in range(rows):
            engine.submit([draw.randrange(3, vocabulary) for _ in range(32)], params)
        while engine.scheduler.waiting or engine.scheduler.prefilling:
            engine.step()
        for _ in range(WARM):
            engine.step()
        events = device_events(engine.step, PROFILED)
    kernels = [event for event in events if not event.name.startswith(("Memcpy", "Memset"))]
    begins = [FIRST_KERNEL in event.name for event in kernels]  # a step begins with its metadata
    first = begins.index(True)
    gaps, span = idle_before(kernels[first:])
    between = sum(gap for gap, begin in zip(gaps, begins[first:], strict=True) if begin)
    shares = {"between_replays": between / span, "in_all": sum(gaps) / span}
    return {"rows": rows, "us_per_step": span / sum(begins)} | shares


def render(report: dict[str, Any]) -> str:
    """The report as lines."""
    times = report["scheduler_us_per_step"]
    lines = [f"scheduler, {ROWS} rows: {times['mean']:.0f} us a step, p95 {times['p95']:.0f}"]
    if found := report.get("idle"):
        lines.append(
            f"decoding {found['rows']} rows: {found['us_per_step']:.0f} us a step, no kernel runs in"
            f" {found['between_replays']:.2%} between replays, {found['in_all']:.2%} in all"
        )
    if found := report.get("shared_prompts_seconds"):
        lines.append(
            f"{PROMPTS} prompts of {LENGTH} tokens, {SHARED} of them shared: {found['with']:.2f} s"
            f" with the prefix cache, {found['without']:.2f} s without, {found['ratio']:.1f}x"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
