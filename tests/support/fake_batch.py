"""A batch runner without an engine, for tests of what runs many of them: lines in capitals.

Like the real one it writes a part file line by line, goes on where that ends, and renames it at the
end. A line `kill` or `raise` does so the first time that anybody meets it. Every line done is noted,
with the process that did it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class FakeRunner:
    """Notes in the folder `notes`, across processes."""

    def __init__(self, notes: str) -> None:
        """`notes` exists."""
        self._notes = Path(notes)

    def run(self, source: Path, output: Path, /) -> Mapping[str, Any]:
        """Answer `source` with `output`."""
        part = Path(f"{output}.part")
        done = part.read_text().count("\n") if part.exists() else 0
        lines = source.read_text().splitlines()
        with part.open("a", buffering=1) as file:
            for line in lines[done:]:
                self._meet(source.name, line)
                time.sleep(0.02)
                with (self._notes / "done").open("a") as notes:
                    notes.write(f"{os.getpid()} {line}\n")
                file.write(f"{line.upper()}\n")
        part.rename(output)
        return {"lines": len(lines), "resumed": done}

    def _meet(self, name: str, line: str) -> None:
        """Stumble over a line, once."""
        if not line.startswith(("kill", "raise")):
            return
        try:
            (self._notes / f"{name} {line}").touch(exist_ok=False)
        except FileExistsError:
            return
        if line.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError(line)
