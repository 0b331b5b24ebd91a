"""Prefix hits and preemption in engines over the real step: the same bits as a cold, lone run.

Tokens, logprobs, and SHA-256 of windows and pages are compared, with everything that nobody holds
full of NaN. Chunks may differ from run to run: in float32 on the CPU they leave no trace.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from state.test_engine_bits import Seen, digests
from state.test_poison import poison_free
from support.engines import open_engine
from support.prompts import python_prompts
from support.rig import Model, StepCode, native_step
from support.stepper import convert

from inkling_engine.runtime.engine import Engine
from inkling_engine.runtime.requests import Request
from inkling_engine.runtime.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("native_library")


def params(tokens: int) -> SamplingParams:
    """Sampled with one seed, so that a change of any logit soon shows."""
    return SamplingParams(seed=5, max_tokens=tokens, ignore_eos=True, logprobs=3)


def see(engine: Engine, prompt: list[int], tokens: int = 3) -> tuple[Seen, int]:
    """Run a prompt over poison; what is seen of it before its last token, and its hit's length."""
    request, state = engine.submit(prompt, params(tokens)), None
    (sequence,) = request.sequences
    while not request.finished:
        poison_free(engine, float("nan"))
        engine.step()
        if len(sequence.tokens) == tokens - 1:
            state = digests(engine, sequence)
    engine.scheduler.check()
    assert state is not None
    return Seen(request.completion().choices[0], *state), sequence.cached


def prompt_of(length: int, seed: int = 1) -> list[int]:
    """Random ids of the small model."""
    return random.Random(seed).choices(range(151), k=length)


