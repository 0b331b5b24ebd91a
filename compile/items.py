"""The work items of a build; each makes one file of the engine and returns its note."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import msgspec
import platformdirs
import torch

from inkling_engine.artifacts.child import how_it_ended, module_command
from inkling_engine.artifacts.compat import Environment
from inkling_engine.artifacts.digest import Identity, digest
from inkling_engine.artifacts.errors import FailedError
from inkling_engine.artifacts.layout import (
    GOLDEN_FILE,
    kernel_library_file,
    program_file,
    program_name,
    weights_file,
)
from inkling_engine.artifacts.manifest import BuildEnvironment
from inkling_engine.artifacts.spec import Bucket, EngineSpec
from inkling_engine.compile.convert import write_weights
from inkling_engine.compile.golden import record
from inkling_engine.compile.models.inkling.names import recipes
from inkling_engine.compile.plan import Plan
from inkling_engine.compile.tokenizer import TOKENIZER_FILE
from inkling_engine.compile.worker import Request
from inkling_engine.kernels import native

_workers: set[subprocess.Popen[str]] = set()
_stopping = threading.Event()


def cache_folder() -> Path:
    """Where compilers keep what can be made again: `$INKLING_ENGINE_CACHE` or the user's cache."""
    default = platformdirs.user_cache_dir("inkling-engine")
    return Path(os.environ.get("INKLING_ENGINE_CACHE") or default)


def source_digest() -> str:
    """SHA-256 over the sources of this room and of the kernels: the step's code, references and
    Triton launches are part of an engine's identity."""
    digest = hashlib.sha256()
    for room in (Path(__file__).parent, Path(native.__file__).parents[1]):
        for path in sorted(room.rglob("*.py")):
            digest.update(path.relative_to(room.parent).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def source_name(plan: Plan, identity: Identity) -> str:
    """Where the weights came from: folder name and fingerprint, or that there are none."""
    if plan.checkpoint is None:
        return "no weights"
    return f"{plan.checkpoint.folder.name} sha256:{identity.sources['weights']}"


def build_environment() -> BuildEnvironment:
    """This machine and installation, as the manifest records them."""
    return Environment.current().for_build(built_with_gpu=torch.cuda.is_available())


def kernels(spec: EngineSpec, staging: Path) -> bytes:
    """Compile the native kernels (or take them from the cache) and copy them in."""
    try:
        library = native.compile_library(cache_folder() / "kernels", spec.arch)
    except native.CompilerError as error:
        expected = "a C++20 compiler that builds the native kernels"
        raise FailedError("native kernels", error, expected, "see what it printed") from None
    target = staging / kernel_library_file()
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(library, target)
    return library.name.encode()


def program(spec: EngineSpec, bucket: Bucket, staging: Path, work: Path) -> bytes:
    """Compile one bucket in a worker process; returns its `ProgramEntry` as JSON."""
    name, target = program_name(bucket), staging / program_file(bucket)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"run-{name}-", dir=work))
    request = Request(
        spec=spec,
        bucket=bucket,
        kernel_library=str(staging / kernel_library_file()) if spec.device == "cpu" else "",
        package=str(scratch / target.name),
        entry=str(scratch / "entry.json"),
        parent=os.getpid(),
    )
    (scratch / "request.json").write_bytes(msgspec.json.encode(request))
    with _compiler_folder(f"{name}-{digest(spec)[:16]}") as folder:
        _run_worker(name, scratch / "request.json", spec, folder)
    os.replace(request.package, target)
    entry = Path(request.entry).read_bytes()
    shutil.rmtree(scratch)
    return entry


def weights(plan: Plan, staging: Path, rank: int) -> bytes:
    """Convert one rank's weights; returns the file's digest. `stop_workers` ends it too."""
    assert plan.checkpoint is not None, "a programs-only plan has no weight items"
    spec, target = plan.spec, staging / weights_file(rank)
    target.parent.mkdir(exist_ok=True)
    recipe = recipes(spec.shape, spec.dtype, plan.checkpoint.layout, spec.tp, rank)
    return write_weights(plan.checkpoint, recipe, target, on_bytes=_stop_here).encode()


def golden(plan: Plan, staging: Path, work: Path) -> bytes:
    """Record the golden continuations with the eager reference, if all ranks have their weights.

    What several ranks must answer is what the whole model does, so it is converted for that.
    """
    target = staging / GOLDEN_FILE
    target.parent.mkdir(exist_ok=True)
    if plan.checkpoint is None or not plan.whole:
        target.write_bytes(record(plan.spec, None, None))
        return b""
    spec = msgspec.structs.replace(plan.spec, tp=1)
    tokenizer = plan.checkpoint.folder / TOKENIZER_FILE
    with tempfile.TemporaryDirectory(prefix="run-golden-", dir=work) as scratch:
        file = staging / weights_file(0)
        if plan.spec.tp != 1:
            file = Path(scratch) / file.name
            layout = plan.checkpoint.layout
            write_weights(plan.checkpoint, recipes(spec.shape, spec.dtype, layout), file)
        target.write_bytes(record(spec, file, tokenizer))
    return b""


def allow_workers() -> None:
    """Take back `stop_workers`: another build begins."""
    _stopping.clear()


def stop_workers() -> None:
    """End the worker processes that still run, and those that are just being started; conversions
    end at their next piece."""
    _stopping.set()
    for worker in list(_workers):
        worker.kill()


def _stop_here(_: int) -> None:
    """End a conversion of a build that is stopping: nothing else can reach its thread."""
    if _stopping.is_set():
        raise FailedError("weights", "a build that ends", "its end", "build again")


@contextmanager
def _compiler_folder(name: str) -> Iterator[Path]:
    """An empty folder that is the same for the same program, and nobody else's meanwhile.

    Inductor's path is part of a program, and Inductor appends to the sources that it finds: a
    program's bytes would depend on what was built before.
    """
    folder = cache_folder() / "inductor" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{folder}.lock"):
        shutil.rmtree(folder, ignore_errors=True)
        yield folder
        shutil.rmtree(folder, ignore_errors=True)


def _run_worker(name: str, request: Path, spec: EngineSpec, compiler_folder: Path) -> None:
    """Run a worker to its end; its one-line error becomes ours."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(spec.threads),
        "TORCHINDUCTOR_CACHE_DIR": str(compiler_folder),
    }
    command = module_command("inkling_engine.compile.worker", str(request))
    worker = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )
    _workers.add(worker)
    if _stopping.is_set():
        worker.kill()
    try:
        _, printed = worker.communicate()
    finally:
        _workers.discard(worker)
    if worker.returncode:
        found = how_it_ended(worker.returncode, printed)
        raise FailedError(f"program {name}", found, "a program that passes its gates", "see above")
