"""Runs a Plan: items in parallel, each resumable, then seal, then `verify` in a child process.

Finished items lie in the staging folder with a note beside it; a build that was killed picks them
up again. The engine appears under its name only when it is whole and has verified.
"""

from __future__ import annotations

import datetime
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from inkling_engine.artifacts import store
from inkling_engine.artifacts.child import how_it_ended, module_command
from inkling_engine.artifacts.compat import Environment
from inkling_engine.artifacts.digest import Identity, engine_digest
from inkling_engine.artifacts.errors import (
    DoesNotFitError,
    FailedError,
    IncompatibleError,
    UsageError,
    UserError,
)
from inkling_engine.artifacts.layout import (
    REPORT,
    TOKENIZER,
    engine_id,
    kernel_library_file,
    program_name,
    weights_file,
)
from inkling_engine.artifacts.manifest import SCHEMA_VERSION, Manifest, ProgramEntry, WeightsEntry
from inkling_engine.compile import items
from inkling_engine.compile.backends import cross
from inkling_engine.compile.lock import WORK_PREFIX, locked
from inkling_engine.compile.models.inkling.names import recipes
from inkling_engine.compile.plan import Plan, fingerprint
from inkling_engine.compile.pools import pool_entries
from inkling_engine.compile.tokenizer import check_tokenizer, copy_tokenizer, text_fingerprint
from inkling_engine.kernels import native
from inkling_engine.kernels.ops import OPS

OUTSIDE = {kind.exit_code: kind for kind in (UsageError, IncompatibleError, DoesNotFitError)}
"""How `verify` ends where the machine is at fault, not the engine."""
USER_ERROR = re.compile(r"error: (.+?): found (.+); expected (.+?); (.+)")

Notify = Callable[[str, str, float], None]
"""Called with (item, state, value): "started", "reused", "done" with seconds, "left" with an
estimate of the seconds still to go."""


@dataclass
class Build:
    """A running build: where things go and what is finished."""

    plan: Plan
    notify: Notify
    final: Path
    engine_id: str
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def taken(self) -> bool:
        """Whether anything but an empty folder has the target's name."""
        return self.final.exists() and (not self.final.is_dir() or any(self.final.iterdir()))

    @property
    def work(self) -> Path:
        """Notes of finished items and scratch files, beside the target."""
        return self.final.parent / f"{WORK_PREFIX}{self.final.name}"

    @property
    def staging(self) -> Path:
        """The folder that will become the engine."""
        return self.final.parent / f"{store.STAGING_PREFIX}{self.final.name}"

    @property
    def sealed(self) -> Path:
        """The whole engine until it has verified."""
        return self.work / self.final.name


def build(plan: Plan, notify: Notify) -> Path:
    """Build the engine of `plan` and return its folder.

    An identical engine that is there already is kept. Without the GPU that it is for, the new one
    is not verified. Raises UsageError when the target is taken
    or being built by another process, CorruptError for a tokenizer that is not the model's,
    FailedError when a compiler, gate or verification fails.
    """
    if plan.checkpoint:
        check_tokenizer(plan.checkpoint)
    identity = _identity(plan)
    digest = engine_digest(identity)
    state = Build(plan, notify, plan.folder(digest).absolute(), engine_id(plan.spec, digest))
    if state.final.name.startswith((store.STAGING_PREFIX, WORK_PREFIX)):
        expected = "a name that builds do not use beside their target"
        raise UsageError("--out", state.final, expected, "choose another --out")
    if state.taken and not state.work.exists():
        return _existing(state)
    with locked(state.final, "--out", "choose another --out"):
        if state.taken:  # a build made it meanwhile, or one died before its last step
            found = _existing(state)
            shutil.rmtree(state.work, ignore_errors=True)
            return found
        _prepare(state, digest)
        entries = _run_items(state)
        _seal(state, identity, entries)
        if not cross.needed(plan.spec.device):
            _verify(state)
        state.sealed.rename(state.final)
        shutil.rmtree(state.work)
    return state.final


def _identity(plan: Plan) -> Identity:
    environment = Environment.current()
    return Identity(
        schema_version=SCHEMA_VERSION,
        spec=plan.spec,
        torch=environment.torch,
        cuda=environment.cuda,
        machine=environment.machine,
        op_schemas=tuple(op.schema for op in OPS),
        sources={
            "kernels": native.source_digest(plan.spec.arch),
            "compile": items.source_digest(),
            "weights": fingerprint(plan.checkpoint),
            "texts": text_fingerprint(plan.checkpoint),
            "ranks": str(plan.ranks),
        },
    )


def _existing(state: Build) -> Path:
    """Keep the engine that is there if it is the one asked for."""
    try:
        manifest = store.open_manifest(state.final)
        holds = manifest.engine_id
        if holds == state.engine_id:
            store.verify_files(state.final, manifest)
    except UserError as error:
        holds = f"no sound engine ({error.field}: {error.found})"
    if holds != state.engine_id:
        found = f"{state.final}, which holds {holds}"
        raise UsageError("--out", found, f"a free name or {state.engine_id}", "delete it or rename")
    state.notify("engine", "reused", 0.0)
    return state.final


