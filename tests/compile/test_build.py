"""Builds that are killed, interrupted, repeated and run side by side."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.builds import EXTEND, ITEMS, MOMENTS, Builds
from support.compiler import refused, watched

from inkling_engine.artifacts import store
from inkling_engine.artifacts.digest import file_digest
from inkling_engine.artifacts.errors import FailedError, UsageError, UserError
from inkling_engine.artifacts.layout import REPORT, weights_file
from inkling_engine.artifacts.manifest import Manifest
from inkling_engine.compile import build as build_module
from inkling_engine.compile import convert, items
from inkling_engine.compile.build import build
from inkling_engine.compile.lock import locked
from inkling_engine.compile.options import BuildOptions
from inkling_engine.compile.plan import Plan, make_plan

GIVEN = {"device": "cpu", "page_size": 4, "snapshot_grid": 8}
GIVEN |= {"decode_buckets": "2", "extend_buckets": "16x2"}


def plan_of(checkpoint: Path, out: Path, **given: object) -> Plan:
    fields = {"model": str(checkpoint), "out": str(out), **GIVEN, **given}
    return make_plan(msgspec.convert(fields, BuildOptions))


def silent(item: str, state: str, value: float) -> None:
    """Progress that nobody looks at."""


def essence(manifest: Manifest) -> Manifest:
    """The manifest without times."""
    files = tuple(entry for entry in manifest.files if not entry.path.startswith(f"{REPORT}/"))
    return msgspec.structs.replace(manifest, created="", files=files, manifest_sha256="")


def states(lines: list[str], state: str) -> set[str]:
    """Items that a run's progress calls `state`."""
    words = [line.partition("] ")[2].split(": ") for line in lines]
    return {item for item, *rest in words if rest and rest[0].startswith(state)}


def test_a_killed_build_leaves_nothing_that_opens(builds: Builds) -> None:
    assert len(builds.left) == len(MOMENTS) == 10
    for found in builds.left:
        assert builds.killed not in found
        for folder in found:
            with pytest.raises(UserError):
                store.open_manifest(folder)


def test_every_moment_was_met_and_its_work_was_kept(builds: Builds) -> None:
    begun, done = set[str](), set[str]()
    for lines, (text, _) in zip(builds.runs, MOMENTS, strict=False):
        assert not lines or text in lines[-1]
        assert states(lines, "reused") <= begun
        assert states(lines, "started") & done == set()
        begun |= states(lines, "started")
        done |= states(lines, "done")
    assert done == set(ITEMS) - {"kernels"} or done == set(ITEMS)


def test_the_last_run_only_verifies(builds: Builds) -> None:
    last = builds.runs[-1]
    assert states(last, "reused") == set(ITEMS)
    assert states(last, "started") == states(last, "done") == {"verify"}


def test_both_builds_are_the_same_engine(builds: Builds) -> None:
    whole, killed = (store.open_manifest(folder) for folder in (builds.whole, builds.killed))
    assert essence(whole) == essence(killed)
    for folder, manifest in ((builds.whole, whole), (builds.killed, killed)):
        store.verify_files(folder, manifest)
    assert whole.engine_id.startswith("two-layers-tp1-")


def test_nothing_is_left_beside_a_finished_engine(builds: Builds) -> None:
    assert [path.name for path in builds.killed.parent.iterdir()] == ["killed"]


def test_a_second_build_of_the_same_name_is_refused(builds: Builds) -> None:
    assert builds.second is not None
    line = refused(builds.second, 2)
    assert line.startswith(f"error: --out: found {builds.whole}, in use by another build")


def test_ctrl_c_ends_a_build_in_one_line(builds: Builds, tmp_path: Path) -> None:
    with watched(builds.start(tmp_path / "interrupted")) as run:
        run.wait_for(f"{EXTEND}: started")
        assert run.interrupt() == 130
    assert run.lines[-1] == "error: interrupted"
    assert not any("Traceback" in line for line in run.lines)
    assert not (tmp_path / "interrupted").exists()


def test_the_same_engine_is_kept(builds: Builds, checkpoint: Path) -> None:
    seen = []
    before = file_digest(builds.whole / "manifest.json")
    found = build(plan_of(checkpoint, builds.whole), lambda *line: seen.append(line))
    assert found == builds.whole
    assert seen == [("engine", "reused", 0.0)]
    assert file_digest(builds.whole / "manifest.json") == before


