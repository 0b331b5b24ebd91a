"""What was built: every file, tensor and program of an engine folder, as facts."""

from __future__ import annotations

from typing import Literal

from inkling_engine.artifacts.spec import Bucket, EngineSpec, Frozen

SCHEMA_VERSION = 1

DType = Literal["float32", "bfloat16", "int32", "int64"]


class TensorEntry(Frozen):
    """A program input as the launcher must find it: contiguous, 16-byte aligned."""

    name: str
    dtype: DType
    shape: tuple[int, ...]


class Part(Frozen):
    """A block of an engine tensor: `source` = (start, stop, step) for each axis of a checkpoint
    tensor, reshaped to `shape` and stored at `offset` of the engine tensor."""

    tensor: str
    source: tuple[tuple[int, int, int], ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Recipe(Frozen):
    """How one engine tensor is made: its parts tile it exactly and are cast to `dtype`."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


class RowEntry(Frozen):
    """A row input: a view at `offset` bytes into the bucket's single row buffer."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int


class ProgramEntry(Frozen):
    """One compiled bucket: `inputs` in call order, prefixed `weights.`, `pools.` or `rows.`."""

    name: str
    bucket: Bucket
    file: str
    inputs: tuple[str, ...]
    rows: tuple[RowEntry, ...]
    row_bytes: int
    outputs: tuple[TensorEntry, ...]
    ops: tuple[str, ...]
    proof: str


class FileEntry(Frozen):
    """A file of the folder: relative path, size in bytes, SHA-256."""

    path: str
    size: int
    sha256: str


class BuildEnvironment(Frozen):
    """Where the engine was built; compared field by field when it is opened."""

    engine: str
    torch: str
    cuda: str
    machine: str
    cpu_level: int
    glibc: str
    built_with_gpu: bool


class WeightsEntry(Frozen):
    """One rank's weight file and its tensors, in file order."""

    rank: int
    file: str


class Manifest(Frozen):
    """The root of an engine folder. `store.seal` fills in `files` and `manifest_sha256`, the digest
    of this manifest's canonical JSON with that one field empty."""

    schema_version: int
    engine_id: str
    created: str
    spec: EngineSpec
    environment: BuildEnvironment
    op_schemas: tuple[str, ...]
    kernel_library: str
    programs: tuple[ProgramEntry, ...]
    pools: tuple[TensorEntry, ...]
    recipe: tuple[Recipe, ...]
    weights: tuple[WeightsEntry, ...]
    source: str
    files: tuple[FileEntry, ...] = ()
    manifest_sha256: str = ""
