"""The files that a batch command names: each its own, and such as can be written at the end.

Asked before the engine is loaded, since a job takes hours and its trace, its summary or its answers
would else cost one another, or the summary turn out to have no place once the work is done.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

from inkling_engine.artifacts.errors import FailedError, UsageError
from inkling_engine.runtime.batch_output import owner_of, part_of, taking_name


def require_apart(source: Path, output: Path, more: Mapping[str, Path | None]) -> None:
    """UsageError if two of a job's files are one, by name or through links.

    `more` are further files by the name of their option; devices and pipes may be shared.
    """
    job = {"input": source, "output": output, "output's .part": part_of(output)}
    job["output's .part.json"] = owner_of(output)
    files = job | {name: path for name, path in more.items() if path}
    for (one, path), (other, beside) in combinations(files.items(), 2):
        if _is_same(path, beside):
            found = f"{beside}, which is the {one} too"
            raise UsageError(other, found, "a file of its own", "choose another")


def require_writable(name: str, path: Path | None) -> None:
    """UsageError for option `name` unless a file can be opened at `path`; nothing is changed."""
    if path is None or _is_device(path):
        return
    fresh = not os.path.lexists(path)
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666))
        if fresh:
            path.unlink()
    except OSError as error:
        found, remedy = f"{path} ({error.strerror})", "make the folder or choose another path"
        raise UsageError(name, found, "a file to write", remedy) from None


def write_summary(path: Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all; FailedError if that fails."""
    target = Path(os.path.realpath(path))  # a link stays one
    new = target.with_name(f".summary.{os.getpid()}")
    try:
        if _is_device(path) or not os.access(target.parent, os.W_OK):
            path.write_text(text)
            return
        with taking_name(new, target):
            new.write_text(text)
    except OSError as error:
        remedy = "the answers are there; make room before the next job"
        raise FailedError("--summary", str(error), "a file to write", remedy) from None


def _is_device(path: Path) -> bool:
    """Whether it is a device or a pipe, which is written as it is."""
    return os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))


def _is_same(path: Path, other: Path) -> bool:
    if os.path.exists(path) and os.path.exists(other):
        return os.path.samefile(path, other) and not _is_device(path)
    return os.path.realpath(path) == os.path.realpath(other)
