"""A batch job's input: a file of JSON lines, read once for its identity, then line by line.

Every piece between newlines is one line, empty ones too; the last one needs no newline, a byte
order mark at the start is no part of the first. A shard is a run of whole lines: the outputs of
shards 0 to n-1, one after the other, are the output of the whole. No more than one line is held.
"""

from __future__ import annotations

import hashlib
import os
import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from inkling_engine.artifacts.errors import UsageError, show

MAX_LINE: Final = 64 << 20  # bytes; a longer line is answered with an error
_BLOCK: Final = 1 << 20
_BOM: Final = b"\xef\xbb\xbf"
Tick = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` of `count`, counted from 0; UsageError if there is no such part."""

    index: int
    count: int

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not 0 <= self.index < self.count:
            raise _no_shard(str(self))

    def span(self, total: int) -> range:
        """Its lines of `total`."""
        return range(total * self.index // self.count, total * (self.index + 1) // self.count)

    def __str__(self) -> str:
        """As `parse_shard` reads it."""
        return f"{self.index}/{self.count}"


WHOLE: Final = Shard(0, 1)


def parse_shard(text: str) -> Shard:
    """The shard that `i/n` says, i from 0 to n-1; UsageError otherwise."""
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
    if not match:
        raise _no_shard(show(text))
    return Shard(int(match[1]), int(match[2]))


def _no_shard(found: str) -> UsageError:
    remedy = "give one such as 0/4, the first of four"
    return UsageError("shard", found, "i/n with i from 0 to n-1", remedy)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the input: its number from 0, and its bytes, None if they are too many."""

    index: int
    data: bytes | None


def open_input(path: Path) -> BinaryIO:
    """The file of lines at `path`; UsageError if there is none that can be read."""
    try:
        if not path.is_file():  # it is read twice, so a pipe will not do
            found = "something else" if path.exists() else "nothing"
            raise UsageError("input", f"{found} at {path}", "a file of JSON lines", "check it")
        return path.open("rb")
    except OSError as error:
        raise UsageError("input", str(error), "a readable file", "check the path") from None


class Input:
    """An open input file; `size` in bytes, `sha256` in hexadecimal, `total` in lines."""

    def __init__(self, path: Path, tick: Tick) -> None:
        """Open `path` and read it through, `tick` after each block; UsageError if it cannot be."""
        self._path, self._stream = path, open_input(path)
        self._state = self._stat()
        self.size = self.total = 0
        self._scan(tick)

    def lines(self) -> Iterator[Line]:
        """All lines in order."""
        self._stream.seek(0)
        if self._stream.read(len(_BOM)) != _BOM:
            self._stream.seek(0)
        for index in range(self.total):
            data = self._stream.readline(MAX_LINE + 1)
            whole = data.endswith(b"\n") or len(data) <= MAX_LINE
            yield Line(index, data if whole else None)
            while not whole:
                data = self._stream.readline(_BLOCK)
                whole = not data or data.endswith(b"\n")

    def require_unchanged(self) -> None:
        """UsageError if the file is not what it was when it was opened."""
        if self._stat() != self._state:
            remedy = "restore it and run again, or start over with another output"
            raise UsageError("input", f"{self._path} changed", "a file at rest", remedy)

    def close(self) -> None:
        """Let go of the file."""
        self._stream.close()

    def _scan(self, tick: Tick) -> None:
        seen, last = hashlib.sha256(), b"\n"
        while block := self._stream.read(_BLOCK):
            seen.update(block)
            self.size += len(block)
            self.total += block.count(b"\n")
            last = block[-1:]
            tick()
        self.total += last != b"\n"
        self.sha256 = seen.hexdigest()

    def _stat(self) -> tuple[int, int]:
        state = os.fstat(self._stream.fileno())
        return state.st_size, state.st_mtime_ns


class SeenIds:
    """Which ids came before, and in which line: an open hash table of 64-bit digests.

    12 bytes an entry, twice that with its free places, so that a million ids fit in 50 MB.
    """

    def __init__(self) -> None:
        """Nothing was seen."""
        self._digests, self._lines = array("Q", [0]) * 1024, array("L", [0]) * 1024
        self._count = 0

    def add(self, name: str, line: int) -> int | None:
        """The line in which `name` came first, or None if that is this one."""
        key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) or 1
        at = self._place(key)
        if self._digests[at]:
            return self._lines[at]
        self._digests[at], self._lines[at] = key, line
        self._count += 1
        if 2 * self._count > len(self._digests):
            self._grow()
        return None

    def _place(self, key: int) -> int:
        mask = len(self._digests) - 1
        at = key & mask
        while self._digests[at] not in (0, key):
            at = (at + 1) & mask
        return at

    def _grow(self) -> None:
        old = zip(self._digests, self._lines, strict=True)
        size = 2 * len(self._digests)
        self._digests, self._lines = array("Q", [0]) * size, array("L", [0]) * size
        for key, line in old:
            if key:
                at = self._place(key)
                self._digests[at], self._lines[at] = key, line
