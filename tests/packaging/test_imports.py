"""Walls and start-up cost: what each room may import, and what importing it may load."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = "inkling_engine"
ALLOWED = {
    "artifacts": {"msgspec"},
    "kernels": {"torch", "triton"},
    "compile": {"artifacts", "kernels", "torch", "safetensors", "click", "rich", "filelock"}
    | {"platformdirs", "msgspec", "tokenizers", "triton"},
    "runtime": {"artifacts", "kernels", "torch", "safetensors", "tokenizers", "click"}
    | {"rich", "msgspec", "platformdirs", "ray"},
}
HEAVY = ("torch", "triton", "transformers", "safetensors", "numpy", "tokenizers")
LIGHT = [
    "inkling_engine.artifacts",
    "inkling_engine.artifacts.compat",
    "inkling_engine.artifacts.store",
    "inkling_engine.compile.cli",
    "inkling_engine.runtime",
    "inkling_engine.runtime.batch_input",
    "inkling_engine.runtime.batch_output",
    "inkling_engine.runtime.chat",
    "inkling_engine.runtime.cli",
    "inkling_engine.runtime.ray_batch",
    "inkling_engine.runtime.report",
    "inkling_engine.runtime.requests",
    "inkling_engine.runtime.scheduler",
]


def files(room: str) -> list[Path]:
    """Python files of a room; the sub-folders of `artifacts` are built engines."""
    return sorted((ROOT / room).glob("*.py" if room == "artifacts" else "**/*.py"))


def imported(path: Path) -> Iterator[str]:
    """Rooms and top-level modules that a file names in imports, wherever they stand."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
            if node.module == NAMESPACE:
                names = [f"{NAMESPACE}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            yield parts[1] if parts[0] == NAMESPACE else parts[0]


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_its_row_of_the_table_names(room: str) -> None:
    allowed = ALLOWED[room] | {room} | set(sys.stdlib_module_names)
    found = {(path.name, name) for path in files(room) for name in imported(path)}
    assert {(file, name) for file, name in found if name not in allowed} == set()


@pytest.mark.parametrize("module", LIGHT)
def test_importing_loads_nothing_heavy(module: str) -> None:
    code = (
        f"import {module}, sys\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
        f"if '.artifacts' in {module!r}: assert 'rich' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    assert done.stdout.strip() == "[]"


def test_public_names_are_all_importable() -> None:
    code = (
        "import inkling_engine.artifacts as room, sys\n"
        "assert 'msgspec' not in sys.modules\n"
        "assert all(getattr(room, name) for name in room.__all__)\n"
        "assert not hasattr(room, 'nothing')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_compilers_options_are_frozen() -> None:
    from inkling_engine.compile.cli import command

    options = sorted(parameter.name or "" for parameter in command.params)
    assert len(options) <= 20
    assert options == OPTIONS


OPTIONS = sorted(
    [
        "arch",
        "as_json",
        "checkpoint",
        "config",
        "decode_buckets",
        "device",
        "dry_run",
        "dtype",
        "extend_buckets",
        "jobs",
        "max_context",
        "max_running",
        "model",
        "out",
        "page_size",
        "rank_weights",
        "snapshot_grid",
        "spec_depth",
        "tp",
        "verbose",
    ]
)
