"""Checkpoint + recipes -> one rank's safetensors file, a few rows at a time.

The header is written first, then each engine tensor in chunks of whole rows: the recipe of a chunk
is a slice of the tensor's recipe, so memory is bounded by a chunk whatever the tensor's size. Bytes
are read with `pread`, not mapped: mapped pages would count as this process's memory. The file gets
its name only when it is complete and on disk.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

import torch
from torch import Tensor

from inkling_engine.artifacts.errors import CorruptError, FailedError
from inkling_engine.artifacts.manifest import Part, Recipe
from inkling_engine.compile.checkpoint import Checkpoint
from inkling_engine.compile.recipes import nbytes, take
from inkling_engine.compile.tensorfile import WIDTHS, DiskTensor, encode_header

CHUNK_BYTES: Final = 16 << 20
TORCH_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DISK_DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16}

Block = tuple[int, int, int]


def write_weights(
    checkpoint: Checkpoint,
    recipes: Sequence[Recipe],
    path: Path,
    metadata: Mapping[str, str] | None = None,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> str:
    """Write the engine tensors of `recipes` to `path`, in order; the SHA-256 of the file.

    The checkpoint must have passed `check`. `on_bytes` is told the size of each piece written.
    Raises FailedError if the file cannot be written, CorruptError if a source ends early.
    """
    assert sys.byteorder == "little", "safetensors files are little-endian"
    partial = path.with_name(path.name + ".partial")
    digest = hashlib.sha256()
    try:
        with partial.open("wb") as file:
            for piece in _pieces(checkpoint, recipes, metadata or {}):
                file.write(piece)
                digest.update(piece)
                on_bytes(len(piece))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        remedy = "free space or change --out"
        raise FailedError(str(path), error.strerror, "a writable file", remedy) from error
    finally:
        partial.unlink(missing_ok=True)
    return digest.hexdigest()


def _pieces(
    checkpoint: Checkpoint, recipes: Sequence[Recipe], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """The file piece by piece; each is valid until the next one is asked for."""
    yield encode_header(recipes, metadata)
    output = _Buffer()
    with _Sources(checkpoint.tensors) as sources:
        for recipe in recipes:
            for chunk in _chunks(recipe):
                raw = output.first(nbytes(chunk))
                tensor = torch.frombuffer(raw, dtype=TORCH_DTYPES[chunk.dtype]).view(chunk.shape)
                for part in chunk.parts:
                    ends = zip(part.offset, part.shape, strict=True)
                    sources.copy(part, tensor[tuple(slice(o, o + n) for o, n in ends)])
                yield raw


def _chunks(recipe: Recipe) -> Iterator[Recipe]:
    """The recipe cut into runs of rows of at most CHUNK_BYTES, or single rows."""
    rows = recipe.shape[0]
    step = max(1, CHUNK_BYTES * rows // nbytes(recipe))
    for start in range(0, rows, step):
        yield take(recipe, 0, [(start, min(rows, start + step))])


class _Buffer:
    """Memory that is used again for every chunk and grows to the largest."""

    def __init__(self) -> None:
        self.raw = bytearray()

    def first(self, size: int) -> memoryview:
        """The first `size` bytes, holding anything."""
        if len(self.raw) < size:
            self.raw = bytearray(size)
        return memoryview(self.raw)[:size]


class _Sources:
    """Checkpoint tensors by name, read block by block from files that are opened once."""

    def __init__(self, tensors: Mapping[str, DiskTensor]) -> None:
        self.tensors = tensors
        self.files: dict[Path, int] = {}
        self.buffer = _Buffer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self.files.values():
            os.close(descriptor)

    def copy(self, part: Part, target: Tensor) -> None:
        """Copy the part's block into `target` [part.shape], cast to its dtype."""
        self._copy(self.tensors[part.tensor], part.source, target)

    def _copy(self, tensor: DiskTensor, source: tuple[Block, ...], target: Tensor) -> None:
        """A block of matrices, each read in part, goes matrix by matrix, other blocks row-wise.

        Whole rows are read, at most CHUNK_BYTES at once, from the first needed to the last.
        """
        rows = range(*source[0])
        if len(source) > 2 and not _spans(source[1], tensor.shape[1]):
            for item, index in zip(target, rows, strict=True):
                self._copy(_item(tensor, index), source[1:], item)
            return
        step = max(1, CHUNK_BYTES // (rows.step * _row_bytes(tensor)))
        for start in range(0, len(rows), step):
            run = rows[start : start + step]
            block = self._rows(tensor, run)[(slice(None), *(slice(*axis) for axis in source[1:]))]
            target[start : start + len(run)].copy_(block.reshape(len(run), *target.shape[1:]))

    def _rows(self, tensor: DiskTensor, rows: range) -> Tensor:
        """The tensor's `rows`, in memory that the next call overwrites."""
        size = (rows[-1] + 1 - rows[0]) * _row_bytes(tensor)
        raw = self.buffer.first(size)
        self._read(tensor, rows[0] * _row_bytes(tensor), raw)
        whole = torch.frombuffer(raw, dtype=DISK_DTYPES[tensor.dtype]).view(-1, *tensor.shape[1:])
        return whole[:: rows.step]

    def _read(self, tensor: DiskTensor, start: int, raw: memoryview) -> None:
        """Fill `raw` from byte `start` of the tensor on."""
        if tensor.file not in self.files:
            self.files[tensor.file] = os.open(tensor.file, os.O_RDONLY)
        done = 0
        while done < len(raw):
            offset = tensor.offset + start + done
            count = os.preadv(self.files[tensor.file], [raw[done:]], offset)
            if not count:
                raise CorruptError(str(tensor.file), "its end", tensor.name, "download it again")
            done += count


def _row_bytes(tensor: DiskTensor) -> int:
    return math.prod(tensor.shape[1:]) * WIDTHS[tensor.dtype]


def _spans(block: Block, size: int) -> bool:
    """Whether the block runs over all of an axis but for its stride."""
    start, stop, step = block
    return start < step and stop > size - step


def _item(tensor: DiskTensor, index: int) -> DiskTensor:
    """One item of the tensor's first axis, as a tensor of its own."""
    offset = tensor.offset + index * _row_bytes(tensor)
    return tensor._replace(shape=tensor.shape[1:], offset=offset)
