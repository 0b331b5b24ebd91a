"""The files of a batch job when something is wrong with them: edits on the way, memory of what waits."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from support.batch_rig import StubEngine, line, stub, write_lines

from inkling_engine.artifacts.errors import UsageError
from inkling_engine.runtime.batch import BatchRunner
from inkling_engine.runtime.batch_progress import Meter


def _first_is_slow(step: Any) -> Any:
    """A stub's `step` that ends its first request when all others have had their time."""

    def late(self: StubEngine) -> Any:
        first = self.submitted[0]
        self.live = [(one, 150 if one is first else at) for one, at in self.live]
        return step(self)

    return late


def run(source: Path, output: Path) -> bytes:
    """A whole job on a new stub; the output."""
    BatchRunner(stub()[0]).run(source, output)
    return output.read_bytes()


def test_answers_to_lines_that_were_edited_are_not_kept(tmp_path: Path) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    write_lines(source, [line(f"{at:05}", prompt=[30, 40]) for at in range(2000)])
    data = source.read_bytes()
    whole = run(source, tmp_path / "whole")

    def edit(meter: Meter) -> None:
        if meter.written and source.read_bytes() == data:
            with source.open("r+b") as stream:  # in place, of the same size
                stream.write(data.replace(b"[30, 40]", b"[30, 99]"))

    with pytest.raises(UsageError, match="changed"):
        BatchRunner(stub()[0]).run(source, output, watch=edit)
    assert whole.startswith((tmp_path / "out.part").read_bytes())
    source.write_bytes(data)
    assert run(source, output) == whole


@pytest.mark.parametrize("name", ["", "again"])
def test_what_waits_to_be_written_holds_its_answer_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(StubEngine, "step", _first_is_slow(StubEngine.step))
    refused = (line(name or f"{at}", prompt=[1000] * 20_000) for at in range(120))
    source = write_lines(tmp_path / "in", [line("slow"), line("again"), *refused])
    tracemalloc.start()
    try:
        BatchRunner(stub()[0]).run(source, tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20_000_000, "a few lines' fields, 800 kB each, not those of all"
