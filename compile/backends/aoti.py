"""AOTInductor: an exported step becomes one package file, and must pass the build gates.

The gates prove that nothing copies a pool: re-inplacing missed no byte, and no tensor that the
generated wrapper allocates is above the declared workspace. For the CPU that is nothing at all,
since every temporary is made inside an op; for CUDA, whose ops are traced into the wrapper, it is
the widest activation of the step.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._inductor
import torch._inductor.config
from torch import Tensor
from torch._dynamo.utils import ReinplaceCounters

from inkling_engine.artifacts.errors import FailedError
from inkling_engine.artifacts.spec import EngineSpec
from inkling_engine.compile.backends import patches

ALLOCATIONS = re.compile(r"aoti_torch_empty_strided\w*\([^;]*")
COPIES = re.compile(r"aoti_torch_clone(?!_preserve_strides)|aoti_torch_copy_")
HOST_MARCH = "x86-64-v2"  # of a CUDA program's host code
WIDEST_ITEM = 4  # bytes; the wrapper's code names no element size


def options(spec: EngineSpec) -> dict[str, Any]:
    """Inductor's options for `spec`; keys that this torch does not know are left out."""
    wanted = {
        "freezing": False,
        "max_autotune": False,
        "triton.autotune_at_compile_time": False,  # kernels would run on garbage indices
        "aot_inductor.embed_kernel_binary": False,  # equal kernels would be linked in twice
        "cpp.march": host_march(spec),
        "cpp.vec_isa_ok": False,  # nothing may depend on the vector units of this machine
        "cpp.threads": spec.threads,
        "aot_inductor.enable_line_tables": False,
    }
    return {key: value for key, value in wanted.items() if hasattr(torch._inductor.config, key)}


def host_march(spec: EngineSpec) -> str:
    """The machine that a program's host code is for."""
    return spec.arch if spec.device == "cpu" else HOST_MARCH


def compile_program(
    program: torch.export.ExportedProgram, spec: EngineSpec, path: Path, workspace: int
) -> None:
    """Lower `program` into the package `path`; `workspace` bounds each temporary, in bytes.

    Raises `FailedError` when a gate fails: the package is then removed.
    """
    ReinplaceCounters.clear()
    with torch.no_grad(), patches.for_lowering(host_march(spec)):
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(path), inductor_configs=options(spec)
        )
    try:
        _gate_reinplaced()
        _gate_temporaries(path, workspace)
    except FailedError:
        path.unlink()
        raise


def open_program(path: Path, device: str) -> Callable[[list[Tensor]], list[Tensor]]:
    """Load a package; the result takes the inputs in call order and returns the outputs."""
    index = -1 if device == "cpu" else 0
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, index)
    run: Callable[[list[Tensor]], list[Tensor]] = loader.run
    return run


def _gate_reinplaced() -> None:
    missed = ReinplaceCounters.get_total_missed_bytes()
    if missed:
        raise FailedError(
            "gate re-inplacing",
            f"{missed} bytes copied each step",
            "0",
            "write pools only through ops that declare the mutation",
        )


def _gate_temporaries(path: Path, workspace: int) -> None:
    with zipfile.ZipFile(path) as package:
        sources = [n for n in package.namelist() if n.endswith("wrapper.cpp")]
        assert sources, f"no generated wrapper in {path}"
        text = "".join(package.read(name).decode() for name in sources)
    found = sorted(set(_above(workspace, text.partition("run_impl(")[2])))
    if found:
        expected = f"no copy, no temporary above {workspace} bytes"
        raise FailedError("gate temporaries", found, expected, "write pools only through ops")


def _above(workspace: int, code: str) -> Iterator[str]:
    """Copies in the wrapper's code, and its allocations above `workspace` bytes."""
    yield from COPIES.findall(code)
    sizes = {
        name: math.prod(int(number) for number in re.findall(r"(\d+)L", numbers))
        for name, numbers in re.findall(r"(int_array_\w+)\[\] = \{([^}]*)\}", code)
    }
    for line in ALLOCATIONS.findall(code):
        name = re.search(r"int_array_\w+", line)
        size = WIDEST_ITEM * sizes.get(name[0], workspace + 1) if name else workspace + 1
        if size > workspace:
            yield f"{size} bytes"
