"""The native CPU library: compiled once a build with the machine's C++ compiler, then only loaded.

It uses torch's stable ABI, so it compiles in seconds. An engine folder carries its own copy; a
running engine needs no compiler.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

_ROOM = Path(__file__).resolve().parent.parent
FLAGS = (
    "-std=c++20",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
)
_loaded: Path | None = None


class CompilerError(RuntimeError):
    """The C++ compiler is missing or failed; the message holds what it printed."""


def source_digest(march: str) -> str:
    """SHA-256 over the native sources, flags and torch version: names one library.

    For the march `native` also over what that is here: machines may share a cache folder.
    """
    resolved = _resolved() if march == "native" else ""
    digest = hashlib.sha256(f"{torch.__version__} {march} {FLAGS} {resolved}".encode())
    for path in sorted(_ROOM.rglob("*.h")) + sorted(_ROOM.rglob("*.cpp")):
        digest.update(path.relative_to(_ROOM).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def compile_library(directory: Path, march: str) -> Path:
    """Compile the library for `march` into `directory`, or return the one that is there."""
    target = directory / f"kernels-{source_digest(march)[:16]}.so"
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    compiler = _compiler()
    if shutil.which(compiler) is None:
        raise CompilerError(f"C++ compiler {compiler!r} was not found; install g++ or set CXX")
    torch_root = Path(torch.__file__).parent
    include = torch_root / "include"
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        output = Path(scratch) / target.name
        command = [
            compiler,
            *FLAGS,
            f"-march={march}",
            f"-I{include}",
            f"-I{include}/torch/csrc/api/include",
        ]
        command += [str(_ROOM / "native" / "library.cpp"), "-o", str(output)]
        command += [f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-lc10"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompilerError(f"{compiler} failed on the native kernels:\n{done.stderr[-4000:]}")
        os.replace(output, target)
    return target


def _compiler() -> str:
    return os.environ.get("CXX") or "g++"


def _resolved() -> str:
    """The compiler's version and the flags that it compiles `-march=native` with; "" without one."""
    command = [_compiler(), "-march=native", "-###", "-E", "-x", "c++", os.devnull]
    if shutil.which(command[0]) is None:
        return ""
    environment = os.environ | {"LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return done.stderr


def load_library(path: Path) -> None:
    """Load the library at `path`: a process holds one; the same content again is a no-op."""
    global _loaded
    if _loaded is not None:
        same = _loaded == path or _loaded.read_bytes() == path.read_bytes()
        assert same, f"this process already runs other native kernels: {_loaded}, not {path}"
        return
    torch.ops.load_library(str(path))
    _loaded = path
