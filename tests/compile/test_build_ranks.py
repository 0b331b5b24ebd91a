"""A build of the tiny model for four ranks: programs for all, a weights file each, one set of answers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import msgspec
import pytest
import torch
from support.compiler import inkling_engine

from inkling_engine.artifacts.digest import file_digest
from inkling_engine.artifacts.golden import Golden
from inkling_engine.artifacts.layout import GOLDEN_FILE, WEIGHTS, weights_file
from inkling_engine.artifacts.store import open_manifest
from inkling_engine.compile import build, items
from inkling_engine.compile.convert import write_weights
from inkling_engine.compile.models.inkling.names import recipes
from inkling_engine.compile.options import BuildOptions
from inkling_engine.compile.plan import make_plan
from inkling_engine.runtime.verify import read_golden


def test_every_rank_has_a_file_that_does_not_depend_on_the_others(
    four_rank_engine: Path, tmp_path: Path
) -> None:
    manifest = open_manifest(four_rank_engine)
    spec, plan = manifest.spec, make_plan(BuildOptions(model="inkling-tiny", device="cpu", tp=4))
    names = [weights_file(rank) for rank in range(4)]
    assert [entry.file for entry in manifest.weights] == names
    assert sorted(path.name for path in (four_rank_engine / WEIGHTS).iterdir()) == [
        Path(name).name for name in names
    ]
    assert plan.checkpoint is not None
    for rank in (3, 1):
        recipe = recipes(spec.shape, spec.dtype, plan.checkpoint.layout, 4, rank)
        alone = write_weights(plan.checkpoint, recipe, tmp_path / "alone.safetensors")
        assert alone == file_digest(four_rank_engine / weights_file(rank))
    assert {program.proof for program in manifest.programs} == {"equal to eager"}


def test_golden_answers_are_those_of_one_rank(four_rank_engine: Path, tiny_engine: Path) -> None:
    """And all ranks together give them."""
    found, expected = read_golden(four_rank_engine), read_golden(tiny_engine)
    for case, other in zip(found.cases, expected.cases, strict=True):
        assert (case.prompt, case.tokens) == (other.prompt, other.tokens)
        assert case.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    done = inkling_engine("verify", four_rank_engine, "--json")
    assert done.returncode == 0, done.stderr
    tokens = sum(len(case.tokens) for case in found.cases)
    assert json.loads(done.stdout)["golden"] == f"ok, {tokens} tokens of 2 prompts"


def test_some_ranks_alone_have_no_golden_answers(tmp_path: Path) -> None:
    for ranks, cases in (("1", 0), ("0", 0), ("0,1", 2)):
        given = BuildOptions(model="inkling-tiny", device="cpu", tp=2, rank_weights=ranks)
        items.golden(make_plan(given), tmp_path, tmp_path)
        golden = msgspec.json.decode((tmp_path / GOLDEN_FILE).read_bytes(), type=Golden)
        assert len(golden.cases) == cases
    assert [path.name for path in tmp_path.iterdir()] == [Path(GOLDEN_FILE).parent.name]


@pytest.mark.parametrize(("gpus", "drawn"), [(2, False), (1, True)])
def test_an_engine_for_more_gpus_than_there_are_is_shown_on_drawn_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, drawn: bool
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(subprocess, "run", run)
    plan = make_plan(BuildOptions(model="inkling-tiny", device="cuda", tp=2))
    build._verify(build.Build(plan, lambda *_: None, tmp_path / "engine", "engine"))
    assert ("--random-weights" in commands[0]) == drawn
