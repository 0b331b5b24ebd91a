"""The trained model on four ranks, compiled: tokens of one rank, ranks that agree, a job that goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from support.batch_rig import line, read_lines, write_lines
from support.compiler import INKLING_ENGINE, inkling_engine, refused
from support.leftovers import gone
from support.prompts import python_prompts

from inkling_engine.artifacts import layout
from inkling_engine.artifacts.store import open_manifest
from inkling_engine.compile.memory import memory_bill
from inkling_engine.runtime import debug
from inkling_engine.runtime.engine import Engine
from inkling_engine.runtime.errors import CorruptError, DoesNotFitError, FailedError
from inkling_engine.runtime.plan import Plan
from inkling_engine.runtime.ranks import Ranks
from inkling_engine.runtime.requests import Completion
from inkling_engine.runtime.sampling import SamplingParams
from inkling_engine.runtime.usage import planned, report

pytestmark = pytest.mark.multi
PROMPTS = python_prompts((70, 1, 33, 300, 64))
PARAMS = [
    SamplingParams(temperature=heat, max_tokens=24, ignore_eos=True, logprobs=2, seed=at)
    for at, heat in enumerate((0.0, 0.0, 0.8, 0.0, 1.0))
]


def ranks_of(engine: Engine) -> list[int]:
    """The processes of the other ranks."""
    assert isinstance(engine.pool.seat, Ranks)
    return [process.pid for process in engine.pool.seat.processes.values()]


def tokens(done: list[Completion]) -> list[tuple[int, ...]]:
    """What was generated."""
    return [tuple(one.choices[0].token_ids) for one in done]


@pytest.fixture(scope="module")
def expected(tiny_engine: Path) -> list[Completion]:
    """What one rank answers."""
    with Engine.load(tiny_engine) as engine:
        return engine.generate(PROMPTS, PARAMS)


def test_four_ranks_give_what_one_gives_and_agree_after_every_step(
    four_rank_engine: Path, expected: list[Completion]
) -> None:
    with Engine.load(four_rank_engine) as engine:

        def observe(plan: Plan, began: float, ended: float, tokens: int) -> None:
            own, *others = debug.rank_digests(engine)
            for rank, other in enumerate(others, start=1):
                differ = {name for name in own if own[name] != other[name]}
                assert not differ, f"rank {rank}: {differ}"
            assert len(others) == 3

        engine.observers.append(observe)
        done = engine.generate(PROMPTS, PARAMS)
        assert tokens(done) == tokens(expected)
        for one, other in zip(done, expected, strict=True):
            found, wanted = (choice.choices[0].logprobs or () for choice in (one, other))
            for a, b in zip(found, wanted, strict=True):
                assert abs(a.logprob - b.logprob) < 1e-4
        assert tokens(engine.generate(PROMPTS, PARAMS)) == tokens(expected)  # behind prefix hits
        assert engine.scheduler.cached_tokens
        debug.check(engine)
        left = ranks_of(engine)
    assert all(gone(pid) for pid in left)


def test_several_steps_in_one_replay(four_rank_engine: Path, expected: list[Completion]) -> None:
    with Engine.load(four_rank_engine, steps_per_replay=8) as engine:
        assert tokens(engine.generate(PROMPTS, PARAMS)) == tokens(expected)
        own, *others = debug.rank_digests(engine)
        assert others == [own] * 3


def test_drawn_weights_are_shares_of_one_model(four_rank_engine: Path, tiny_engine: Path) -> None:
    """All ranks draw their own: the answers are those of one rank that draws all."""
    done = []
    for folder in (tiny_engine, four_rank_engine):
        with Engine.load(folder, random_weights=3) as engine:
            done.append(engine.generate(PROMPTS, PARAMS))
    assert tokens(done[1]) == tokens(done[0])
    assert len({token for answer in tokens(done[0]) for token in answer}) > 20
    for one, other in zip(*done, strict=True):
        found, wanted = (choice.choices[0].logprobs or () for choice in (one, other))
        for a, b in zip(found, wanted, strict=True):
            assert abs(a.logprob - b.logprob) < 1e-4


def test_each_rank_takes_what_the_bill_says(four_rank_engine: Path) -> None:
    with Engine.load(four_rank_engine, prefix_cache=False) as engine:
        engine.generate(PROMPTS, PARAMS)
        taken, bill = report(engine), memory_bill(engine.spec)
        plan = planned(engine.manifest)
        assert plan["pools"] == bill.pools == sum(t.nbytes for t in engine.pool.tensors.values())
    assert plan["weights"] == bill.text_decoder + bill.text_decoder_fp32
    assert taken["tp"] == len(taken["ranks"]) == 4
    for rank in taken["ranks"]:
        assert (rank["device"], rank["planned"]) == ("cpu", plan)
        assert plan["weights"] < rank["measured"]["used"]
    for rank in taken["ranks"][1:]:  # rank 0 is this process, which has run other tests too
        assert rank["measured"]["used"] < bill.total
    used = [rank["measured"]["used"] for rank in taken["ranks"]]
    assert len(set(used)) > 1, "each rank is asked"


def test_a_rank_that_dies_inside_a_step_is_named(four_rank_engine: Path) -> None:
    """Rank 0 waits for it in native code, which runs under the interpreter's lock."""
    with Engine.load(four_rank_engine) as engine:
        left = ranks_of(engine)
        requests = [engine.submit(PROMPTS[0], PARAMS[0]) for _ in range(2000)]
        threading.Timer(0.5, os.kill, (left[1], signal.SIGSEGV)).start()
        with pytest.raises(FailedError, match="rank 2: found killed by SIGSEGV"):
            while not all(request.finished for request in requests):
                engine.step()
        assert all(gone(pid) for pid in left)


