"""What was built: every file, tensor and program of an engine folder, as facts."""

from __future__ import annotations

from typing import Literal

import msgspec

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
    tensor, reshaped to `shape` and stored at `offset` of the engine tensor.

    `split` = (axis, blocks): along that axis of the source lie so many blocks of this size, of which
    rank r of N reads number r * blocks // N.
    """

    tensor: str
    source: tuple[tuple[int, int, int], ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    split: tuple[int, int] = (0, 1)

    def of_rank(self, rank: int, ranks: int) -> Part:
        """What `rank` has where rank 0 of `ranks` has this."""
        axis, blocks = self.split
        start, stop, step = self.source[axis]
        length = len(range(start, stop, step))
        first = start + rank * blocks // ranks * length * step
        block = (first, first + (length - 1) * step + 1, step)
        source = (*self.source[:axis], block, *self.source[axis + 1 :])
        return msgspec.structs.replace(self, source=source)


class Recipe(Frozen):
    """How one engine tensor of rank 0 is made: its parts tile it exactly and are cast to `dtype`."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    def of_rank(self, rank: int, ranks: int) -> Recipe:
        """The recipe of `rank` out of `ranks`."""
        parts = tuple(part.of_rank(rank, ranks) for part in self.parts)
        return msgspec.structs.replace(self, parts=parts)


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
