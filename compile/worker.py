"""One program in a process of its own: export, lower, gate, prove; writes its manifest entry.

`python -m inkling_engine.compile.worker REQUEST.json` writes the package and the entry that the
request names. Exit codes follow `UserError`; its one line goes to stderr.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import msgspec
import torch

from inkling_engine.artifacts.errors import UserError
from inkling_engine.artifacts.layout import program_file, program_name
from inkling_engine.artifacts.manifest import ProgramEntry, TensorEntry
from inkling_engine.artifacts.spec import Bucket, EngineSpec, Frozen
from inkling_engine.compile.backends.aoti import compile_program, open_program
from inkling_engine.compile.export import export_step, program_inputs
from inkling_engine.compile.twin import is_small, prove, reduced
from inkling_engine.compile.weights import step_weights
from inkling_engine.kernels.native import load_library


class Request(Frozen):
    """The bucket to build, the native kernels to prove it with, and where results go."""

    spec: EngineSpec
    bucket: Bucket
    kernel_library: str
    package: str
    entry: str


def main() -> int:
    """Serve the request file named on the command line."""
    request = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Request)
    try:
        entry = compile_bucket(request)
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    Path(request.entry).write_bytes(msgspec.json.encode(entry))
    return 0


def compile_bucket(request: Request) -> ProgramEntry:
    """Build one program. Raises FailedError when a gate or the twin fails."""
    spec, bucket, package = request.spec, request.bucket, Path(request.package)
    torch.set_num_threads(spec.threads)
    load_library(Path(request.kernel_library))
    entry = _lower(spec, bucket, package)
    if is_small(spec, step_weights(spec)):
        _prove(spec, bucket, package)
        return msgspec.structs.replace(entry, proof="equal to eager")
    twin = reduced(spec)
    with tempfile.TemporaryDirectory() as scratch:
        twin_package = Path(scratch) / package.name
        _lower(twin, bucket, twin_package)
        _prove(twin, bucket, twin_package)
    return msgspec.structs.replace(entry, proof="twin of reduced widths equal to eager")


def _prove(spec: EngineSpec, bucket: Bucket, package: Path) -> None:
    inputs = program_inputs(spec, bucket, step_weights(spec))
    prove(spec, bucket, inputs, open_program(package))


def _lower(spec: EngineSpec, bucket: Bucket, package: Path) -> ProgramEntry:
    inputs = program_inputs(spec, bucket, step_weights(spec))
    program, ops = export_step(spec, bucket, inputs)
    compile_program(program, spec, package)
    logits = (bucket.rows, spec.shape.real_vocab)
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


if __name__ == "__main__":
    sys.exit(main())