def test_another_engine_of_the_same_name_is_refused(builds: Builds, checkpoint: Path) -> None:
    with pytest.raises(UsageError, match=f"--out: found {builds.whole}, which holds two-layers"):
        build(plan_of(checkpoint, builds.whole, page_size=8), silent)


def test_a_damaged_engine_is_not_kept(builds: Builds, checkpoint: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(builds.whole, tmp_path / "copy")
    (copy / weights_file(0)).write_bytes(b"")
    with pytest.raises(UsageError, match="no sound engine"):
        build(plan_of(checkpoint, copy), silent)


def fake_items(monkeypatch: pytest.MonkeyPatch, engine: Path) -> list[str]:
    """Make items from a finished engine instead of compiling; returns the list of those made."""
    manifest, made = store.open_manifest(engine), []

    def copy(name: str, file: str, staging: Path, note: bytes) -> bytes:
        made.append(name)
        (staging / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(engine / file, staging / file)
        return note

    def program(spec: object, bucket: object, staging: Path, work: Path) -> bytes:
        entry = next(entry for entry in manifest.programs if entry.bucket == bucket)
        return copy(entry.name, entry.file, staging, msgspec.json.encode(entry))

    def kernels(spec: object, staging: Path) -> bytes:
        return copy("kernels", manifest.kernel_library, staging, b"")

    monkeypatch.setattr(items, "program", program)
    monkeypatch.setattr(items, "kernels", kernels)
    return made


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo noise >&2; echo 'error: gate twin: off' >&2; exit 1", "error: gate twin: off"),
        ("echo noise >&2; kill -9 $$", "killed by SIGKILL"),
        ("exit 3", "exit code 3"),
    ],
)
def test_a_failing_worker_becomes_one_line(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, found: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    spec = plan_of(checkpoint, tmp_path / "engine").spec
    monkeypatch.setenv("INKLING_ENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(FailedError, match=f"program {EXTEND}: found {found}; ") as caught:
        items.program(spec, spec.buckets[-1], tmp_path / "staging", tmp_path)
    assert "\n" not in str(caught.value)


def test_a_failing_item_leaves_the_others_for_the_next_run(
    builds: Builds, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, out = fake_items(monkeypatch, builds.whole), tmp_path / "engine"
    real = items.weights
    monkeypatch.setattr(build_module, "_verify", lambda build: None)

    def failing(*_: object) -> bytes:
        raise FailedError("disk", "full", "free", "free some")

    monkeypatch.setattr(items, "weights", failing)
    with pytest.raises(FailedError, match="disk"):
        build(plan_of(checkpoint, out), silent)
    assert not out.exists()
    first = set(made)
    monkeypatch.setattr(items, "weights", real)
    assert build(plan_of(checkpoint, out), silent) == out
    assert "kernels" in first and len(made) == len(set(made)) == 3
    assert essence(store.open_manifest(out)) == essence(store.open_manifest(builds.whole))


def test_a_failing_item_ends_a_conversion_that_runs(
    builds: Builds, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does Ctrl-C: the conversion of a large model would go on for minutes."""
    fake_items(monkeypatch, builds.whole)
    begun, stopped = threading.Event(), threading.Event()
    pieces, stop = convert._pieces, items.stop_workers

    def slow(*given: Any) -> Iterator[bytes | memoryview]:
        for piece in pieces(*given):
            yield piece
            begun.set()
            assert stopped.wait(60)

    def failing(*_: object) -> bytes:
        assert begun.wait(60)
        raise FailedError("disk", "full", "free", "free some")

    def stop_workers() -> None:
        stop()
        stopped.set()

    monkeypatch.setattr(convert, "_pieces", slow)
    monkeypatch.setattr(items, "program", failing)
    monkeypatch.setattr(items, "stop_workers", stop_workers)
    with pytest.raises(FailedError, match="disk"):
        build(plan_of(checkpoint, tmp_path / "engine", jobs=3), silent)
    assert list((tmp_path / ".staging-engine" / "weights").iterdir()) == []


def test_an_engine_that_does_not_verify_never_appears(
    builds: Builds, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, out = fake_items(monkeypatch, builds.whole), tmp_path / "engine"
    real = items.golden

    def wrong(plan: Plan, staging: Path, work: Path) -> bytes:
        note: bytes = real(plan, staging, work)
        path = staging / "golden" / "golden.json"
        path.write_bytes(path.read_bytes().replace(b'"logprobs":[-', b'"logprobs":[-1'))
        return note

    monkeypatch.setattr(items, "golden", wrong)
    with pytest.raises(FailedError, match="verify: .*golden prompt of 3 tokens, position 0"):
        build(plan_of(checkpoint, out), silent)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    made.clear()
    monkeypatch.setattr(items, "golden", real)
    monkeypatch.setattr(build_module, "_verify", lambda build: None)
    assert build(plan_of(checkpoint, out), silent) == out
    assert len(made) == 3, "nothing of a failed engine is used again"


NO_MEMORY = "noise\nerror: memory: found 1 GiB; expected 2 GiB; free some\n"
AGAIN = "build again: it goes on with verify"


@pytest.mark.parametrize(
    ("code", "printed", "message", "kept"),
    [
        (
            -9,
            "",
            f"verify: found killed by SIGKILL; expected an engine that verifies; {AGAIN}",
            True,
        ),
        (
            5,
            NO_MEMORY,
            f"verify: memory: found 1 GiB; expected 2 GiB; free some; then {AGAIN}",
            True,
        ),
        (
            4,
            "error: x: found y; expected z; w",
            "verify: found x: found y; expected z; w; exp",
            False,
        ),
        (1, "", "verify: found exit code 1; expected an engine that verifies; report this", False),
    ],
)
def test_an_engine_is_kept_where_the_machine_failed_it(
    builds: Builds,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    printed: str,
    message: str,
    kept: bool,
) -> None:
    made, out = fake_items(monkeypatch, builds.whole), tmp_path / "engine"
    codes = [code, 0]

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, codes.pop(0), "", printed)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(UserError) as caught:
        build(plan_of(checkpoint, out), silent)
    assert str(caught.value).startswith(message) and caught.value.exit_code == (
        5 if code == 5 else 1
    )
    assert build(plan_of(checkpoint, out), silent) == out
    assert len(made) == (3 if kept else 6)


def test_what_another_build_made_meanwhile_is_kept(
    builds: Builds, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked for the engine before the other one had finished, and got the lock after it."""
    made, out = fake_items(monkeypatch, builds.whole), tmp_path / "engine"
    monkeypatch.setattr(build_module, "_verify", lambda build: None)

    def late(*given: Any) -> AbstractContextManager[None]:
        monkeypatch.setattr(build_module, "locked", locked)
        build(plan_of(checkpoint, out), silent)
        return locked(*given)

    seen = []
    monkeypatch.setattr(build_module, "locked", late)
    assert build(plan_of(checkpoint, out), lambda *line: seen.append(line)) == out
    assert seen == [("engine", "reused", 0.0)] and len(made) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_a_build_that_died_in_its_last_step_leaves_nothing_after_the_next(
    builds: Builds, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, out = fake_items(monkeypatch, builds.whole), tmp_path / "engine"
    monkeypatch.setattr(build_module, "_verify", lambda build: None)

    def killed(folder: Path, **given: Any) -> None:
        if out.exists():
            raise KeyboardInterrupt
        rmtree(folder, **given)

    rmtree = shutil.rmtree
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed)
        build(plan_of(checkpoint, out), silent)
    assert {path.name for path in tmp_path.iterdir()} > {"engine", ".build-engine"}
    assert build(plan_of(checkpoint, out), silent) == out and len(made) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_work_for_another_engine_is_not_reused(
    builds: Builds, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, out = fake_items(monkeypatch, builds.whole), tmp_path / "engine"

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build_module, "_verify", killed)
        for grid in (8, 16, 8):
            with pytest.raises(KeyboardInterrupt):
                build(plan_of(checkpoint, out, snapshot_grid=grid), silent)
    assert len(made) == 9
    monkeypatch.setattr(build_module, "_verify", lambda build: None)
    assert build(plan_of(checkpoint, out), silent) == out
    assert len(made) == 9


@pytest.mark.parametrize("name", [".staging-engine", ".build-engine"])
def test_names_that_builds_use_are_no_targets(checkpoint: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="--out: found .*a name that builds do not use"):
        build(plan_of(checkpoint, tmp_path / name), silent)
    assert not list(tmp_path.iterdir())
