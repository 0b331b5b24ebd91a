"""A batch job's files when something is wrong: edits on the way, full disks, odd paths."""

from __future__ import annotations

import errno
import os
import resource
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.batch_rig import Stops, StubEngine, line, stub, write_lines

from inkling_engine.artifacts.errors import FailedError, UsageError
from inkling_engine.runtime.batch import BatchRunner, StoppedError
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


@contextmanager
def _no_room(size: int) -> Iterator[None]:
    """No file grows beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_job_that_finds_no_room_to_begin_leaves_nothing(tmp_path: Path) -> None:
    source, output = write_lines(tmp_path / "in", [line("a")]), tmp_path / "out"
    with _no_room(10), pytest.raises(FailedError, match=r"out\.part\.json: found .*too large"):
        run(source, output)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    (tmp_path / "out.part.json").mkdir()
    with pytest.raises(FailedError, match=r"out\.part\.json: found .*directory"):
        run(source, output)
    (tmp_path / "out.part.json").rmdir()
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    for length in (246, 251, 256):  # with .part.json.new, with .part, alone
        with pytest.raises((FailedError, UsageError), match="name too long"):
            run(source, tmp_path / ("o" * length))
        with pytest.raises((FailedError, UsageError), match="name too long|no folder"):
            run(source, tmp_path / ("o" * length) / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert run(source, output)


@pytest.mark.parametrize("what", ["out.part", ""])
def test_a_disk_that_is_full_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    source, sync = write_lines(tmp_path / "in", [line(f"{at}") for at in range(50)]), os.fsync
    whole = run(source, tmp_path / "whole")

    def fsync(handle: int) -> None:
        if os.readlink(f"/proc/self/fd/{handle}") == str(tmp_path / what):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    runner, output = BatchRunner(stub()[0]), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        if what:  # why the job ends is not hidden
            with pytest.raises(StoppedError):
                runner.run(source, output, watch=Stops(runner, 1))
        with pytest.raises(FailedError, match="No space left.*run the same command"):
            runner.run(source, output)
    assert (tmp_path / "out.part").exists() == (tmp_path / "out.part.json").exists() == bool(what)
    assert run(source, output) == whole


def test_an_engine_whose_chat_cannot_be_opened_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, engine = list[bool](), stub()[0]
    monkeypatch.setattr(StubEngine, "close", lambda _: closed.append(True), raising=False)
    monkeypatch.setattr("inkling_engine.runtime.engine.Engine.load", lambda *_, **__: engine)

    def broken(*_: object) -> None:
        raise FailedError("tokenizer", "broken", "one that opens", "build again")

    monkeypatch.setattr("inkling_engine.runtime.batch.open_chat", broken)
    with pytest.raises(FailedError, match="tokenizer: found broken"):
        BatchRunner.load(tmp_path)
    assert closed == [True]
