"""The size report fails on a broken hard cap and on nothing else."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "size.py"


@pytest.fixture
def size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, its project an empty folder."""
    spec = importlib.util.spec_from_file_location("size", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for room in (*module.ROOMS, "tests"):
        (tmp_path / room).mkdir()
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def function(lines: int, decorator: str = "") -> str:
    """Source of a function of so many lines."""
    return f"{decorator}def f() -> None:\n" + "    pass\n" * (lines - 1)


@pytest.mark.parametrize(
    ("room", "name", "text", "broken"),
    [
        ("kernels", "a.py", "x = 1\n" * 400, ""),
        ("kernels", "a.py", "x = 1\n" * 401, "kernels/a.py: 401 lines, cap 400"),
        ("kernels", "a.h", "//\n" * 401, "kernels/a.h: 401 lines, cap 400"),
        ("tests", "a.py", "x = 1\n" * 500, ""),
        ("tests", "a.py", "x = 1\n" * 501, "tests/a.py: 501 lines, cap 500"),
        ("runtime", "a.py", function(50), ""),
        ("runtime", "a.py", function(51), "runtime/a.py:1 f: 51 lines, cap 50"),
        ("kernels", "a.py", function(120, "@triton.jit\n"), ""),
        ("kernels", "a.py", function(121, "@triton.jit\n"), "kernels/a.py:2 f: 121 lines, cap 120"),
    ],
)
def test_hard_caps(
    size: ModuleType, tmp_path: Path, room: str, name: str, text: str, broken: str
) -> None:
    (tmp_path / room / name).write_text(text)
    code = [path for folder in size.ROOMS for path in size.sources(folder)]
    assert size.broken_caps(code, size.sources("tests")) == ([broken] if broken else [])


def test_built_engines_are_not_code(size: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "artifacts" / "engine").mkdir()
    (tmp_path / "artifacts" / "engine" / "wrapper.cpp").write_text("//\n" * 9999)
    assert size.sources("artifacts") == []
