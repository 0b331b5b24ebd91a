"""A folder whose bytes are not what was built never passes: every kind of damage has its message."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.folders import build

from inkling_engine.artifacts.compat import Environment, require
from inkling_engine.artifacts.digest import digest
from inkling_engine.artifacts.errors import (
    CorruptError,
    IncompatibleError,
    UsageError,
    UserError,
)
from inkling_engine.artifacts.layout import MANIFEST
from inkling_engine.artifacts.manifest import Manifest
from inkling_engine.artifacts.store import open_manifest, verify_files

pytestmark = pytest.mark.null

HERE = Environment(
    engine="0.1.0", torch="2.13.0+cpu", cuda="none", machine="x86_64", cpu_level=4, glibc="2.36"
)


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """A fresh sealed folder."""
    build(tmp_path / "engine")
    return tmp_path / "engine"


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One sealed folder for property tests, which restore what they change."""
    folder = tmp_path_factory.mktemp("lasting") / "engine"
    build(folder)
    return folder


def load(folder: Path) -> Manifest:
    """Open in the order of the runtime: read, compare, prove."""
    found = open_manifest(folder)
    require(found, HERE)
    verify_files(folder, found)
    return found


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Apply `change` to the manifest's JSON."""
    path = folder / MANIFEST
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def message(kind: type[UserError], folder: Path) -> str:
    """The one line that loading `folder` ends with."""
    with pytest.raises(kind) as caught:
        load(folder)
    assert type(caught.value) is kind and "\n" not in str(caught.value)
    return str(caught.value)


def test_exit_codes() -> None:
    assert (UsageError.exit_code, IncompatibleError.exit_code, CorruptError.exit_code) == (2, 3, 4)


def test_no_folder(tmp_path: Path) -> None:
    assert "compile-engine" in message(UsageError, tmp_path / "nothing")


def test_an_unsealed_folder(engine: Path) -> None:
    (engine / MANIFEST).unlink()
    assert "never sealed" in message(CorruptError, engine)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"{}", b'{"schema_version":true}']
)
def test_a_manifest_that_is_none(engine: Path, data: bytes) -> None:
    (engine / MANIFEST).write_bytes(data)
    assert MANIFEST in message(CorruptError, engine)


def test_a_manifest_without_end(engine: Path) -> None:
    (engine / MANIFEST).write_bytes(b'{"schema_version":1,"spec":' + b"[" * 100_000)
    assert MANIFEST in message(CorruptError, engine)


def test_a_truncated_manifest(engine: Path) -> None:
    data = (engine / MANIFEST).read_bytes()
    for length in range(0, len(data) - 2, 97):
        (engine / MANIFEST).write_bytes(data[:length])
        message(CorruptError, engine)


def test_an_unknown_key_is_named(engine: Path) -> None:
    edit(engine, lambda values: values["spec"].update(speculation=3))
    assert "`speculation`" in message(CorruptError, engine)


@pytest.mark.parametrize("key", sorted(Manifest.__struct_fields__))
def test_a_missing_key_is_named(engine: Path, key: str) -> None:
    edit(engine, lambda values: values.pop(key))
    found = message(CorruptError, engine)
    assert key in found or (key == "files" and "manifest_sha256" in found)


def test_a_newer_schema(engine: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        values.update(schema_version=2, invented_later=1)

    edit(engine, change)
    assert "schema_version: found 2; expected schema 1; update inkling-engine" in message(
        IncompatibleError, engine
    )


@pytest.mark.parametrize("version", [0, -1])
def test_a_schema_that_never_was(engine: Path, version: int) -> None:
    edit(engine, lambda values: values.update(schema_version=version))
    assert "schema_version" in message(CorruptError, engine)


def test_a_hand_edited_manifest(engine: Path) -> None:
    edit(engine, lambda values: values["spec"].update(max_running=9))
    assert "manifest_sha256" in message(CorruptError, engine)


def test_a_reformatted_manifest_is_the_same_manifest(engine: Path) -> None:
    edit(engine, lambda values: None)
    load(engine)


def test_another_torch_is_the_better_reason(engine: Path) -> None:
    edit(engine, lambda values: values["environment"].update(torch="2.12.1+cpu"))
    assert "2.12.1" in message(IncompatibleError, engine)


def test_a_missing_an_extra_and_a_short_file_in_one_message(engine: Path) -> None:
    (engine / "programs/decode-r0001.pt2").unlink()
    (engine / "programs/decode-r0004.pt2").write_bytes(b"new")
    (engine / "weights/rank0.safetensors").write_bytes(b"short")
    found = message(CorruptError, engine)
    for part in (
        "3 faults",
        "missing programs/decode-r0001.pt2",
        "extra programs/decode-r0004.pt2",
        "weights/rank0.safetensors has 5 bytes, not 7000",
    ):
        assert part in found


def test_swapped_programs(engine: Path) -> None:
    one, two = engine / "programs/decode-r0001.pt2", engine / "programs/decode-r0002.pt2"
    first = one.read_bytes()
    assert len(first) == two.stat().st_size
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)
    assert message(CorruptError, engine).count("has other content") == 2


def test_a_link_is_not_the_file(engine: Path) -> None:
    path = engine / "programs/decode-r0001.pt2"
    path.rename(engine.parent / "elsewhere")
    path.symlink_to(engine.parent / "elsewhere")
    assert "missing programs/decode-r0001.pt2" in message(CorruptError, engine)


@pytest.mark.parametrize("path", ["../outside", "/etc/hostname", "programs/../../outside"])
def test_paths_stay_inside(engine: Path, path: str) -> None:
    found = open_manifest(engine)
    entry = msgspec.structs.replace(found.files[0], path=path)
    verified = msgspec.structs.replace(found, files=(*found.files, entry), manifest_sha256="")
    sealed = msgspec.structs.replace(verified, manifest_sha256=digest(verified))
    with pytest.raises(CorruptError, match="outside the folder"):
        verify_files(engine, sealed)


def test_extra_weights_are_refused_where_weights_are_listed(engine: Path) -> None:
    (engine / "weights/rank1.safetensors").write_bytes(b"x")
    assert "extra weights/rank1.safetensors" in message(CorruptError, engine)


@settings(max_examples=200)
@given(data=st.data())
def test_any_flipped_byte_is_refused(lasting: Path, data: st.DataObject) -> None:
    names = sorted(path.relative_to(lasting) for path in lasting.rglob("*") if path.is_file())
    path = lasting / data.draw(st.sampled_from(names))
    before = path.read_bytes()
    position = data.draw(st.integers(0, len(before) - 1))
    flipped = before[position] ^ (1 << data.draw(st.integers(0, 7)))
    path.write_bytes(before[:position] + bytes([flipped]) + before[position + 1 :])
    original = msgspec.json.decode(before, type=Manifest) if path.name == MANIFEST else None
    try:
        found = load(lasting)
    except (CorruptError, IncompatibleError):
        return
    finally:
        path.write_bytes(before)
    assert found == original, f"byte {position} of {path.name} went unnoticed"
