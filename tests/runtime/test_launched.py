"""Ranks that torchrun started: who is meant, who is let in, and the same answer as without it."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from support.compiler import inkling_engine

from inkling_engine.runtime import launched
from inkling_engine.runtime.errors import FailedError, IncompatibleError, UsageError

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "29400"}


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of rank 1 of 2, in no other test's launch."""
    monkeypatch.setattr(launched, "_adopted", False)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"test-{os.getpid()}")
    return monkeypatch


def test_who_is_meant(launch: pytest.MonkeyPatch) -> None:
    assert (launched.place(2), launched.place(1)) == (1, None)
    with pytest.raises(UsageError, match="found 2 processes; expected 4, .* --nproc-per-node 4"):
        launched.place(4)
    launch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(IncompatibleError, match="several machines"):
        launched.place(2)
    for words in ("x", ""):
        launch.setenv("RANK", words)
        with pytest.raises(UsageError, match=f"RANK: found '{words}'"):
            launched.place(2)
    launch.delenv("RANK")
    assert launched.place(2) is None


def test_all_ranks_come_and_one_engine_is_served(launch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor() as pool:
        joins = {rank: pool.submit(launched._join, rank) for rank in (2, 1)}
        found = launched.adopt(3)
    assert sorted(found) == [1, 2]
    for rank, join in joins.items():
        with Connection(join.result()) as other:
            found[rank].send_bytes(bytes([rank]))
            assert other.recv_bytes() == bytes([rank])
    with pytest.raises(UsageError, match="a second engine"):
        launched.adopt(3)


def test_other_users_are_not_let_in_and_not_believed(launch: pytest.MonkeyPatch) -> None:
    launch.setattr(launched, "_PATIENCE", 0.5)
    own = os.getuid()
    launch.setattr(os, "getuid", lambda: own + 1)
    with ThreadPoolExecutor() as pool:
        join = pool.submit(launched._join, 1)
        with pytest.raises(FailedError, match="no rank 1 after"):
            launched.adopt(2)
        with pytest.raises(FailedError, match="another user's rank 0"):
            join.result()


@pytest.mark.multi
def test_torchrun_gives_the_same_answer_once(four_rank_engine: Path) -> None:
    arguments = ("generate", four_rank_engine, "--prompt-ids", "5,6,7", "--temperature", 0)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m"]
    command = [sys.executable, *torchrun, "inkling_engine.runtime.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == inkling_engine(*arguments).stdout != ""
