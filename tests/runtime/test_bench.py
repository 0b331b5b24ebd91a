"""`inkling-engine bench`: its numbers over a fake clock of steps, its shape, its refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support import fake_step
from support.fake_spec import build_spec
from support.fake_step import FakeStep, seal_engine
from torch import Tensor

from inkling_engine.artifacts.manifest import Manifest
from inkling_engine.kernels import table
from inkling_engine.runtime import bench
from inkling_engine.runtime.bench import Work, measure, render
from inkling_engine.runtime.cli import command
from inkling_engine.runtime.errors import FailedError, UsageError
from inkling_engine.runtime.replay import Loop


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(fake_step, "NON_FINITE_TOKEN", -1)
    seal_engine(tmp_path / "engine", build_spec(results=16, full_pages=80))
    return tmp_path / "engine"


class Clock:
    """Time that passes by a replay's cost alone: 1 s, and 1/8 s a step."""

    def __init__(self) -> None:
        self.now = 0.0

    def programs(self, manifest: Manifest, inputs: Mapping[str, list[Tensor]]) -> Loop:
        """The fake step, which may be overlapped."""
        loop = Loop(FakeStep(manifest, inputs))
        loop.overlaps = True
        replay = loop.replay

        def timed(name: str, steps: int) -> Any:
            self.now += 1 + steps / 8
            return replay(name, steps)

        loop.replay = timed  # type: ignore[method-assign]
        return loop


def test_the_numbers_are_those_of_the_clock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(bench, "perf_counter", lambda: clock.now)
    work = Work(batch=2, context=8, tokens=12, repeat=2)
    report = measure(folder, work, programs=clock.programs)
    one, ahead, many = report["decode"]
    assert [way["name"] for way in report["decode"]] == [
        *["synchronous", "overlapped", "8 steps in one replay"]
    ]
    assert (one["overlap"], ahead["overlap"], many["overlap"]) == (False, True, True)
    assert one["step_ms"] == {"mean": 1125, "stdev": 0, "p50": 1125, "p95": 1125}
    assert many["step_ms"]["p50"] == 2000 / 8
    assert many["ratio"] == pytest.approx(1125 / 250)
    assert one["tokens_per_second"] == pytest.approx(2 / 1.125)
    assert one["ratio"] == 1
    first = report["prefill"]["first_token_ms"]
    assert report["prefill"]["tokens_per_second"] > 0 and first["p50"] <= first["p95"]


def test_rows_decode_together_however_long_their_prompts_take(folder: Path) -> None:
    work = Work(batch=4, context=40, tokens=3, repeat=1)
    report = measure(folder, work, programs=FakeStep, steps_per_replay=1)
    assert [way["name"] for way in report["decode"]] == ["synchronous"]


def test_the_report_is_for_people_and_for_programs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = measure(folder, Work(tokens=20, context=8, repeat=1), programs=FakeStep)
    text = render(report)
    assert report["engine_id"] in text and "8 steps in one replay" in text
    assert {"process", "digests", "weights", "pools", "first token"} <= report["load"].keys()
    monkeypatch.setattr(bench, "measure", lambda *_, **__: report)
    for options, expected in (([], text), (["--json"], json.dumps(report))):
        done = CliRunner().invoke(command, ["bench", str(folder), *options])
        assert done.exit_code == 0
        assert done.output.strip() == expected or json.loads(done.output) == report


def test_what_drafts_gave_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_step, "NON_FINITE_TOKEN", -1)
    seal_engine(tmp_path / "engine", build_spec(results=16, full_pages=80, drafts=2))
    work = Work(batch=4, tokens=12, context=12, repeat=2)
    report = measure(tmp_path / "engine", work, programs=FakeStep)
    assert [way["steps_per_replay"] for way in report["decode"]] == [1, 2]
    drafts = report["drafts"]
    assert drafts["tokens"] == drafts["rounds"] + sum(drafts["accepted"])
    assert 1 < drafts["acceptance_length"] == drafts["tokens"] / drafts["rounds"] < 3
    text = render(report)
    assert f"{drafts['acceptance_length']:.2f} tokens a round" in text and "ms a token" in text


def test_a_bench_is_traced(folder: Path, tmp_path: Path) -> None:
    work = Work(batch=2, context=8, tokens=4, repeat=1)
    measure(folder, work, tmp_path / "run.json", programs=FakeStep, steps_per_replay=1)
    events = json.loads((tmp_path / "run.json").read_text())
    assert sum(event["args"].get("prompt_tokens", 0) for event in events) == 2 * 2 * 8


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (Work(batch=5, context=8, tokens=8), "--batch: found 5; expected at most 4"),
        (Work(context=60, tokens=8), "found 68; expected at most 64"),
        (Work(context=8, tokens=8, accept=1), r"--accept: found 1; expected 0 to 0 \(spec_depth\)"),
    ],
)
def test_more_than_the_engine_holds_is_refused(folder: Path, work: Work, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        measure(folder, work, programs=FakeStep)


def test_rows_that_must_wait_for_one_another_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_step, "NON_FINITE_TOKEN", -1)
    seal_engine(tmp_path / "engine", build_spec(results=16, full_pages=17))
    with pytest.raises(UsageError, match="rows that fit in together"):
        measure(tmp_path / "engine", Work(batch=4, context=40, tokens=20), programs=FakeStep)


def test_non_finite_logits_are_a_failure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: FakeStep, state: Tensor, *__: object) -> int:
        state[table.FINISH] = table.Finish.NON_FINITE
        return 0

    monkeypatch.setattr(FakeStep, "_commit", broken)
    with pytest.raises(FailedError, match="non-finite"):
        measure(folder, Work(context=8, tokens=8), programs=FakeStep)
