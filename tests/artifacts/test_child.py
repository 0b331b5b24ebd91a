"""How the end of a child process is put into words."""

from __future__ import annotations

import subprocess
import sys

import pytest

from inkling_engine.artifacts.child import how_it_ended


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import sys; sys.exit('noise\\nerror: x: found y')", "error: x: found y"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("print('noise', flush=True); import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
        ("import os; os.kill(os.getpid(), 40)", "killed by signal 40"),
    ],
)
def test_signal_last_line_or_code(script: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert how_it_ended(done.returncode, done.stderr or done.stdout) == said
