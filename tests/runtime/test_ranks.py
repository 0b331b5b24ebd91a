"""Ranks as processes: lock-step, what ends them, and what is left of them, over the fake step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any, cast

import pytest
from support.fake_step import run_oracle
from support.leftovers import gone
from support.rank_rig import manifest_of, open_engine

from inkling_engine.runtime import debug, usage
from inkling_engine.runtime.engine import Engine
from inkling_engine.runtime.errors import DoesNotFitError, FailedError, UserError
from inkling_engine.runtime.mirror import Copy, Mirror
from inkling_engine.runtime.rank import Member
from inkling_engine.runtime.rank_messages import Commands, Replay, Start
from inkling_engine.runtime.ranks import Ranks
from inkling_engine.runtime.sampling import SamplingParams

pytestmark = pytest.mark.multi
SPEC = manifest_of(2).spec
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PROMPTS = [[30, 31], [40] * 20, [50, 51, 52]]


@pytest.fixture(autouse=True)
def rig_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the ranks' processes."""
    tests = str(Path(__file__).parents[1])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([tests, *filter(None, paths)]))


def pids(ranks: Ranks) -> list[int]:
    """The processes of the other ranks."""
    return [process.pid for process in ranks.processes.values()]


def test_three_ranks_give_the_tokens_of_one_and_agree(tmp_path: Path) -> None:
    engine, ranks = open_engine(3, tmp_path)
    with engine:
        done = engine.generate(PROMPTS, LONG)
        for prompt, completion in zip(PROMPTS, done, strict=True):
            expected = run_oracle(SPEC, prompt, LONG)[0]
            assert list(completion.choices[0].token_ids) == expected
        digests = debug.rank_digests(engine)
        assert len(digests) == 3 and digests[0] == digests[1] == digests[2]
        assert {"request_state", "token_counts", "conv_attn"} <= digests[0].keys()
        assert not {"rank", "peers", "exchange", "kv_full"} & digests[0].keys()
    engine.close()
    assert [process.returncode for process in ranks.processes.values()] == [0, 0]


def test_every_rank_tells_what_it_takes(tmp_path: Path) -> None:
    """Also of a rank that has a replay on the way."""
    engine, _ = open_engine(3, tmp_path)
    with engine:
        engine.submit(PROMPTS[0], LONG)
        engine.step()
        taken = usage.report(engine)
        engine.step()
    plan = usage.planned(engine.manifest)
    assert [rank["planned"] for rank in taken["ranks"]] == [plan] * 3
    assert len({rank["measured"]["used"] for rank in taken["ranks"]}) > 1
    assert usage.render(taken["ranks"]).count("planned") == taken["tp"] == 3


def test_digests_tell_which_pool_differs(tmp_path: Path) -> None:
    engine, _ = open_engine(2, tmp_path, "1 3 differ")
    with engine:
        engine.generate(PROMPTS, LONG)
        own, other = debug.rank_digests(engine)
        assert own != other


@pytest.mark.parametrize(
    ("trouble", "field", "found"),
    [
        ("1 5 kill", "rank 1", "killed by SIGKILL"),
        ("1 7 raise", "rank 1", "ValueError (the seventh seal)"),
        ("1 5 stop", "rank 1", "waited for in vain"),
    ],
)
def test_a_rank_in_trouble_ends_the_run_and_is_named(
    tmp_path: Path, trouble: str, field: str, found: str
) -> None:
    world, limit = 3 if "kill" in trouble else 2, 2000 if "stop" in trouble else 0
    engine, ranks = open_engine(world, tmp_path, trouble, limit)
    began = time.monotonic()
    with closing(engine):
        with pytest.raises(FailedError) as caught:
            engine.generate(PROMPTS, LONG)
        assert time.monotonic() - began < 10
        assert (caught.value.field, caught.value.found) == (field, found)
        assert all(gone(pid) for pid in pids(ranks))
        with pytest.raises(FailedError, match="in a step"):
            engine.generate(PROMPTS, LONG)


