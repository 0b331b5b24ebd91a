"""A target folder is whole or absent, whatever moment the build dies at."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.folders import build, contents, fill, manifest

from inkling_engine.artifacts import layout, store
from inkling_engine.artifacts.digest import file_digest
from inkling_engine.artifacts.errors import CorruptError, UsageError, UserError
from inkling_engine.artifacts.manifest import Manifest, WeightsEntry
from inkling_engine.artifacts.store import (
    add_files,
    discard,
    open_manifest,
    seal,
    stage,
    verify_files,
)

pytestmark = pytest.mark.null


class Death(BaseException):
    """The process is gone: nothing may catch it."""


def die_at(monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    """Raise Death at the `moment`-th effect, before it takes place; a write is left half done."""
    left, real_write = moment, Path.write_bytes

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def effect(*arguments: Any) -> Any:
            nonlocal left
            if left == 0:
                if function is real_write:
                    real_write(arguments[0], arguments[1][: len(arguments[1]) // 2])
                raise Death
            left -= 1
            return function(*arguments)

        return effect

    for name in ("fsync", "rename", "replace"):
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))
    monkeypatch.setattr(Path, "write_bytes", wrap(real_write))
    monkeypatch.setattr(store, "file_digest", wrap(file_digest))


def openable(folder: Path) -> bool:
    """Whether `folder` opens and proves itself."""
    try:
        verify_files(folder, open_manifest(folder))
    except UserError:
        return False
    return True


def attach(final: Path, *names: str) -> Manifest:
    """Add rank 0's weights and tokenizer files of these `names` to a programs-only engine."""
    texts = {f"{layout.TOKENIZER}/{name}": b"text" for name in names}
    staging = fill(stage(final), {layout.weights_file(0): b"late" * 500} | texts)
    weights = (WeightsEntry(rank=0, file=layout.weights_file(0)),)
    return add_files(final, staging, msgspec.structs.replace(open_manifest(final), weights=weights))


