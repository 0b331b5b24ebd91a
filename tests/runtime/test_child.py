"""Child processes import what is installed, whatever lies in the folder that the user works in."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from inkling_engine import artifacts
from inkling_engine.artifacts.child import module_command
from inkling_engine.runtime import probe

ROOMS = Path(artifacts.__file__).parent.parent
FOREIGN = "raise SystemExit('foreign code runs')\n"


@pytest.fixture(autouse=True)
def _among_foreign_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Work in a folder with modules that shadow installed ones, as the console script would."""
    for name in ("tempfile", "torch", "json", "click"):
        (tmp_path / f"{name}.py").write_text(FOREIGN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)


def test_a_module_is_run_without_the_working_folder() -> None:
    command = module_command("json.tool", "--help")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "usage" in done.stdout, done.stderr


def test_the_probe_does_not_run_foreign_code(tmp_path: Path) -> None:
    process = probe.start(tmp_path / "none", "cpu")
    _, errors = process.communicate()
    assert process.returncode == 1 and "engine folder" in errors, errors


def test_every_child_is_started_so() -> None:
    """Nothing but `child.py` names the interpreter: who does would have to think of this too."""
    naming = [
        str(path.relative_to(ROOMS))
        for room in ("artifacts", "compile", "kernels", "runtime")
        for path in sorted((ROOMS / room).rglob("*.py"))
        if "sys.executable" in path.read_text()
    ]
    assert naming == ["artifacts/child.py"]