def _prepare(state: Build, digest: str) -> None:
    """Make the working folders; what another identity left there is removed."""
    mark = state.work / "identity"
    known = mark.exists() and mark.read_text() == digest
    if known and state.sealed.exists():  # killed before it had verified
        state.sealed.rename(state.staging)
    if not known or not state.staging.exists():
        shutil.rmtree(state.work, ignore_errors=True)
        store.discard(state.staging)
        state.work.mkdir()
        mark.write_text(digest)
    for leftover in state.work.glob("run-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    store.stage(state.final)


def _run_items(state: Build) -> dict[str, bytes]:
    """Run every item that has no note yet; returns each item's note."""
    plan, notes = state.plan, {}
    items.allow_workers()
    if plan.spec.device == "cpu":
        notes["kernels"] = _item(state, "kernels", lambda: items.kernels(plan.spec, state.staging))
    with ThreadPoolExecutor(plan.options.jobs) as pool:
        jobs = _independent_jobs(state)
        running = {pool.submit(_item, state, name, job): name for name, job in jobs.items()}
        try:
            for done in as_completed(running):
                notes[running[done]] = done.result()
                _estimate(state, running)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            items.stop_workers()
            raise
    notes["golden"] = _item(state, "golden", lambda: items.golden(plan, state.staging, state.work))
    return notes


def _independent_jobs(state: Build) -> dict[str, Callable[[], bytes]]:
    """Programs and weight files: they need nothing of each other."""
    plan, staging = state.plan, state.staging
    jobs: dict[str, Callable[[], bytes]] = {}
    for bucket in sorted(plan.spec.buckets, key=lambda bucket: -bucket.tokens):
        jobs[program_name(bucket)] = partial(items.program, plan.spec, bucket, staging, state.work)
    for rank in plan.ranks:
        jobs[f"weights-rank{rank}"] = partial(items.weights, plan, staging, rank)
    return jobs


def _item(state: Build, name: str, job: Callable[[], bytes]) -> bytes:
    """Run one item unless its note says that it is done; the note is written last."""
    note = state.work / f"{name}.done"
    if note.exists():
        state.notify(name, "reused", 0.0)
        return note.read_bytes()
    state.notify(name, "started", 0.0)
    started = time.monotonic()
    result = job()
    scratch = note.with_suffix(".writing")
    scratch.write_bytes(result)
    scratch.rename(note)
    state.seconds[name] = time.monotonic() - started
    state.notify(name, "done", state.seconds[name])
    return result


def _estimate(state: Build, running: dict[Future[bytes], str]) -> None:
    left = sum(not future.done() for future in running)
    if left and state.seconds:
        mean = sum(state.seconds.values()) / len(state.seconds)
        state.notify("build", "left", left * mean / state.plan.options.jobs)


def _seal(state: Build, identity: Identity, notes: dict[str, bytes]) -> None:
    plan, spec = state.plan, state.plan.spec
    copy_tokenizer(plan.checkpoint, state.staging / TOKENIZER)
    report = {"seconds": state.seconds, "items": list(plan.items)}
    (state.staging / REPORT).mkdir(exist_ok=True)
    (state.staging / REPORT / "build.json").write_bytes(msgspec.json.encode(report))
    programs = [
        msgspec.json.decode(notes[program_name(bucket)], type=ProgramEntry)
        for bucket in spec.buckets
    ]
    layout = plan.checkpoint.layout if plan.checkpoint else "original"
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        engine_id=state.engine_id,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        spec=spec,
        environment=items.build_environment(),
        op_schemas=identity.op_schemas,
        kernel_library=kernel_library_file() if spec.device == "cpu" else "",
        programs=tuple(programs),
        pools=pool_entries(spec),
        recipe=recipes(spec.shape, spec.dtype, layout, spec.tp, 0),
        weights=tuple(WeightsEntry(rank=r, file=weights_file(r)) for r in plan.ranks),
        source=items.source_name(plan, identity),
        files=(),
        manifest_sha256="",
    )
    store.seal(state.staging, manifest, state.sealed)


def _verify(state: Build) -> None:
    """Prove the sealed engine as a user would run it; nothing of one that fails is kept.

    One without the weights of all ranks, or with more ranks than there are GPUs, is shown on drawn
    ones; with too few GPUs, one rank of it.
    """
    state.notify("verify", "started", 0.0)
    started = time.monotonic()
    command = module_command("inkling_engine.runtime.cli", "verify", str(state.sealed))
    spec = state.plan.spec
    if not state.plan.whole or cross.too_few(spec.device, spec.tp):
        command += ["--random-weights", "0"]
        command += ["--alone"] * cross.too_few(spec.device, spec.tp)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise _unproved(state, done)
    state.notify("verify", "done", time.monotonic() - started)


def _unproved(state: Build, done: subprocess.CompletedProcess[str]) -> UserError:
    """Why `verify` failed. If that says nothing about the engine, the next build goes on with it."""
    expected, again = "an engine that verifies", "build again: it goes on with verify"
    found = how_it_ended(done.returncode, done.stderr.strip() or done.stdout)
    if done.returncode < 0:
        return FailedError("verify", found, expected, f"{again}, unless {state.work} is gone")
    kind, line = OUTSIDE.get(done.returncode), USER_ERROR.fullmatch(found)
    if kind and line:
        return kind(f"verify: {line[1]}", line[2], line[3], f"{line[4]}; then {again}")
    shutil.rmtree(state.work)
    return FailedError("verify", found.removeprefix("error: "), expected, "report this")
