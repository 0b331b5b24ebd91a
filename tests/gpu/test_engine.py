"""The tiny model's fp32 engine on a GPU: built, verified, captured, replayed.

`compile-engine` proves its programs against the eager step and runs the golden continuations
through replayed graphs; here the same engine is asked what only a GPU can answer. `Planned` stands
a planned replay still, so that it can be run in several ways from the same state.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
import torch
from support.compiler import compile_engine
from torch import Tensor

from inkling_engine.runtime import Engine, SamplingParams, debug
from inkling_engine.runtime.capture import CapturedGraphs
from inkling_engine.runtime.plan import Plan
from inkling_engine.runtime.requests import Choice
from inkling_engine.runtime.script import Script

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
STEPS = 5
PROMPTS = [[(7 * i + 13 * n) % 2000 + 3 for i in range(n)] for n in (1, 3, 64, 65, 130, 300)]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with two decode and two extend programs."""
    folder = tmp_path_factory.mktemp("cuda") / "engine"
    command = "--model inkling-tiny --device cuda --dtype fp32 --decode-buckets 1,8"
    command += " --extend-buckets 64,256 --jobs 4 --quiet"
    done = compile_engine(*command.split(), "--out", folder, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    """Opened once, without prefix cache; decode replays may take five steps."""
    with Engine.load(folder, steps_per_replay=STEPS, prefix_cache=False) as opened:
        assert opened.overlap
        yield opened


@pytest.fixture(autouse=True)
def _one_step_at_a_time(engine: Engine) -> None:
    """Each test begins with the plain loop."""
    engine.overlap, engine.scheduler.steps = False, 1


def graphs(engine: Engine) -> CapturedGraphs:
    """The engine's captured programs."""
    runner = engine._replayer
    assert isinstance(runner, CapturedGraphs)
    return runner


def memory(engine: Engine) -> dict[str, Tensor]:
    """Everything that programs write or are told, without slot 0 and page 0, as raw bytes."""
    found = {}
    for program in engine.manifest.programs:
        inputs = graphs(engine)._inputs[program.name]
        for name, tensor in zip(program.inputs, inputs, strict=True):
            if name.startswith("rows."):
                found[f"{program.name} {name}"] = tensor
            elif name.startswith(("pools.kv_", "pools.conv_")):
                found[name] = tensor[:, 1:]
            elif name.startswith("pools."):
                found[name] = tensor
    return found


def copied(engine: Engine) -> dict[str, Tensor]:
    """A copy of all memory, taken when nothing runs."""
    torch.cuda.synchronize()
    copies = {name: tensor.clone() for name, tensor in memory(engine).items()}
    torch.cuda.synchronize()
    return copies


def differing(one: dict[str, Tensor], two: dict[str, Tensor]) -> list[str]:
    """Names of what is not the same bytes."""
    return [
        name
        for name, value in one.items()
        if not torch.equal(
            value.contiguous().view(torch.uint8), two[name].contiguous().view(torch.uint8)
        )
    ]


class Planned:
    """A planned and filled replay; `again` brings all memory back to where it begins."""

    def __init__(self, engine: Engine, prompts: list[list[int]], *, tokens: list[int]) -> None:
        """Submit `prompts`; each is run until it has a first token if `tokens` says how many."""
        self.engine, self.runner = engine, graphs(engine)
        params = [
            SamplingParams(max_tokens=count or 8, temperature=0, ignore_eos=True)
            for count in tokens
        ]
        self.requests = [engine.submit(*pair) for pair in zip(prompts, params, strict=True)]
        while any(tokens) and not all(r.sequences[0].tokens for r in self.requests):
            engine.step()

    def __enter__(self) -> Self:
        plan = self.engine.scheduler.next()
        assert plan is not None
        self.plan: Plan = plan
        self.name = self.engine._names[plan.bucket]
        self.engine._rows[self.name].fill(plan)
        self._before, self._steps = copied(self.engine), self.runner._steps
        return self

    def again(self) -> None:
        """Back to the beginning."""
        torch.cuda.synchronize()
        for name, tensor in memory(self.engine).items():
            tensor.copy_(self._before[name])
        self.runner._steps = self._steps
        torch.cuda.synchronize()

    def run(self, way: Callable[[], object]) -> dict[str, Tensor]:
        """What `way` leaves behind."""
        self.again()
        with torch.cuda.stream(self.runner._stream):
            way()
        return copied(self.engine)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.again()
        self.engine.scheduler.complete()
        for request in self.requests:
            self.engine.abort(request)


@pytest.mark.parametrize("tokens", [[8], [8] * 6, [0] * 6, [0]])
def test_a_replay_is_the_program_to_the_bit(engine: Engine, tokens: list[int]) -> None:
    """Decodes of one and of six rows; extends with 64 and 256 tokens."""
    with Planned(engine, PROMPTS[: len(tokens)], tokens=tokens) as planned:
        runner, name, rows = planned.runner, planned.name, len(planned.plan.slots)
        logits: list[Tensor] = []
        replayed = planned.run(lambda: runner.replay(name, 1)())
        logits.append(runner.outputs[name, 1][0][:rows].clone())
        plain = planned.run(lambda: logits.append(runner.run(name)[0][:rows].clone()))
        assert differing(replayed, plain) == []
        assert torch.equal(*logits)


def test_steps_in_one_replay_are_so_many_replays_to_the_bit(engine: Engine) -> None:
    """With rows that end on the way, and one that crosses into a new page."""
    engine.scheduler.steps = STEPS
    with Planned(engine, PROMPTS[:4], tokens=[3, 20, 20, 5]) as planned:
        runner, name = planned.runner, planned.name
        assert planned.plan.steps == STEPS
        together = planned.run(lambda: runner.replay(name, STEPS)())
        single = planned.run(lambda: [runner.replay(name, 1)() for _ in range(STEPS)])
        assert differing(together, single) == []
        assert differing(together, planned.run(lambda: None)) != []


def bare(choice: Choice) -> Choice:
    """The choice without its log-probabilities."""
    return dataclasses.replace(choice, logprobs=None, cumulative_logprob=None)


@pytest.mark.parametrize(("steps", "overlap"), [(1, True), (STEPS, False), (STEPS, True)])
def test_all_ways_to_decode_give_the_same_answers(
    engine: Engine, steps: int, overlap: bool
) -> None:
    params = [GREEDY, *[SamplingParams(seed=n, max_tokens=5 * n, logprobs=0) for n in range(1, 6)]]
    expected = engine.generate(PROMPTS, params)
    engine.overlap, engine.scheduler.steps = overlap, steps
    for found, wanted in zip(engine.generate(PROMPTS, params), expected, strict=True):
        (one,), (other,) = found.choices, wanted.choices
        assert bare(one) == bare(other)
        for a, b in zip(one.logprobs or (), other.logprobs or (), strict=True):
            # Rows that ended stay in a bucket until a replay ends, and buckets sum in other orders.
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_replays_of_ended_rows_in_any_order_change_nothing(engine: Engine) -> None:
    before = engine.generate(PROMPTS, GREEDY)
    runner, memory_before = graphs(engine), copied(engine)
    order = [*runner._graphs] * 2
    random.Random(0).shuffle(order)
    for name, steps in order:
        runner.replay(name, steps)()
    engine.steps = runner._steps
    changed = differing(memory_before, copied(engine))
    assert set(changed) <= {"pools.results_int", "pools.results_float", "pools.step_counter"}
    assert [c.choices for c in engine.generate(PROMPTS, GREEDY)] == [c.choices for c in before]


def test_a_steady_decode_step_is_one_launch_and_the_results(engine: Engine) -> None:
    """No allocation, and nothing is copied to the device."""
    request = engine.submit(
        PROMPTS[1], SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
    )
    for _ in range(6):
        engine.step()
    count = 8
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(count):
            engine.step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    engine.abort(request)
    names = Counter(event.name for event in profile.events())
    assert names["cudaGraphLaunch"] == count, names
    sent = [name for name in names if "HtoD" in name or "cudaMalloc" in name or "Memset" in name]
    assert sent == [], names
    assert sum(n for name, n in names.items() if "DtoH" in name) == 2 * count, names
    assert names["cudaMemcpyAsync"] == 2 * count and not names["cudaLaunchKernel"], names


def test_a_request_does_not_depend_on_its_neighbours(engine: Engine) -> None:
    together = engine.generate(PROMPTS, GREEDY)
    for prompt, completion in zip(PROMPTS, together, strict=True):
        (alone,) = engine.generate(prompt, GREEDY)
        assert alone.choices[0].token_ids == completion.choices[0].token_ids


@pytest.mark.parametrize("steps", [1, STEPS])
def test_prefix_hits_give_the_cold_answers(engine: Engine, folder: Path, steps: int) -> None:
    """Prompts that part inside a chunk, beside each other and one replay ahead; then answers."""
    system = [(11 * i) % 1900 + 3 for i in range(530)]
    prompts = [system + [3 + n] * n for n in (1, 40, 200)] + [system[:256], system[:257]]
    params = dataclasses.replace(GREEDY, max_tokens=300)
    cold = engine.generate(prompts, params)
    with Engine.load(folder, steps_per_replay=steps) as warm:
        for _ in range(2):
            found = warm.generate(prompts, params)
            assert [c.choices[0].token_ids for c in found] == [c.choices[0].token_ids for c in cold]
        assert warm.scheduler.cached_tokens >= 512 * 5 + 256
        turn = [*prompts[4], *cold[4].choices[0].token_ids, 7]
        request = warm.submit(turn, GREEDY)
        while not request.finished:
            warm.step()
        assert request.sequences[0].cached == 512
        (alone,) = engine.generate(turn, GREEDY)
        assert request.completion().choices[0].token_ids == alone.choices[0].token_ids
        warm.scheduler.check()


def test_what_nobody_may_read_may_hold_nan(engine: Engine) -> None:
    before = engine.generate(PROMPTS, GREEDY)
    for slot in range(engine.spec.pools.slots):
        engine.pool.poison_slot(slot)
    for table, pages in (("full", engine.spec.pools.full_pages), ("window", 16)):
        for page in range(pages):
            engine.pool.poison_page("full" if table == "full" else "window", page)
    torch.cuda.synchronize()  # replays are on another stream
    assert [c.choices for c in engine.generate(PROMPTS, GREEDY)] == [c.choices for c in before]


@pytest.mark.parametrize("overlap", [False, True])
def test_what_was_released_may_hold_nan(engine: Engine, overlap: bool) -> None:
    before = engine.generate(PROMPTS, GREEDY)
    engine.overlap = overlap
    debug.poison_releases(engine)
    try:
        after = engine.generate(PROMPTS, GREEDY)
    finally:
        engine.observers.clear()
    debug.check(engine)
    for one, other in zip(before, after, strict=True):
        assert one.choices[0].token_ids == other.choices[0].token_ids


def test_a_script_runs_and_a_digest_names_the_state(engine: Engine) -> None:
    a, b = engine.submit(PROMPTS[3], GREEDY), engine.submit(PROMPTS[4], GREEDY)
    (sequence,) = a.sequences
    with Script(engine) as script:
        script.step((a, 3), (b, 50))
        first = debug.digest(engine, sequence)
        script.step((b, 80))
        assert debug.digest(engine, sequence) == first, "another's step"
        script.step((a, 62), (b, 1))
        assert debug.digest(engine, sequence) != first
        script.step((a, 1), (b, 1))
    while not (a.finished and b.finished):
        engine.step()
    expected = engine.generate([PROMPTS[3], PROMPTS[4]], GREEDY)
    for request, whole in zip((a, b), expected, strict=True):
        assert request.completion().choices[0].token_ids == whole.choices[0].token_ids
    debug.check(engine)


def test_inputs_stay_where_they_were_captured(engine: Engine) -> None:
    check = debug.address_check(graphs(engine)._inputs)
    engine.generate(PROMPTS, GREEDY)
    check()


def test_a_replay_allocates_nothing(engine: Engine) -> None:
    engine.generate(PROMPTS[:1], GREEDY)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    engine.generate(PROMPTS[:1], GREEDY)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
