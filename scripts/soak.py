"""Mixed traffic against lone runs: `python scripts/soak.py ENGINE --requests 2000`.

Requests of all lengths, many with common beginnings, run together with random aborts, preemptions
and priorities. Each one's greedy tokens must equal those of its run alone, without prefix cache, up
to the first position where the lone run's two best logits were closer than `--gap`. In float32 at
most 1 % of the requests may meet one. In bfloat16, where programs of other buckets round otherwise,
at most 1 % of the compared tokens with a wider gap may differ (spec 9.3). Afterwards slots, pages
and snapshots must balance. Exit code 1 if any of this is broken.
`--first` and `--requests` choose a piece of one long list of requests, `--seconds` ends the mixed
traffic early, `--compare-seconds` the lone runs, which go through the requests in a random order.
`--against` is an engine without drafting, or of one rank, that must give what this one gives: on drawn
weights (`--random-weights`) the ranks hold shares of one model.
"""

from __future__ import annotations

import math
import random
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import click

from inkling_engine.runtime import Engine, SamplingParams
from inkling_engine.runtime.drafts import render_drafts
from inkling_engine.runtime.requests import Choice, Request


class Work(NamedTuple):
    """One request of the list: its prompt, most tokens, and priority."""

    prompt: list[int]
    tokens: int
    priority: int

    @property
    def params(self) -> SamplingParams:
        """Greedy, with the two best logprobs of each token."""
        return SamplingParams(temperature=0, max_tokens=self.tokens, logprobs=2, detokenize=False)


