#!/usr/bin/env python3
"""What an engine's drafts are worth on text: `python scripts/bench_drafting.py ENGINE`.

Prompts are cut from Python's standard library. Printed are tokens a round and how often each depth's
draft was accepted, left alone, and again after some first rounds in which every draft was wrong: what
they leave behind must not lower what comes after. Then the time of a token with and without drafts.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from inkling_engine.runtime import Engine, SamplingParams, debug
from inkling_engine.runtime.drafts import DraftStats, render_drafts
from inkling_engine.runtime.requests import Request

SPOILT = 4  # rounds whose drafts are all wrong


def prompts(engine: Engine, count: int, length: int) -> list[list[int]]:
    """Beginnings at random places of the standard library's files."""
    draw, found = random.Random(0), list[list[int]]()
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))
    assert engine.tokenizer is not None, "the engine has no tokenizer"
    while len(found) < count:
        text = draw.choice(files).read_text(errors="ignore")
        start = draw.randrange(max(1, len(text) - 12 * length))
        ids = list(engine.tokenizer.encode(text[start : start + 12 * length]))
        if len(ids) >= length:
            found.append(ids[:length])
    return found


def steps(engine: Engine, requests: list[Request]) -> Iterator[None]:
    """Step until all `requests` have ended."""
    while not all(request.finished for request in requests):
        yield
        engine.step()


def run(engine: Engine, texts: list[list[int]], params: SamplingParams, spoil: int) -> DraftStats:
    """Drafts of one request after the other, its first `spoil` rounds with wrong drafts apart."""
    total = DraftStats.none(engine.spec.spec_depth)
    for text in texts:
        request = engine.submit(text, params)
        (sequence,) = request.sequences
        begun, before = 0, engine.drafts.copy()
        for _ in steps(engine, [request]):
            if sequence.tokens and begun < spoil:
                wrong = [3 if begun % 2 else 4] * engine.spec.spec_depth
                debug.write_drafts(engine, sequence, wrong)
                begun, before = begun + 1, engine.drafts.copy()
            elif begun == spoil and spoil:
                before, begun = engine.drafts.copy(), begun + 1
        here = engine.drafts.since(before)
        total.rounds += here.rounds
        total.tokens += here.tokens
        for depth in range(engine.spec.spec_depth):
            total.proposed[depth] += here.proposed[depth]
            total.accepted[depth] += here.accepted[depth]
    return total


def token_ms(engine: Engine, texts: list[list[int]], params: SamplingParams) -> float:
    """Milliseconds of a token, one request at a time."""
    start, count = time.perf_counter(), 0
    for text in texts:
        count += len(engine.generate(text, params)[0].choices[0].token_ids)
    return (time.perf_counter() - start) * 1e3 / count


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--prompts", "count", default=32, show_default=True)
@click.option("--length", default=128, show_default=True, help="Tokens of a prompt.")
@click.option("--tokens", default=64, show_default=True, help="Tokens to generate.")
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    folder: Path, count: int, length: int, tokens: int, temperature: float, as_json: bool
) -> None:
    """Measure and print."""
    drafted = SamplingParams(
        temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=1, detokenize=False
    )
    plain = replace(drafted, max_drafts=0)
    with Engine.load(folder, prefix_cache=False) as engine:
        engine.overlap = False  # rounds are looked at one by one
        texts = prompts(engine, count, length)
        report: dict[str, Any] = {
            "alone": run(engine, texts, drafted, 0).report(),
            "after wrong rounds": run(engine, texts, drafted, SPOILT).report(),
            "ms a token": {
                "with drafts": token_ms(engine, texts[:8], drafted),
                "without": token_ms(engine, texts[:8], plain),
            },
        }
    if as_json:
        click.echo(json.dumps(report))
        sys.exit()
    click.echo(f"left alone: {render_drafts(report['alone'])}")
    click.echo(f"after {SPOILT} wrong rounds: {render_drafts(report['after wrong rounds'])}")
    click.echo(
        ", ".join(f"{name} {ms:.3f} ms a token" for name, ms in report["ms a token"].items())
    )


if __name__ == "__main__":
    main()
