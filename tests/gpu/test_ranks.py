"""The tiny model's fp32 engine on two ranks: what one gives, ranks that agree, and how they end.

On one GPU both ranks share it: their kernels take turns, and a step takes some ten milliseconds.

Builds both engines, or takes the folders `one` and `two` in `$INKLING_ENGINE_RANK_ENGINES`: fp32,
drafting, built with --tp 1 and 2.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compiler import compile_engine
from support.leftovers import gone
from support.prompts import python_prompts

from inkling_engine.runtime import Engine, SamplingParams, debug
from inkling_engine.runtime.errors import DoesNotFitError, FailedError
from inkling_engine.runtime.plan import Plan
from inkling_engine.runtime.ranks import Ranks
from inkling_engine.runtime.requests import Completion
from inkling_engine.runtime.usage import planned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DEVICES = (0, 1) if torch.cuda.device_count() > 1 else (0, 0)
DRAFTS, STEPS = 2, 3
PROMPTS = python_prompts([1, 3, 65, 130, 300, 64])
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=1)
PARAMS = [
    GREEDY,
    dataclasses.replace(GREEDY, max_drafts=0),
    dataclasses.replace(GREEDY, temperature=0.8, seed=1),
    dataclasses.replace(GREEDY, temperature=1.1, seed=2, top_p=0.9),
    dataclasses.replace(GREEDY, temperature=0.9, seed=3, top_k=20, repetition_penalty=1.2),
    dataclasses.replace(GREEDY, temperature=1.0, seed=4, min_p=0.05),
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the engines `one` and `two`."""
    if built := os.environ.get("INKLING_ENGINE_RANK_ENGINES"):
        return Path(built)
    where = tmp_path_factory.mktemp("ranks")
    command = "--model inkling-tiny --device cuda --dtype fp32 --decode-buckets 8"
    command += f" --extend-buckets 256 --spec-depth {DRAFTS} --jobs 2 --quiet"

    def build(item: tuple[str, int]) -> None:
        done = compile_engine(*command.split(), "--tp", item[1], "--out", where / item[0])
        assert done.returncode == 0, done.stderr

    with ThreadPoolExecutor() as pool:
        list(pool.map(build, (("one", 1), ("two", 2))))
    return where


@pytest.fixture(scope="module")
def expected(engines: Path) -> list[Completion]:
    """What one rank answers."""
    with Engine.load(engines / "one", prefix_cache=False) as engine:
        return engine.generate(PROMPTS, PARAMS)


@pytest.fixture(scope="module")
def engine(engines: Path) -> Iterator[Engine]:
    """Both ranks, without prefix cache; several rounds may share a replay."""
    with open_two(engines, steps_per_replay=STEPS, prefix_cache=False) as opened:
        assert opened.overlap
        yield opened


def open_two(engines: Path, **load: Any) -> Engine:
    """Both ranks."""
    return Engine.load(engines / "two", device_index=DEVICES, **load)


def ranks_of(engine: Engine) -> Ranks:
    """Rank 0's seat."""
    assert isinstance(engine.pool.seat, Ranks)
    return engine.pool.seat


def tokens(done: list[Completion]) -> list[tuple[int, ...]]:
    """What was generated."""
    return [tuple(one.choices[0].token_ids) for one in done]


def logprobs(done: list[Completion]) -> list[float]:
    """Of all tokens, one after another."""
    return [item.logprob for one in done for item in one.choices[0].logprobs or ()]


@pytest.mark.parametrize(("overlap", "steps"), [(False, 1), (True, 1), (True, STEPS)])
def test_two_ranks_give_what_one_gives(
    engine: Engine, expected: list[Completion], overlap: bool, steps: int
) -> None:
    engine.overlap, engine.scheduler.steps = overlap, steps
    done = engine.generate(PROMPTS, PARAMS)
    assert tokens(done) == tokens(expected)
    assert logprobs(done) == pytest.approx(logprobs(expected), abs=1e-4)
    debug.check(engine)


def test_ranks_agree_after_every_step_and_a_second_run_has_the_same_bits(engine: Engine) -> None:
    engine.overlap, engine.scheduler.steps = False, 1

    def observe(plan: Plan, began: float, ended: float, tokens: int) -> None:
        own, other = debug.rank_digests(engine)
        assert {name for name in own if own[name] != other[name]} == set()

    engine.observers.append(observe)
    try:
        first = engine.generate(PROMPTS, PARAMS)
        assert logprobs(engine.generate(PROMPTS, PARAMS)) == logprobs(first)
    finally:
        engine.observers.clear()