def test_a_sealed_folder_opens_and_lists_every_file(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "engine"
    built = build(final)
    assert open_manifest(final) == built
    verify_files(final, built)
    assert {entry.path: entry.size for entry in built.files} == {
        path: len(data) for path, data in contents(manifest()).items()
    }
    assert os.listdir(final.parent) == ["engine"]


def test_a_moved_or_copied_or_linked_folder_opens(tmp_path: Path) -> None:
    build(tmp_path / "engine")
    shutil.copytree(tmp_path / "engine", tmp_path / "copy")
    (tmp_path / "away").mkdir()
    shutil.move(tmp_path / "engine", tmp_path / "away" / "other")
    (tmp_path / "link").symlink_to(tmp_path / "copy")
    assert all(openable(tmp_path / name) for name in ("copy", "away/other", "link"))


def test_two_builds_differ_in_nothing(tmp_path: Path) -> None:
    build(tmp_path / "first")
    build(tmp_path / "second")
    first, second = (
        (tmp_path / name / layout.MANIFEST).read_bytes() for name in ("first", "second")
    )
    assert first == second


def test_death_at_any_moment_of_a_seal_leaves_no_half_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = 0
    while True:
        parent = tmp_path / str(moments)
        final = parent / "engine"
        staging = fill(stage(final), contents(manifest()))
        with monkeypatch.context() as patch:
            die_at(patch, moments)
            try:
                seal(staging, manifest(), final)
            except Death:
                pass
            else:
                break
        assert not any(openable(folder) for folder in parent.iterdir() if folder != final)
        assert not final.exists() or openable(final)
        build(final)
        assert openable(final) and os.listdir(parent) == ["engine"]
        moments += 1
    assert moments > 15


def test_death_at_any_moment_of_an_attach_leaves_the_old_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = 0
    while True:
        final = tmp_path / str(moments) / "engine"
        old = build(final, weights=False)
        with monkeypatch.context() as patch:
            die_at(patch, moments)
            try:
                attach(final, "a.json", "b.json")
            except Death:
                pass
            else:
                break
        assert openable(final)
        found = open_manifest(final)
        assert found == old or found.weights
        if found == old:
            discard(final.with_name(".staging-engine"))
            attach(final, "b.json")
        assert openable(final) and open_manifest(final).weights
        moments += 1
    assert moments > 6 and os.listdir(final.parent) == ["engine"]


def test_the_manifest_is_durable_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    real_sync, real_rename = store.sync, os.rename

    def sync(path: Path) -> None:
        done.append(path.name)
        real_sync(path)

    def rename(source: Path, target: Path) -> None:
        done.append("rename")
        real_rename(source, target)

    monkeypatch.setattr(store, "sync", sync)
    monkeypatch.setattr(os, "rename", rename)
    build(tmp_path / "engine")
    at = done.index("rename")
    before, after = done[:at], done[at + 1 :]
    assert {Path(name).name for name in contents(manifest())} <= set(before)
    assert {store._SCRATCH, ".staging-engine", "programs", "weights"} <= set(before)
    assert after == [tmp_path.name]


def test_a_staging_folder_is_reused_and_never_opens(tmp_path: Path) -> None:
    final = tmp_path / "engine"
    staging = fill(stage(final), {"programs/decode-r0001.pt2": b"done", layout.MANIFEST: b"{}"})
    again = stage(final)
    assert again == staging and (again / "programs/decode-r0001.pt2").read_bytes() == b"done"
    assert os.listdir(again) == ["programs"]
    with pytest.raises(CorruptError, match="never sealed"):
        open_manifest(staging)
    build(tmp_path / "other")
    shutil.copy(tmp_path / "other" / layout.MANIFEST, staging)
    with pytest.raises(CorruptError, match="never sealed"):
        open_manifest(staging)
    discard(staging)
    assert not staging.exists()


def test_discard_refuses_other_folders(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no staging folder"):
        discard(tmp_path)
    assert tmp_path.exists()


@pytest.mark.parametrize("name", ["programs/decode-r0009.pt2", "weights/rank7.safetensors"])
def test_a_seal_refuses_what_the_manifest_does_not_name(tmp_path: Path, name: str) -> None:
    staging = fill(stage(tmp_path / "engine"), contents(manifest()) | {name: b"stale"})
    with pytest.raises(AssertionError, match=name):
        seal(staging, manifest(), tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_a_seal_refuses_what_was_not_built(tmp_path: Path) -> None:
    staging = fill(stage(tmp_path / "engine"), contents(manifest()))
    (staging / "programs/decode-r0002.pt2").unlink()
    with pytest.raises(AssertionError, match=r"decode-r0002\.pt2"):
        seal(staging, manifest(), tmp_path / "engine")


def test_a_seal_refuses_links(tmp_path: Path) -> None:
    staging = fill(stage(tmp_path / "engine"), contents(manifest()))
    (staging / "tokenizer" / "merges").symlink_to(tmp_path)
    with pytest.raises(AssertionError, match="not a regular file"):
        seal(staging, manifest(), tmp_path / "engine")


def test_the_same_engine_again_is_kept(tmp_path: Path) -> None:
    final = tmp_path / "engine"
    first = build(final)
    later = msgspec.structs.replace(manifest(), created="2027-01-01T00:00:00Z")
    staging = fill(stage(final), contents(later) | {"report/times.json": b"[1]"})
    assert seal(staging, later, final) == first
    assert openable(final) and not staging.exists()


@pytest.mark.parametrize("other", ["engine", "broken engine", "folder", "file"])
def test_anything_else_at_the_target_is_refused_and_kept(tmp_path: Path, other: str) -> None:
    final = tmp_path / "engine"
    if other == "file":
        final.write_bytes(b"mine")
    else:
        fill(final, {"notes/mine.txt": b"mine"})
    if other.endswith("engine"):
        shutil.rmtree(final)
        build(final, weights=other == "broken engine")
    if other == "broken engine":
        (final / "tokenizer/tokenizer.json").write_bytes(b"[]")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=r"^--out: .*delete it$") as caught:
        build(final)
    assert "\n" not in str(caught.value)
    assert [path for path in sorted(tmp_path.rglob("*")) if ".staging-" not in str(path)] == before


def test_an_empty_folder_at_the_target_is_taken(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    build(tmp_path / "engine")
    assert openable(tmp_path / "engine")


def test_attached_weights_become_part_of_the_engine(tmp_path: Path) -> None:
    final = tmp_path / "engine"
    before = build(final, weights=False)
    after = attach(final)
    assert open_manifest(final) == after and openable(final)
    assert {entry.path for entry in after.files} - {entry.path for entry in before.files} == {
        layout.weights_file(0)
    }
    with pytest.raises(UsageError, match=r"weights/rank0\.safetensors.*never change"):
        attach(final)


def test_an_edited_engine_takes_no_weights(tmp_path: Path) -> None:
    final = tmp_path / "engine"
    build(final, weights=False)
    path = final / layout.MANIFEST
    path.write_text(path.read_text().replace('"source": "toy"', '"source": "fake"'))
    with pytest.raises(CorruptError, match="manifest_sha256"):
        attach(final)
