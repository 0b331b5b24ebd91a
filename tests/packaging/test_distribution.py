"""What pip installs is what the tree holds: packages, native sources, the tiny model, type marks."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

from inkling_engine.artifacts.compat import ENGINE_VERSION

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("artifacts", "compile", "kernels", "runtime")
TINY = "compile/models/inkling/tiny"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_on_disk() -> list[str]:
    """Dotted names of all folders with an `__init__.py`; built engines have none."""
    folders = [path.parent for room in ROOMS for path in (ROOT / room).rglob("__init__.py")]
    return sorted(".".join(("inkling_engine", *f.relative_to(ROOT).parts)) for f in folders)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of a copy of the tree, built by the environment's own setuptools."""
    tree = tmp_path_factory.mktemp("tree")
    for room in ROOMS:
        ignore = shutil.ignore_patterns("__pycache__", *engines(room))
        shutil.copytree(ROOT / room, tree / room, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    code = "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return zipfile.ZipFile(next((tree / "dist").glob("*.whl")))


def engines(room: str) -> list[str]:
    """Names of built engines: the folders in `artifacts`."""
    return [path.name for path in (ROOT / room).iterdir() if path.is_dir() and room == "artifacts"]


def expected_files() -> set[str]:
    """Files of the tree that a wheel must hold, as names in the wheel."""
    names = set()
    for room in ROOMS:
        pattern = "*" if room == "artifacts" else "**/*"
        names |= {
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / room).glob(pattern)
            if path.suffix in (".py", ".h", ".cpp") or path.name == "py.typed"
        }
    names |= {f"{TINY}/{path.name}" for path in (ROOT / TINY).iterdir()}
    return {f"inkling_engine/{name}" for name in names}


def test_every_package_is_listed() -> None:
    assert PROJECT["tool"]["setuptools"]["packages"] == packages_on_disk()


def test_the_wheel_holds_every_source_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert inside == expected_files()


def test_every_room_is_typed(wheel: zipfile.ZipFile) -> None:
    assert {f"inkling_engine/{room}/py.typed" for room in ROOMS} <= set(wheel.namelist())
    assert "inkling_engine/__init__.py" not in wheel.namelist()


def test_metadata(wheel: zipfile.ZipFile) -> None:
    folder = f"inkling_engine-{ENGINE_VERSION}.dist-info"
    fields = Parser().parsestr(wheel.read(f"{folder}/METADATA").decode())
    assert fields["Version"] == ENGINE_VERSION
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields["Requires-Python"] == ">=3.11"
    assert "torch<2.15,>=2.11" in fields.get_all("Requires-Dist", [])
    scripts = wheel.read(f"{folder}/entry_points.txt").decode()
    assert "compile-engine = inkling_engine.compile.cli:main" in scripts
    assert "inkling-engine = inkling_engine.runtime.cli:main" in scripts
    assert f"{folder}/licenses/LICENSE" in wheel.namelist()


def test_an_unpacked_wheel_imports_without_the_tree(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    code = (
        "import inkling_engine.artifacts.store as store, inkling_engine.compile.cli as cli, sys\n"
        f"sys.exit(not (store.__file__.startswith({str(tmp_path)!r}) and callable(cli.main)))"
    )
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PYTHONSAFEPATH": "1"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)


def test_the_tiny_model_is_whole() -> None:
    files = {path.name for path in (ROOT / TINY).iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_explains_itself(room: str) -> None:
    assert len((ROOT / room / "README.md").read_text().split()) > 50
