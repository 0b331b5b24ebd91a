"""Opens an engine's native code in a process of its own, so that a crash becomes a message.

`python -m inkling_engine.runtime.probe DIR` loads the kernel library and every program, as the
engine would, and exits. The loader runs it beside its other work and asks for the outcome before
it opens the same files itself.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from inkling_engine.runtime.errors import FailedError, IncompatibleError

_TIMEOUT = 600.0  # seconds


def start(folder: Path) -> subprocess.Popen[str]:
    """Start probing `folder`; hand the process to `finish`."""
    command = [sys.executable, "-m", __name__, str(folder)]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], folder: Path) -> None:
    """Wait for a probe; IncompatibleError if it crashed, FailedError if a load was refused."""
    remedy = "build the engine again on this machine"
    try:
        _, errors = process.communicate(timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        stop(process)
        found = f"still running after {_TIMEOUT:g} s"
        raise FailedError(f"probe of {folder}", found, "programs that load", remedy) from None
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        raise IncompatibleError(
            f"probe of {folder}", f"killed by {name}", "programs that load", remedy
        )
    if process.returncode:
        lines = errors.strip().splitlines() or [f"exit code {process.returncode}"]
        raise FailedError(f"probe of {folder}", lines[-1], "programs that load", remedy)


def stop(process: subprocess.Popen[str]) -> None:
    """End a probe whose outcome nobody waits for."""
    process.kill()
    process.communicate()


def main() -> None:
    """Load everything native in the folder that is the one argument."""
    from inkling_engine.artifacts.store import open_manifest
    from inkling_engine.runtime.graphs import open_programs

    folder = Path(sys.argv[1])
    open_programs(folder, open_manifest(folder))


if __name__ == "__main__":
    main()