SUSPENDED = """
import sys, time
from inkling_engine.kernels._exchange import LIMIT
from inkling_engine.runtime import Engine, SamplingParams
with Engine.load(sys.argv[1]) as engine:
    for block in engine.pool.seat.blocks.all.values():
        block[LIMIT] = 1500
    print(*(process.pid for process in engine.pool.seat.processes.values()), flush=True)
    until = time.monotonic() + 9
    while time.monotonic() < until:
        engine.generate([5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True))
"""


def test_ranks_that_were_all_suspended_go_on(four_rank_engine: Path) -> None:
    """For longer than a rank may be late, wherever in a step they are."""
    command = [sys.executable, "-c", SUSPENDED, str(four_rank_engine)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as lead:
        assert lead.stdout is not None and lead.stderr is not None
        ranks = [lead.pid, *map(int, lead.stdout.readline().split())]
        for signum, seconds in [(signal.SIGCONT, 0.5), (signal.SIGSTOP, 2.0)] * 3:
            for pid in ranks:
                os.kill(pid, signum)
            time.sleep(seconds)
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)
        assert lead.wait() == 0, lead.stderr.read()


def test_a_job_whose_rank_was_killed_goes_on(four_rank_engine: Path, tmp_path: Path) -> None:
    lines = [line(f"id-{at}", prompt=f"def f{at}(a):", max_tokens=20) for at in range(120)]
    source = write_lines(tmp_path / "in", lines)
    command = [*INKLING_ENGINE, "batch", str(four_rank_engine), "--input", str(source), "--output"]
    subprocess.run([*command, tmp_path / "whole"], check=True, capture_output=True)
    output, part = tmp_path / "out", tmp_path / "out.part"
    with subprocess.Popen([*command, output], stderr=subprocess.PIPE, text=True) as job:
        while not part.exists() or part.stat().st_size < 1000:
            assert job.poll() is None, "the job ended before its rank could be killed"
            time.sleep(0.001)
        left = children(job.pid)
        os.kill(left[1], signal.SIGKILL)
        _, said = job.communicate(timeout=10)
        assert job.returncode == 1 and len(left) == 3 and all(gone(pid) for pid in left)
        assert "found killed by SIGKILL; expected a rank that goes on" in said
    written = part.read_bytes().count(b"\n")
    assert 0 < written < 120
    done = subprocess.run([*command, output], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert output.read_bytes() == (tmp_path / "whole").read_bytes()
    assert len(read_lines(output)) == 120


def children(pid: int) -> list[int]:
    """Processes that `pid` started and that run."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def test_the_commands_run_all_ranks(four_rank_engine: Path) -> None:
    arguments = ("generate", four_rank_engine, "--prompt-ids", "5,6,7", "--temperature", 0)
    assert inkling_engine(*arguments).returncode == 0
    done = inkling_engine("bench", four_rank_engine, "--tokens", 8, "--repeat", 1)
    assert done.returncode == 0 and done.stdout.count(" GB planned, ") == 4, done.stderr
    facts = msgspec.json.decode(inkling_engine("inspect", four_rank_engine, "--json").stdout)
    sizes = [rank["file"] for rank in facts["ranks"]]
    assert len(sizes) == 4 and sum(sizes) == facts["bytes"]["weights"]
    for weights in ((), ("--random-weights", 3)):
        alone = inkling_engine("verify", four_rank_engine, "--alone", *weights)
        assert alone.returncode == 0 and "rank 0 of 4 runs alone" in alone.stderr, alone.stderr


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("spoil", [_flip, Path.unlink])
def test_bad_weights_of_another_rank_are_refused(
    four_rank_engine: Path, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    copy = tmp_path / "engine"
    subprocess.run(["cp", "-r", four_rank_engine, copy], check=True)
    spoil(copy / layout.weights_file(1))
    with pytest.raises(CorruptError, match=r"rank1\.safetensors"):
        Engine.load(copy)
    assert "rank1.safetensors" in refused(inkling_engine("generate", copy, "--prompt-ids", 1), 4)


def test_all_ranks_must_fit(four_rank_engine: Path) -> None:
    need = 4 * sum(planned(open_manifest(four_rank_engine)).values())
    with pytest.raises(DoesNotFitError, match=f"{need:,} bytes"):
        Engine.load(four_rank_engine, memory=need - 1)
