"""The safetensors container without its tensors: headers are read, checked and written here.

A file is an 8-byte little-endian header length, a JSON header padded to 8 bytes, then the tensors
with no gap between them. Reading a header proves that the file is as long as it says; no tensor
byte is touched.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from inkling_engine.artifacts.errors import CorruptError
from inkling_engine.artifacts.manifest import Recipe
from inkling_engine.compile.recipes import nbytes

MAX_HEADER: Final = 100_000_000  # the format's own limit
NAMES: Final = {"float32": "F32", "bfloat16": "BF16", "int32": "I32", "int64": "I64"}
WIDTHS: Final = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


class DiskTensor(NamedTuple):
    """A tensor of a file: its name there, its dtype as the format spells it, and where it starts."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


def read_header(path: Path) -> list[DiskTensor]:
    """The tensors of `path` in file order. Raises CorruptError naming what does not fit."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise _corrupt(path, f"{size} bytes", "a complete safetensors header")
        raw = file.read(length)
    tensors = sorted(_entries(path, raw), key=lambda entry: entry[1:])
    position = 0
    for tensor, begin, end in tensors:
        if begin != position or end < begin or not _fits(tensor, end - begin):
            raise _corrupt(path, f"{tensor.name} at {begin}..{end}", f"its bytes from {position}")
        position = end
    if 8 + length + position != size:
        raise _corrupt(path, f"{size} bytes", f"{8 + length + position} bytes")
    return [tensor for tensor, _, _ in tensors]


def encode_header(recipes: Sequence[Recipe], metadata: Mapping[str, str]) -> bytes:
    """The length and header of a file that holds the engine tensors in the order of `recipes`."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for recipe in recipes:
        end = position + nbytes(recipe)
        header[recipe.name] = {
            "dtype": NAMES[recipe.dtype],
            "shape": recipe.shape,
            "data_offsets": (position, end),
        }
        position = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def _entries(path: Path, raw: bytes) -> list[tuple[DiskTensor, int, int]]:
    """Each tensor with its (begin, end) in the data section."""
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        return [_entry(path, name, 8 + len(raw), **value) for name, value in header.items()]
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _corrupt(path, " ".join(str(error).split()), "a safetensors header") from error


def _entry(
    path: Path, name: str, data: int, *, dtype: str, shape: list[int], data_offsets: list[int]
) -> tuple[DiskTensor, int, int]:
    begin, end = (int(offset) for offset in data_offsets)
    sizes = tuple(int(size) for size in shape)
    return DiskTensor(path, name, str(dtype), sizes, data + begin), begin, end


def _fits(tensor: DiskTensor, size: int) -> bool:
    """Whether dtype and shape make `size` bytes; dtypes that are not whole bytes are let through."""
    width = WIDTHS.get(tensor.dtype)
    return min(tensor.shape, default=0) >= 0 and (
        width is None or math.prod(tensor.shape) * width == size
    )


def _corrupt(path: Path, found: str, expected: str) -> CorruptError:
    return CorruptError(str(path), found, expected, "the file is damaged: download it again")
