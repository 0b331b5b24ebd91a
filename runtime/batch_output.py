"""A batch job's output while it grows: `OUT.part`, and `OUT.part.json` which says whose it is.

The part file is itself the record: a complete line is a finished request, a torn last line is none.
So a kill at any moment loses no finished line and a resume redoes none. Lines are handed to the
system as soon as their turn comes, which outlives the process; they are forced to the disk every
few seconds and at the end, so what a power failure takes is redone. One process at a time: a lock
on the part file ends with its holder. At the end one rename makes `OUT` appear, whole.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from inkling_engine.artifacts.errors import FailedError, UsageError
from inkling_engine.artifacts.store import sync

_SYNC_SECONDS: Final = 5.0


def require_absent(output: Path) -> None:
    """UsageError if `output` exists already or can never be made."""
    if os.path.lexists(output):
        remedy = "choose another output or remove it"
        raise UsageError("output", f"{output} exists", "a path where nothing is", remedy)
    if not os.path.isdir(output.parent):
        found = f"no folder {output.parent}"
        raise UsageError("output", found, "a path in a folder that exists", "make the folder")


def part_of(output: Path) -> Path:
    """Where `output` grows."""
    return Path(f"{output}.part")


def owner_of(output: Path) -> Path:
    """What says whose part file it is."""
    return Path(f"{output}.part.json")


class Part:
    """An open part file, locked; `resumed` says whether it held lines of this job before."""

    def __init__(self, output: Path, identity: Mapping[str, Any]) -> None:
        """Start or go on with `output`'s part file.

        `identity` is all that decides the output's bytes. UsageError if the output exists, another
        process holds the part file, or it belongs to a job of another identity; FailedError if
        that cannot be written down, and then nothing is left.
        """
        self._output = output
        self.path, self._owner = part_of(output), owner_of(output)
        require_absent(output)
        try:
            self._file: BinaryIO = os.fdopen(
                os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", 0
            )
        except OSError as error:
            remedy = "check the path and its permissions"
            raise UsageError("output", str(error), "a place to write", remedy) from None
        self.resumed = True
        try:
            self._lock()
            require_absent(output)  # whoever held the lock may just have finished
            self._require_named()
            self.resumed = self._file.seek(0, os.SEEK_END) > 0
            self._claim(identity)
        except BaseException:
            if not self.resumed:  # it holds nothing
                _remove(self.path, self._owner)
            self.close()
            raise
        self._synced, self._dirty = time.monotonic(), False

    def finished(self) -> Iterator[bytes]:
        """The complete lines that are there, each with its newline."""
        with self.path.open("rb") as stream:
            for line in stream:
                if line.endswith(b"\n"):
                    yield line

    def cut(self, size: int) -> None:
        """Keep the first `size` bytes, and go on after them; FailedError as `write`."""
        with _written(self.path):
            self._file.truncate(size)
            self._file.seek(size)

    def write(self, lines: Sequence[bytes]) -> None:
        """Add whole lines; FailedError if the system does not take them."""
        with _written(self.path):
            data = memoryview(b"".join(lines))
            while data:
                data = data[self._file.write(data) :]
            self._dirty = True
            if time.monotonic() - self._synced > _SYNC_SECONDS:
                self.sync()

    def sync(self) -> None:
        """Force what was written to the disk; FailedError as `write`."""
        with _written(self.path):
            if self._dirty:
                os.fsync(self._file.fileno())
        self._synced, self._dirty = time.monotonic(), False

    def commit(self) -> None:
        """Turn the part file into the output; what is left of the job beside it goes.

        FailedError as `write`, UsageError if the output exists.
        """
        self._dirty = True
        self.sync()
        require_absent(self._output)
        with _written(self._output):
            self.path.rename(self._output)
            sync(self._output.parent)
            self._owner.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the file and its lock."""
        self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise self._in_use() from None

    def _require_named(self) -> None:
        """UsageError if whoever held the lock removed the file."""
        try:
            named = os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except OSError:
            named = False
        if not named:
            raise self._in_use()

    def _in_use(self) -> UsageError:
        found, remedy = f"{self.path} in use", "wait for it or choose another output"
        return UsageError("output", found, "no other process of this job", remedy)

    def _claim(self, identity: Mapping[str, Any]) -> None:
        """Write down whose the part file is, or compare with what is written."""
        if not self.resumed:
            with _written(self._owner):
                self._write_owner(msgspec.json.encode(identity))
            return
        remedy = f"give the same again, or remove {self.path} to start over"
        try:
            known = msgspec.json.decode(self._owner.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.MsgspecError) as error:
            found = f"{self.path} without a readable {self._owner.name} ({error})"
            raise UsageError("resume", found, "both or none", remedy) from None
        names = [n for n in {**known, **identity} if known.get(n) != identity.get(n)]
        if names:
            found = ", ".join(f"{name} {known.get(name)}" for name in names)
            wanted = ", ".join(f"{name} {identity.get(name)}" for name in names)
            raise UsageError("resume", f"a job of {found}", wanted, remedy)

    def _write_owner(self, data: bytes) -> None:
        new = Path(f"{self._owner}.new")
        with taking_name(new, self._owner):
            new.write_bytes(data)
            sync(new)
        sync(self._owner.parent)


@contextmanager
def taking_name(new: Path, path: Path) -> Iterator[None]:
    """Give the file `new`, which the block writes, the name of `path`; after an OSError it is gone."""
    try:
        yield
        new.replace(path)
    except OSError:
        _remove(new)
        raise


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """What the system says against writing `path` is a FailedError."""
    try:
        yield
    except OSError as error:
        remedy = "make room or correct the path, and run the same command again"
        raise FailedError(str(path), str(error), "a file that grows", remedy) from None


def _remove(*paths: Path) -> None:
    """Remove what can be removed of `paths`."""
    for path in paths:
        with suppress(OSError):
            path.unlink()
