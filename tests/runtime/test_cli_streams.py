"""The batch command with standard streams closed, full or read by nobody, as a real process."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.batch_rig import line, read_lines, write_lines
from support.fake_spec import build_spec
from support.fake_step import seal_engine

from inkling_engine.runtime import batch_progress
from inkling_engine.runtime.batch_progress import Meter, shown

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("built") / "engine"
    seal_engine(path, build_spec())
    return path


def batch(folder: Path, work: Path, streams: str, stderr: int = subprocess.PIPE) -> tuple[int, str]:
    """Run a job of 30 lines, `streams` redirected as a shell does; exit code and what was said."""
    write_lines(work / "in", [line(f"{at}") for at in range(30)])
    job = [sys.executable, "-m", "support.fake_cli", "batch", folder]
    shell = ["sh", "-c", f'"$@" {streams}', "sh", *map(str, job)]
    paths = (str(TESTS), os.environ.get("PYTHONPATH", ""))
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [*shell, "--input", str(work / "in"), "--output", str(work / "out")],
        env={**buffered, "PYTHONPATH": os.pathsep.join(paths), "INKLING_ENGINE_CACHE": str(work)},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        check=False,
    )
    answers = read_lines(work / "out")
    assert [one["custom_id"] for one in answers if one["response"]] == [f"{at}" for at in range(30)]
    return done.returncode, done.stderr or ""


@pytest.mark.parametrize("streams", ["", ">&-", "2>&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_a_job_does_not_need_its_streams(folder: Path, tmp_path: Path, streams: str) -> None:
    code, said = batch(folder, tmp_path, streams)
    assert code == 0, said
    assert "error" not in said and "Traceback" not in said


def test_a_summary_that_cannot_be_printed_is_one_line(folder: Path, tmp_path: Path) -> None:
    code, said = batch(folder, tmp_path, ">/dev/full")
    assert code == 1 and "Traceback" not in said
    last = said.splitlines()[-1]
    assert last.startswith("error: stdout: found ") and "No space left" in last


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_a_result_that_cannot_be_printed_is_one_line(folder: Path) -> None:
    command = [sys.executable, "-m", "inkling_engine.runtime.cli", "inspect", str(folder)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: stdout: found No space")


def test_a_job_goes_on_when_nobody_reads_its_progress(folder: Path, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert batch(folder, tmp_path, "", stderr=writer)[0] == 0
    os.close(writer)


class Terminal(io.StringIO):
    """A terminal that hangs up after a few writes."""

    left = 5

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)


@pytest.mark.parametrize("kind", ["terminal", "closed", "none"])
def test_a_watch_without_a_reader_switches_itself_off(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(batch_progress, "_BAR_SECONDS", 0.0)
    monkeypatch.setattr(batch_progress, "_LINE_SECONDS", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", None if kind == "none" else stream)
    if kind == "closed":
        stream.close()
    with shown() as watch:
        for _ in range(5):
            watch(Meter(2))
    if kind == "terminal":
        assert stream.left < -1, "it was written to until it hung up, and once at the end"
