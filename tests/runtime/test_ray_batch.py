"""Shard files on several engines: by Ray, with actors that die and jobs that are run again, and as
tasks of Slurm. Ray is an extra: without it only what needs none of it is tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.fake_batch import FakeRunner

from inkling_engine.artifacts.errors import UsageError
from inkling_engine.runtime.ray_batch import ShardActor, require_shards, run_shards

ROOT = Path(__file__).resolve().parents[2]
LINES = 12


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Six files of lines, and a folder for notes."""
    (tmp_path / "in").mkdir()
    (tmp_path / "notes").mkdir()
    paths = [tmp_path / "in" / f"part-{shard}.jsonl" for shard in range(6)]
    for path in paths:
        path.write_text("".join(f"{path.stem} line {n}\n" for n in range(LINES)))
    return paths


def put(path: Path, line: int, text: str) -> None:
    lines = path.read_text().splitlines()
    lines[line] = text
    path.write_text("".join(f"{line}\n" for line in lines))


def assert_answered(shards: list[Path], outputs: Path) -> None:
    assert {path.name for path in outputs.iterdir()} == {path.name for path in shards}
    for shard in shards:
        assert (outputs / shard.name).read_text() == shard.read_text().upper()


def done(folder: Path) -> list[tuple[str, str]]:
    """Process and line of everything that was done."""
    lines = (folder / "notes" / "done").read_text().splitlines()
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def test_an_actor_answers_what_has_no_output(shards: list[Path], tmp_path: Path) -> None:
    outputs = tmp_path / "out"
    outputs.mkdir()
    actor = ShardActor(partial(FakeRunner, str(tmp_path / "notes")), str(outputs))
    first = actor({"shard": [str(path) for path in shards[:2]]})
    again = actor({"shard": [str(path) for path in shards]})
    assert [json.loads(text) for text in first["summary"]] == [{"lines": LINES, "resumed": 0}] * 2
    assert again["summary"][:2] == ["{}"] * 2 and again["shard"] == [str(path) for path in shards]
    assert again["output"] == [str(outputs / path.name) for path in shards]
    assert_answered(shards, outputs)
    assert len(done(tmp_path)) == len(shards) * LINES


def test_shards_that_cannot_be_run(shards: list[Path], tmp_path: Path) -> None:
    twin = tmp_path / shards[0].name
    twin.touch()
    for given, words in (
        ([], "at least one file"),
        ([tmp_path / "none"], "expected a file"),
        ([*shards, twin], f"2 files called {twin.name}"),
        ([tmp_path], "expected a file"),
    ):
        with pytest.raises(UsageError, match=words):
            require_shards(given, tmp_path / "out")
    with pytest.raises(UsageError, match="without shards"):
        require_shards(shards, tmp_path / "in")


def test_without_ray_the_extra_is_named(
    shards: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.data", None)
    with pytest.raises(UsageError, match=r"inkling-engine\[ray\]"):
        run_shards(tmp_path, shards, tmp_path / "out")


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A Ray of its own on this machine, whose workers find this tree."""
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    search = os.pathsep.join(filter(None, [str(ROOT / "tests"), *sys.path]))
    ray.init(
        num_cpus=3,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": search}},
    )
    yield ray
    ray.shutdown()


@pytest.mark.multi
@pytest.mark.usefixtures("ray")
def test_a_killed_actor_comes_back_and_goes_on(shards: list[Path], tmp_path: Path) -> None:
    for at, shard in ((5, shards[1]), (0, shards[4])):
        put(shard, at, f"kill {shard.stem}")
    maker = partial(FakeRunner, str(tmp_path / "notes"))
    rows = run_shards(tmp_path, shards, tmp_path / "out", actors=2, make_runner=maker)
    assert [Path(row["shard"]) for row in rows] == shards
    assert_answered(shards, tmp_path / "out")
    summaries = [json.loads(row["summary"]) for row in rows]
    assert [summary["resumed"] for summary in summaries] == [0, 5, 0, 0, 0, 0]
    lines = [line for _, line in done(tmp_path)]
    assert len(lines) == len(set(lines)) == len(shards) * LINES, "no line lost or done twice"
    assert len({process for process, _ in done(tmp_path)}) >= 3, "two actors, and one anew"


@pytest.mark.multi
@pytest.mark.usefixtures("ray")
def test_a_job_run_again_goes_on(shards: list[Path], tmp_path: Path) -> None:
    put(shards[2], 7, "raise")
    maker = partial(FakeRunner, str(tmp_path / "notes"))
    with pytest.raises(Exception, match="raise"):
        run_shards(tmp_path, shards, tmp_path / "out", actors=2, make_runner=maker)
    assert not (tmp_path / "out" / shards[2].name).exists()
    rows = run_shards(tmp_path, shards, tmp_path / "out", actors=2, make_runner=maker)
    assert json.loads(rows[2]["summary"]) == {"lines": LINES, "resumed": 7}
    assert_answered(shards, tmp_path / "out")
    lines = [line for _, line in done(tmp_path)]
    assert len(lines) == len(set(lines)) == len(shards) * LINES


SRUN = """#!/usr/bin/env bash
[ "$1" = --kill-on-bad-exit=0 ] && shift
status=0
for ((task = 0; task < 3; task++)); do
  SLURM_PROCID=$task SLURM_NTASKS=3 "$@" || status=$?
done
exit $status
"""
BATCH = """#!/usr/bin/env bash
printf '%s|' "$@" >> "$NOTES"
echo >> "$NOTES"
[ "$8" != 1/3 ] || exit 6
"""


def slurm(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The Slurm script with an `srun` that runs three tasks, and an engine that takes notes."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("inkling-engine", BATCH)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "NOTES": str(folder / "calls")}
    command = ["bash", str(ROOT / "scripts" / "slurm_batch.sh"), *arguments]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.null
def test_slurm_tasks_are_shards(tmp_path: Path) -> None:
    (tmp_path / "my out.jsonl.shard-00000-of-00003").touch()
    ran = slurm(tmp_path, "my engine", "in.jsonl", "my out.jsonl", "--memory", "0.9 G")
    assert ran.returncode == 6, ran.stderr
    assert "shard-00000-of-00003 is there" in ran.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == [
        f"batch|my engine|--input|in.jsonl|--output|my out.jsonl.shard-0000{task}-of-00003"
        f"|--shard|{task}/3|--memory|0.9 G|"
        for task in (1, 2)
    ]


@pytest.mark.null
def test_slurm_arguments_are_asked_for(tmp_path: Path) -> None:
    ran = slurm(tmp_path, "engine", "in.jsonl")
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert ran.stderr.startswith("error: ") and not (tmp_path / "calls").exists()
