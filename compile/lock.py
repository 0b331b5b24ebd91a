"""The lock of an engine folder's name: whoever builds it or adds to it holds it all the while.

Builds and `attach-weights` share one staging folder beside the target, so they exclude each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import filelock

from inkling_engine.artifacts.errors import UsageError

WORK_PREFIX: Final = ".build-"


@contextmanager
def locked(target: Path, field: str, otherwise: str) -> Iterator[None]:
    """Hold the name of `target` against other processes, without waiting for them.

    Raises UsageError about `field` where another process holds it (wait for it, or `otherwise`) or
    where the folder around `target` cannot be written. What `target` holds is to be looked at
    inside: until then another process may have changed it.
    """
    lock = filelock.FileLock(target.parent / f"{WORK_PREFIX}{target.name}.lock")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except (filelock.Timeout, OSError) as error:
        busy = isinstance(error, filelock.Timeout)
        why = "in use by another build" if busy else getattr(error, "strerror", error)
        remedy = f"wait for it, or {otherwise}" if busy else otherwise
        expected = "a free name in a writable folder"
        raise UsageError(field, f"{target}, {why}", expected, remedy) from None
    try:
        yield
        # only now: who still waits on the removed file finds a finished target
        Path(lock.lock_file).unlink(missing_ok=True)
    finally:
        lock.release()