def test_results_without_a_part_of_this_rank_are_not_handed_out(tmp_path: Path) -> None:
    """Rank 1 gives up waiting for rank 0, which then finds the parts of all."""
    engine, ranks = open_engine(2, tmp_path, "0 4 late", 500)
    with engine:
        engine.submit(PROMPTS[0], LONG)
        for _ in range(3):
            engine.step()
        with pytest.raises(FailedError, match="rank 0: found waited for in vain"):
            engine.step()
        assert all(gone(pid) for pid in pids(ranks))


def test_a_rank_that_reads_no_commands_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inkling_engine.runtime.ranks._PATIENCE", 1)
    ours, theirs = Pipe()
    with theirs, pytest.raises(FailedError, match="rank 1: found waited for in vain"):
        Ranks({1: ours}).send(Replay("a", 1, 0, bytes(1 << 22), 0))
    assert ours.closed


def test_a_rank_that_dies_between_steps_is_noticed(tmp_path: Path) -> None:
    engine, ranks = open_engine(2, tmp_path)
    with engine:
        engine.generate(PROMPTS, LONG)
        os.kill(pids(ranks)[0], signal.SIGKILL)
        with pytest.raises(FailedError, match="rank 1: found killed by SIGKILL"):
            engine.generate(PROMPTS, LONG)


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [("load", DoesNotFitError, "rank 1: memory: found much"), ("die", FailedError, "exit code 3")],
)
def test_a_rank_that_does_not_load_says_why(
    tmp_path: Path, how: str, kind: type[UserError], text: str
) -> None:
    with pytest.raises(kind, match=text):
        open_engine(2, tmp_path, f"1 0 {how}")


def test_an_interrupted_engine_closes(tmp_path: Path) -> None:
    """Rank 0 leaves a step on the way, where rank 1 waits for it."""
    engine, ranks = open_engine(2, tmp_path, "0 4 interrupt")
    with pytest.raises(KeyboardInterrupt), engine:
        engine.generate(PROMPTS, LONG)
    assert [process.returncode for process in ranks.processes.values()] == [0]


def test_an_engine_that_nobody_closes_leaves_no_process(tmp_path: Path) -> None:
    ranks = open_engine(2, tmp_path)[1]
    left = pids(ranks)
    del ranks
    assert all(gone(pid) for pid in left)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_ranks_end_with_rank_0(tmp_path: Path, signum: signal.Signals) -> None:
    command = [sys.executable, "-m", "support.rank_rig", "lead", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as lead:
        assert lead.stdout is not None
        left = [int(pid) for pid in lead.stdout.readline().split()]
        lead.send_signal(signum)
        lead.wait()
        assert left and all(gone(pid) for pid in left)


@pytest.fixture
def member() -> Iterator[Member]:
    """Rank 1 of 2 in this process, with a bucket `a` of eight bytes."""
    ours, theirs = Pipe()
    one = Member(Commands(os.dup(theirs.fileno())), Start(1, 2, ""))
    one.replayer(cast(Any, None), {"a": _mirror()})
    with ours, theirs:
        yield one


def _mirror() -> Mirror:
    host, own = memoryview(bytearray(8)), memoryview(bytearray(8))
    return Mirror(host, Copy(host, own))


def _sent(data: bytes) -> Mirror:
    """Rank 0's end of bucket `a`, filled with `data`."""
    mirror = _mirror()
    mirror.host[:] = data
    mirror.send()
    return mirror


def test_lock_step_is_held(member: Member) -> None:
    sent = _sent(b"12345678")
    rows, digest = sent.news(), sent.digest
    assert (rows, sent.news()) == (b"12345678", b"")
    member._require_same(Replay("a", 1, 0, rows, digest))
    member._require_same(Replay("a", 1, 0, b"", digest))
    for command, text in (
        (Replay("a", 1, 7, rows, digest), "rank 1: step: found 0; expected rank 0's, 7"),
        (Replay("b", 1, 0, rows, digest), r"rank 1: bucket: found \['a'\]; expected rank 0's, b"),
        (Replay("a", 1, 0, b"", digest ^ 1), "rank 1: row inputs: found "),
    ):
        with pytest.raises(FailedError, match=text):
            member._require_same(command)


def test_one_rank_has_no_processes() -> None:
    from support.fake_step import open_engine as open_alone

    with open_alone(SPEC) as engine:
        assert isinstance(engine, Engine) and engine.pool.seat is None
        assert len(debug.rank_digests(engine)) == 1
