"""Whether processes are gone."""

from __future__ import annotations

import time
from pathlib import Path


def gone(pid: int, seconds: float = 10.0) -> bool:
    """Whether a process is no more, or no more than a name, within a while."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False
