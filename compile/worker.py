"""One program in a process of its own: export, lower, gate, prove; writes its manifest entry.

`python -m inkling_engine.compile.worker REQUEST.json` writes the package and the entry that the
request names. Exit codes follow `UserError`; its one line goes to stderr. The process decides what
its ops are (native CPU kernels, or Triton launches for CUDA) before it imports any of them. It ends
with its build, however that ends: the next one compiles in the same folder.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Final

import msgspec

from inkling_engine.artifacts.errors import UserError
from inkling_engine.artifacts.spec import Bucket, EngineSpec, Frozen

_PR_SET_PDEATHSIG: Final = 1


class Request(Frozen):
    """The bucket to build, the native kernels to prove it with ("" for CUDA), where results go, and the
    process that builds."""

    spec: EngineSpec
    bucket: Bucket
    kernel_library: str
    package: str
    entry: str
    parent: int


def end_with(parent: int) -> None:
    """End this process when the thread of process `parent` that started it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    """Serve the request file named on the command line."""
    request = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Request)
    end_with(request.parent)
    from inkling_engine.kernels import _op, native

    if request.spec.device == "cuda":
        _op.target_cuda()
    else:
        native.load_library(Path(request.kernel_library))
    from inkling_engine.compile.program import compile_bucket

    try:
        entry = compile_bucket(request.spec, request.bucket, Path(request.package))
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    Path(request.entry).write_bytes(msgspec.json.encode(entry))
    return 0


if __name__ == "__main__":
    sys.exit(main())
