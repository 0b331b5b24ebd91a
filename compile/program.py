"""One bucket's program: lowered, gated, proved against eager, described for the manifest."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import msgspec
import torch

from inkling_engine.artifacts.child import how_it_ended, module_command
from inkling_engine.artifacts.errors import FailedError
from inkling_engine.artifacts.layout import program_file, program_name
from inkling_engine.artifacts.manifest import ProgramEntry, TensorEntry
from inkling_engine.artifacts.spec import Bucket, EngineSpec
from inkling_engine.compile.backends import cross
from inkling_engine.compile.backends.aoti import compile_program, open_program
from inkling_engine.compile.export import export_step, program_inputs
from inkling_engine.compile.pools import draft_rows, samples
from inkling_engine.compile.twin import is_small, prove, reduced
from inkling_engine.compile.weights import step_weights
from inkling_engine.compile.worker import Request

UNPROVED = "none: built without a GPU"


def compile_bucket(spec: EngineSpec, bucket: Bucket, package: Path) -> ProgramEntry:
    """Build one program. Raises FailedError when a gate or the twin fails.

    Without the GPU that it is for, it is lowered and gated but proved by nothing.
    """
    torch.set_num_threads(spec.threads)
    if cross.needed(spec.device):
        with cross.without_gpu(spec.arch):
            entry = _lower(spec, bucket, package)
        return msgspec.structs.replace(entry, proof=UNPROVED)
    if is_small(spec, step_weights(spec)):
        entry = _lower(spec, bucket, package)
        _prove(spec, bucket, package)
        return msgspec.structs.replace(entry, proof="equal to eager")
    lower = _lower if spec.device == "cpu" else _lower_aside
    entry = lower(spec, bucket, package)
    twin = reduced(spec)
    with tempfile.TemporaryDirectory() as scratch:
        twin_package = Path(scratch) / package.name
        _lower(twin, bucket, twin_package)
        _prove(twin, bucket, twin_package)
    return msgspec.structs.replace(entry, proof="twin of reduced widths equal to eager")


def workspace(spec: EngineSpec, bucket: Bucket) -> int:
    """Most bytes of one temporary in a wrapper: none on the CPU, the widest activation on CUDA."""
    if spec.device == "cpu":
        return 0
    shape = spec.shape
    experts = (shape.experts_per_token + shape.shared_experts) * max(
        shape.hidden, 2 * shape.expert_width
    )
    kind = max(shape.full, shape.local, key=lambda kind: kind.heads * kind.extent)
    # relative bias of extend attention: tiles of at most 128 lines, every row's last one short
    tokens = draft_rows(spec, bucket)
    lines = 2 * kind.heads * tokens + 128 * kind.kv_heads * (bucket.rows + 1)
    strips = lines * (kind.extent + 256)
    widest = max(2 * shape.dense_width, experts, 2 * shape.hidden)
    return 4 * max(tokens * widest, strips, 2 * samples(bucket) * shape.vocab, 1 << 20)


def _prove(spec: EngineSpec, bucket: Bucket, package: Path) -> None:
    inputs = program_inputs(spec, bucket, step_weights(spec))
    prove(spec, bucket, inputs, open_program(package, spec.device))


def _lower_aside(spec: EngineSpec, bucket: Bucket, package: Path) -> ProgramEntry:
    """Lower in a process that sees no GPU: beside one, Inductor would run the step once on zeros
    for all its weights and pools, and on copies of the pools, which the GPU may not hold."""
    entry = package.with_suffix(".entry")
    request = Request(
        spec=spec,
        bucket=bucket,
        kernel_library="",
        package=str(package),
        entry=str(entry),
        parent=os.getpid(),
    )
    asked = package.with_suffix(".request")
    asked.write_bytes(msgspec.json.encode(request))
    command = module_command("inkling_engine.compile.worker", str(asked))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        first = (line for line in done.stderr.splitlines() if "error:" in line)  # a compiler's
        found = next(first, how_it_ended(done.returncode, done.stderr))
        raise FailedError(f"lowering {program_name(bucket)}", found, "a program", "see the line")
    return msgspec.json.decode(entry.read_bytes(), type=ProgramEntry)


def _lower(spec: EngineSpec, bucket: Bucket, package: Path) -> ProgramEntry:
    inputs = program_inputs(spec, bucket, step_weights(spec))
    program, ops = export_step(spec, bucket, inputs)
    compile_program(program, spec, package, workspace(spec, bucket))
    columns = min(spec.shape.real_vocab, spec.shape.vocab // spec.tp)
    logits = (samples(bucket), columns)
    return ProgramEntry(
        name=program_name(bucket),
        bucket=bucket,
        file=program_file(bucket),
        inputs=inputs.names,
        rows=inputs.rows,
        row_bytes=inputs.row_bytes,
        outputs=(TensorEntry(name="logits", dtype="float32", shape=logits),),
        ops=ops,
        proof="",
    )