def make_work(engine: Engine, number: int) -> Work:
    """Request `number` of the list, the same every time."""
    draw, spec = random.Random(number), engine.spec
    most = spec.max_context
    tokens = draw.randint(1, min(100, most // 4))
    length = int(2 ** draw.uniform(0, (most - tokens).bit_length() - 1))
    family = random.Random(-1 - draw.randrange(8))
    common = [family.randrange(3, spec.shape.real_vocab) for _ in range(draw.randint(0, length))]
    own = [draw.randrange(3, spec.shape.real_vocab) for _ in range(length - len(common))]
    return Work(common + own, tokens, draw.randrange(3))


def run_mixed(engine: Engine, numbers: range, crowd: int, seconds: float) -> list[Request]:
    """Keep `crowd` of these requests under way, for so long; now and then abort one, or preempt one that
    runs."""
    draw, requests, open_ones = random.Random(0), list[Request](), list[Request]()
    until = time.monotonic() + seconds
    while open_ones or len(requests) < len(numbers):
        if time.monotonic() > until:
            numbers = numbers[: len(requests)]
        while len(open_ones) < crowd and len(requests) < len(numbers):
            item = make_work(engine, numbers[len(requests)])
            requests.append(engine.submit(item.prompt, item.params, priority=item.priority))
            open_ones.append(requests[-1])
        engine.step()
        running = [*engine.scheduler.prefilling, *engine.scheduler.decoding]
        if running and draw.random() < 0.05:
            engine.scheduler.preempt(draw.choice(running))
        if draw.random() < 0.002:
            engine.abort(draw.choice(open_ones))
        open_ones = [request for request in open_ones if not request.finished]
    while engine.step() or engine._ahead:  # what was begun ahead
        pass
    return requests


def first_difference(found: Choice, wanted: Choice) -> int | None:
    """The first position where two runs differ; what was aborted is compared as far as it went."""
    pairs = zip(found.token_ids, wanted.token_ids, strict=False)
    if (at := next((i for i, (a, b) in enumerate(pairs) if a != b), None)) is not None:
        return at
    same = len(found.token_ids) == len(wanted.token_ids) or found.finish_reason == "abort"
    return None if same else min(len(found.token_ids), len(wanted.token_ids))


def gaps(wanted: Choice) -> list[float]:
    """Between the lone run's two best, position by position."""
    return [item.top[0][1] - item.top[1][1] for item in wanted.logprobs or ()]


@dataclass
class Verdict:
    """What comparing has found so far; `compared` counts tokens whose gap was wide enough, `apart` has
    by how much the logprobs of equal tokens differ."""

    gap: float
    close: int = 0
    wrong: int = 0
    compared: int = 0
    apart: list[float] = field(default_factory=list)

    def add(self, found: Choice, wanted: Choice, *, exact: bool) -> bool:
        """Compare a request with its lone run; whether it differs where it should not. `exact`: a
        close call before the difference explains it, since state may differ from there on."""
        at, wide = first_difference(found, wanted), [gap >= self.gap for gap in gaps(wanted)]
        seen = len(wide) if at is None else at + 1
        self.compared += sum(wide[:seen])
        pairs = zip(found.logprobs or (), wanted.logprobs or (), strict=False)
        self.apart += [abs(a.logprob - b.logprob) for a, b in islice(pairs, at)]
        if at is None:
            return False
        close = not all(wide[:seen]) if exact else at < len(wide) and not wide[at]
        self.close += close
        self.wrong += not close
        return not close


def run_alone(
    engine: Engine, mixed: list[Request], first: int, seconds: float, verdict: Verdict
) -> int:
    """Compare requests with their lone runs, for so long, in a random order; how many there were."""
    order, start = list(enumerate(mixed, first)), time.monotonic()
    random.Random(first).shuffle(order)
    for done, (number, request) in enumerate(order):
        if (spent := time.monotonic() - start) > seconds:
            return done
        item, found = make_work(engine, number), request.completion().choices[0]
        wanted = engine.generate(item.prompt, item.params)[0].choices[0]
        if verdict.add(found, wanted, exact=engine.spec.dtype == "float32"):
            click.echo(f"request {number} differs: {found.finish_reason}")
        if done % 500 == 499:
            click.echo(f"{done + 1} compared, {spent:.0f} s", err=True)
    return len(order)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--requests", "count", default=2000, show_default=True)
@click.option("--seconds", default=math.inf, help="The mixed traffic ends after so long.")
@click.option("--compare-seconds", "lone_seconds", default=math.inf, help="So do the lone runs.")
@click.option("--first", default=0, show_default=True, help="Number of the first request.")
@click.option("--gap", type=float, help="Closer is a close call.  [1e-4; bfloat16: 0.1]")
@click.option("--steps-per-replay", default=1, show_default=True)
@click.option("--against", type=click.Path(path_type=Path), help="Another engine for lone runs.")
@click.option("--random-weights", type=int, help="Draw weights with this seed.")
@click.option("--device-index", default="0", help="Which GPUs: rank 0's, or one for each rank.")
def main(
    folder: Path,
    count: int,
    seconds: float,
    lone_seconds: float,
    first: int,
    gap: float | None,
    steps_per_replay: int,
    against: Path | None,
    random_weights: int | None,
    device_index: str,
) -> None:
    """Compare mixed traffic with lone runs."""
    given = tuple(map(int, device_index.split(",")))
    devices = given if len(given) > 1 else given[0]
    load = partial(Engine.load, random_weights=random_weights)
    with load(folder, steps_per_replay=steps_per_replay, device_index=devices) as engine:
        click.echo(f"load: {', '.join(f'{name} {t:.3f}' for name, t in engine.timings.items())}")
        ranks, start = engine.spec.tp, time.perf_counter()
        numbers = range(first, first + count)
        mixed = run_mixed(engine, numbers, 2 * engine.spec.max_running, seconds)
        count, steps = len(mixed), engine.steps
        engine.scheduler.check()
        seen, accounts = engine.scheduler, engine.scheduler.accounting()
        if engine.spec.spec_depth:
            click.echo(render_drafts(engine.drafts.report()))
    seconds = time.perf_counter() - start
    click.echo(f"{ranks} rank(s), mixed: {seconds:.1f} s, {steps} steps, {count} requests")
    click.echo(f"{seen.preemptions} preemptions")
    click.echo(f"prompt tokens: {seen.fed_tokens} computed, {seen.cached_tokens} from the cache")
    one = devices if against is None else given[0]
    with load(against or folder, prefix_cache=False, device_index=one) as engine:
        exact = engine.spec.dtype == "float32"
        verdict = Verdict(gap or (1e-4 if exact else 0.1))
        compared = run_alone(engine, mixed, first, lone_seconds, verdict)
    lost = [name for name, account in accounts.items() if account.live]
    click.echo(
        f"{compared} requests compared: {verdict.wrong} differ, {verdict.close} met a gap under {verdict.gap},"
        f" {verdict.compared} tokens compared; held: {lost}"
    )
    if apart := sorted(verdict.apart):
        middle, tail = apart[len(apart) // 2], apart[len(apart) * 99 // 100]
        click.echo(f"logprobs apart: median {middle:.2g}, p99 {tail:.2g}, most {apart[-1]:.2g}")
    allowed = 0 if exact else 0.01 * verdict.compared
    many = exact and verdict.close > 0.01 * compared
    if not verdict.compared:
        click.echo("no token was compared: choose a smaller --gap, or compare longer")
    sys.exit(bool(not verdict.compared or verdict.wrong > allowed or lost or many))


if __name__ == "__main__":
    main()