def test_a_hit_at_every_grid_boundary(served: Model, exported: StepCode) -> None:
    """And one token around it, beyond window, extent and log floor; twice from each snapshot."""
    cold = open_engine(served, exported, prefix_cache=False)[0]
    for boundary in range(8, 57, 8):
        for length in (boundary - 1, boundary, boundary + 1):
            wanted, _ = see(cold, prompt_of(length))
            warm = open_engine(served, exported)[0]
            hits = []
            for _ in range(3):
                found, hit = see(warm, prompt_of(length))
                assert found == wanted, f"prompt of {length}, hit of {hit}"
                hits.append(hit)
            assert hits == [0, *[(length - 1) // 8 * 8] * 2]


@pytest.mark.parametrize(("page", "grid"), [(8, 8), (4, 12), (1, 3), (2, 16)])
def test_other_pages_and_grids(
    small_checkpoint: Path, tmp_path: Path, page: int, grid: int
) -> None:
    """Pages as long as the grid, three of them, pages of one token."""
    options: dict[str, Any] = {"max_running": 4, "max_context": 64, "extend_buckets": "16x4"}
    machine = convert(small_checkpoint, tmp_path, **options, page_size=page, snapshot_grid=grid)
    model = Model(machine.spec, machine.weights)
    cold = open_engine(model, native_step, prefix_cache=False)[0]
    warm = open_engine(model, native_step)[0]
    for length in (grid, grid + 1, 3 * grid - 1, 3 * grid + 1, 40):
        found, _ = see(warm, prompt_of(length))
        again, hit = see(warm, prompt_of(length))
        assert found == again == see(cold, prompt_of(length))[0]
        assert hit == (length - 1) // grid * grid


def test_prompts_that_part_inside_a_chunk(served: Model, exported: StepCode) -> None:
    """They share what lies before the last grid point that they have in common."""
    cold = open_engine(served, exported, prefix_cache=False)[0]
    for branch in (7, 8, 9, 13, 16, 23, 31):
        warm = open_engine(served, exported)[0]
        for tail in (2, 3, 5):
            prompt = prompt_of(branch) + prompt_of(40 - branch, tail)
            found, hit = see(warm, prompt)
            assert found == see(cold, prompt)[0]
            assert hit == (branch // 8 * 8 if tail > 2 else 0)


def test_an_answer_is_a_prefix_too(served: Model, exported: StepCode) -> None:
    """Snapshots of decoding; the pages behind the window of the first prompt are long gone."""
    cold = open_engine(served, exported, prefix_cache=False)[0]
    warm = open_engine(served, exported)[0]
    prompt = prompt_of(11)
    for turn in range(3):
        found, hit = see(warm, prompt, 12)
        assert found == see(cold, prompt, 12)[0]
        assert hit >= 12 * turn
        answer = warm.submit(prompt, params(12))
        while not answer.finished:
            warm.step()
        prompt = prompt + answer.sequences[0].tokens + [7 + turn]


def _small_pools(model: Model, full: int, window: int) -> Model:
    pools = msgspec.structs.replace(model.spec.pools, full_pages=full, window_pages=window)
    return Model(msgspec.structs.replace(model.spec, pools=pools), model.weights)


@pytest.mark.parametrize("full", [13, 20])
def test_preemption_leaves_no_trace(served: Model, full: int) -> None:
    """Pages for one or two of five requests of 6 and 30 tokens; each ends as it does alone."""
    cold = open_engine(served, native_step, prefix_cache=False)[0]
    wanted = [cold.generate(prompt_of(6, n), params(30))[0].choices for n in range(5)]
    engine = open_engine(_small_pools(served, full, 30), native_step)[0]
    requests: list[Request] = [engine.submit(prompt_of(6, n), params(30)) for n in range(5)]
    for _ in range(400):
        poison_free(engine, float("nan"))
        engine.step()
        engine.scheduler.check()
    assert engine.scheduler.preemptions and not engine.scheduler.unfinished()
    assert [request.completion().choices for request in requests] == wanted


@pytest.mark.parametrize("moment", range(1, 12, 2))
def test_preempted_at_any_step(served: Model, exported: StepCode, moment: int) -> None:
    """In the prompt's first or second chunk, or while decoding; penalties go on counting."""
    common: dict[str, Any] = {"seed": 3, "max_tokens": 12, "ignore_eos": True}
    common["logit_bias"] = dict.fromkeys(range(4), 9.0)
    engine = open_engine(served, exported)[0]
    for chosen in (
        params(12),
        SamplingParams(**common, presence_penalty=1.0, repetition_penalty=1.3),
        SamplingParams(**common, frequency_penalty=2.0),
    ):
        wanted = engine.generate(prompt_of(20), chosen)[0].choices
        request = engine.submit(prompt_of(20), chosen)
        for _ in range(moment):
            engine.step()
        (sequence,) = request.sequences
        if not request.finished:
            engine.scheduler.preempt(sequence)
        while not request.finished:
            poison_free(engine, float("nan"))
            engine.step()
        assert request.completion().choices == wanted


def test_hits_in_a_compiled_engine(tiny_engine: Path) -> None:
    """Pages of 64 and a grid of 256, beyond a window of 128 and an extent of 256."""
    with Engine.load(tiny_engine, prefix_cache=False) as cold, Engine.load(tiny_engine) as warm:
        (text,) = python_prompts([800])
        for length in (257, 512, 513, 600, 800):
            wanted = see(cold, text[:length])[0]
            found, hit = see(warm, text[:length])
            assert found == wanted
            assert hit == {257: 0, 512: 256, 513: 512, 600: 512, 800: 512}[length]


def test_mixed_traffic_is_what_it_is_alone(tiny_engine: Path) -> None:
    """`scripts/soak.py`: aborts, preemptions, priorities, common beginnings, many lengths."""
    script = Path(__file__).parents[2] / "scripts" / "soak.py"
    for options in (["--requests", "60"], ["--requests", "30", "--steps-per-replay", "8"]):
        command = [sys.executable, str(script), str(tiny_engine), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert " 0 differ" in done.stdout


def test_shared_prompts_cost_a_third(tiny_engine: Path) -> None:
    """64 prompts that share 90 % of 2,000 tokens: at least three times fewer tokens are fed."""
    (text,) = python_prompts([1800 + 64 * 200])
    prompts = [text[:1800] + text[1800 + 200 * i :][:200] for i in range(64)]
    with Engine.load(tiny_engine) as engine:
        one = SamplingParams(temperature=0, max_tokens=1)
        engine.generate(list(prompts), [one] * 64)
        scheduler = engine.scheduler
        assert scheduler.fed_tokens + scheduler.cached_tokens == 64 * 2000
        assert 3 * scheduler.fed_tokens < 64 * 2000
