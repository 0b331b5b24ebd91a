"""The two commands as processes, and builds that can be watched and killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

COMPILE_ENGINE: Final = (sys.executable, "-m", "inkling_engine.compile.cli")
INKLING_ENGINE: Final = (sys.executable, "-m", "inkling_engine.runtime.cli")
ERROR_LINE: Final = re.compile(r"error: (.+): found (.+); expected (.+); (.+)\n")

Done = subprocess.CompletedProcess[str]


def compile_engine(*arguments: object, cwd: Path | None = None) -> Done:
    """Run `compile-engine` to its end."""
    return _run(COMPILE_ENGINE, arguments, cwd)


def inkling_engine(*arguments: object, cwd: Path | None = None) -> Done:
    """Run `inkling-engine` to its end."""
    return _run(INKLING_ENGINE, arguments, cwd)


def refused(done: Done, code: int) -> str:
    """Assert that a command refused with `code` in one line of four parts; returns the line."""
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert ERROR_LINE.fullmatch(done.stderr), done.stderr
    return done.stderr


class Watched:
    """A build in a process group of its own, whose progress lines can be waited for."""

    def __init__(self, *arguments: object) -> None:
        """Start `compile-engine` with `--verbose`."""
        command = [*COMPILE_ENGINE, *map(str, arguments), "--verbose"]
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for(self, text: str) -> None:
        """Read progress until a line holds `text`; the build must not end before. Every line
        holds the empty text, which is there at once."""
        if not text:
            return
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line.rstrip())
            if text in line:
                return
        raise AssertionError(f"no {text!r} in {self.lines}")

    def kill(self, after: float = 0.0) -> None:
        """SIGKILL the whole process group in `after` seconds."""
        time.sleep(after)
        assert self._process.poll() is None, f"the build ended before the kill: {self.lines}"
        self._end(signal.SIGKILL)

    def interrupt(self) -> int:
        """Ctrl-C; returns the exit code."""
        os.killpg(self._process.pid, signal.SIGINT)
        return self.finish()

    def finish(self) -> int:
        """Wait for the end; returns the exit code, the rest of stderr is in `lines`."""
        _, errors = self._process.communicate()
        self.lines += errors.splitlines()
        return self._process.returncode

    def stop(self) -> None:
        """End whatever still runs."""
        if self._process.poll() is None:
            self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        os.killpg(self._process.pid, number)
        self._process.communicate()


@contextmanager
def watched(build: Watched) -> Iterator[Watched]:
    """The build, which does not outlive the block."""
    try:
        yield build
    finally:
        build.stop()


def _run(command: tuple[str, ...], arguments: tuple[object, ...], cwd: Path | None) -> Done:
    line = [*command, *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False, cwd=cwd)
