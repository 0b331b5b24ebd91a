"""What the processes of a test run share: the first that asks for it makes it, the others wait."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import filelock

Made = TypeVar("Made")


class Once:
    """Keeps what was made in a folder of the run."""

    def __init__(self, folder: Path) -> None:
        """`folder` is there, and the same in all processes."""
        self._folder = folder

    def __call__(self, name: str, make: Callable[[], Made]) -> Made:
        """What `make` gave in the process that asked for `name` first; it can be pickled."""
        path = self._folder / f"once-{name}"
        with filelock.FileLock(f"{path}.lock"):
            if not path.exists():
                part = path.with_suffix(".part")  # a process may be killed while it writes
                part.write_bytes(pickle.dumps(make()))
                part.replace(path)
        made: Made = pickle.loads(path.read_bytes())
        return made
