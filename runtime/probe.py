"""Opens an engine's native code in a process of its own, so that a crash becomes a message.

`python -m inkling_engine.runtime.probe DIR DEVICE` loads the kernel library and every program, as
the engine would, and exits. The loader runs it beside its other work and asks for the outcome before
it opens the same files itself. A success is remembered in the user's cache, under everything that
it depended on: the same bytes need no second probe until the machine starts again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import platformdirs

from inkling_engine.artifacts.child import how_it_ended, module_command
from inkling_engine.artifacts.compat import Environment
from inkling_engine.artifacts.manifest import Manifest
from inkling_engine.runtime.errors import FailedError, IncompatibleError

_TIMEOUT = 600.0  # seconds
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_DRIVER = Path("/proc/driver/nvidia/version")


def remembers(manifest: Manifest) -> bool:
    """Whether these very programs came through a probe here, since the machine started."""
    return _mark(manifest).is_file()


def remember(manifest: Manifest) -> None:
    """Note a successful probe; a cache that cannot be written costs the next load a probe."""
    mark = _mark(manifest)
    with contextlib.suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=mark.parent)
        os.write(handle, manifest.engine_id.encode())
        os.close(handle)
        os.replace(name, mark)


def forget(manifest: Manifest) -> None:
    """Make the next load probe again."""
    with contextlib.suppress(OSError):
        _mark(manifest).unlink()


def _mark(manifest: Manifest) -> Path:
    """The file that stands for a success. The manifest's digest covers every file's."""
    files = [path.read_text() if path.is_file() else "" for path in (_BOOT, _DRIVER)]
    facts = (manifest.manifest_sha256, Environment.current(), sys.version, *files)
    name = hashlib.sha256(repr(facts).encode()).hexdigest()
    folder = os.environ.get("INKLING_ENGINE_CACHE") or platformdirs.user_cache_dir("inkling-engine")
    return Path(folder) / "probed" / name


def start(folder: Path, device: str) -> subprocess.Popen[str]:
    """Start probing `folder` for `device`; hand the process to `finish`."""
    command = module_command(__name__, str(folder), device)
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
    if code := process.returncode:
        kind = IncompatibleError if code < 0 else FailedError
        found = how_it_ended(code, errors)
        raise kind(f"probe of {folder}", found, "programs that load", remedy)


def stop(process: subprocess.Popen[str]) -> None:
    """End a probe whose outcome nobody waits for."""
    process.kill()
    process.communicate()


def main() -> None:
    """Load everything native in the folder that is the first argument, for the second one."""
    from inkling_engine.artifacts.store import open_manifest
    from inkling_engine.runtime.graphs import open_programs

    folder = Path(sys.argv[1])
    open_programs(folder, open_manifest(folder), sys.argv[2])


if __name__ == "__main__":
    main()