def test_prefix_hits(engines: Path, engine: Engine) -> None:
    system = python_prompts([530])[0]
    prompts = [system + [3 + n] * n for n in (1, 40, 200)] + [system[:256], system[:257]]
    cold = tokens(engine.generate(prompts, GREEDY))
    with open_two(engines) as warm:
        for _ in range(2):
            assert tokens(warm.generate(prompts, GREEDY)) == cold
        assert warm.scheduler.cached_tokens
        warm.scheduler.check()


def test_preempted_requests_go_on(engine: Engine, expected: list[Completion]) -> None:
    engine.overlap, engine.scheduler.steps = False, 1
    requests = [engine.submit(*pair) for pair in zip(PROMPTS, PARAMS, strict=True)]
    before, step = engine.scheduler.preemptions, 0
    while not all(request.finished for request in requests):
        engine.step()
        step += 1
        if step in (5, 9, 12) and engine.scheduler.decoding:
            engine.scheduler.preempt(engine.scheduler.decoding[-1])
    assert engine.scheduler.preemptions == before + 3
    assert tokens([request.completion() for request in requests]) == tokens(expected)


def test_a_steady_step_is_one_launch_the_results_and_the_error_word(engine: Engine) -> None:
    engine.overlap, engine.scheduler.steps = True, 1
    request = engine.submit(PROMPTS[1], dataclasses.replace(GREEDY, max_tokens=90, max_drafts=0))
    for _ in range(6):
        engine.step()
    count = 8
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(count):
            engine.step()
    engine.abort(request)
    names = Counter(event.name for event in profile.events())
    assert names["cudaGraphLaunch"] == count, names
    assert names["cudaMemcpyAsync"] == 3 * count and not names["cudaLaunchKernel"], names
    other = [name for name in names if "HtoD" in name or "cudaMalloc" in name or "Memset" in name]
    assert other == [], names


@pytest.mark.parametrize(
    ("signum", "found"),
    [
        (signal.SIGKILL, "killed by SIGKILL"),
        (signal.SIGSEGV, "killed by SIGSEGV"),
        (signal.SIGSTOP, "waited for in vain"),
    ],
)
def test_a_rank_in_trouble_ends_the_run_within_ten_seconds(
    engines: Path, expected: list[Completion], signum: signal.Signals, found: str
) -> None:
    with open_two(engines, prefix_cache=False) as opened:
        pid = ranks_of(opened).processes[1].pid
        requests = [opened.submit(PROMPTS[2], GREEDY) for _ in range(5000)]
        sent: list[float] = []

        def send() -> None:
            sent.append(time.monotonic())
            os.kill(pid, signum)

        threading.Timer(0.5, send).start()
        with pytest.raises(FailedError, match=f"rank 1: found {found}"):
            while not all(request.finished for request in requests):
                opened.step()
        assert time.monotonic() - sent[0] < 10 and gone(pid)
    with open_two(engines, prefix_cache=False) as again:
        assert tokens(again.generate(PROMPTS, PARAMS)) == tokens(expected)


def test_an_interrupted_engine_closes(engines: Path) -> None:
    """Rank 0 leaves a replay on the way, in which rank 1 waits for it."""
    with pytest.raises(KeyboardInterrupt), open_two(engines) as opened:
        processes = ranks_of(opened).processes
        opened.submit(PROMPTS[2], GREEDY)
        for _ in range(3):
            opened.step()
        ranks_of(opened).send = _interrupt  # type: ignore[method-assign]
        opened.step()
    assert [process.returncode for process in processes.values()] == [0]


def _interrupt(command: object) -> None:
    raise KeyboardInterrupt


def context_bytes(device: int) -> int:
    """What a process takes of a GPU before it has anything there."""
    code = f"import sys, torch; torch.zeros(1, device='cuda:{device}'); print(1, flush=True); sys.stdin.read()"
    before = torch.cuda.mem_get_info(device)[0]
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        return before - torch.cuda.mem_get_info(device)[0]


@pytest.mark.skipif(DEVICES == (0, 0), reason="needs two GPUs: rank 0 would be refused first")
def test_each_ranks_own_gpu_must_have_room(engines: Path) -> None:
    """Whether the plan is more than what is left beside the context, or something else is."""
    with open_two(engines) as opened:
        need = sum(planned(opened.manifest).values())
    room = need // 2 + context_bytes(DEVICES[1])
    free = torch.cuda.mem_get_info(DEVICES[1])[0]
    taken = torch.empty(free - room, dtype=torch.uint8, device=f"cuda:{DEVICES[1]}")
    try:
        with pytest.raises(DoesNotFitError, match="rank 1: memory"):
            open_two(engines)
    finally:
        del taken
        torch.cuda.empty_cache()


def test_each_rank_needs_a_gpu(engines: Path) -> None:
    code = "import sys; from inkling_engine.runtime import Engine; Engine.load(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, engines / "two"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "found 1, of 2 rank(s) with one device each; expected 0 to 0" in done.stderr
