"""The cache of native libraries: one file for each source, CPU and compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from inkling_engine.kernels import native

COMPILER = """#!/bin/sh
case "$*" in *-###*) echo "$MACHINE" >&2; exit;; esac
while [ "$1" != -o ]; do shift; done
echo "$MACHINE" > "$2"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that says on which $MACHINE it runs, and makes a library of it."""
    path = tmp_path / "c++"
    path.write_text(COMPILER)
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path


def test_native_libraries_of_two_machines_share_a_cache(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for machine in ("old", "new", "old"):
        monkeypatch.setenv("MACHINE", machine)
        found.append(native.compile_library(tmp_path / "cache", "native"))
        assert found[-1].read_text() == f"{machine}\n"
    assert found[0] == found[2] != found[1]


def test_a_named_architecture_is_the_same_everywhere(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = set()
    for machine in ("old", "new"):
        monkeypatch.setenv("MACHINE", machine)
        found.add(native.source_digest("x86-64-v3"))
    assert len(found) == 1
    assert native.source_digest("native") not in found


def test_without_a_compiler_nothing_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "nowhere"))
    with pytest.raises(native.CompilerError, match="install g\\+\\+ or set CXX"):
        native.compile_library(tmp_path / "cache", "native")
