"""AOTInductor: an exported step becomes one package file, and must pass the build gates.

The gates prove that nothing copies a pool: re-inplacing missed no byte, and no tensor that the
generated wrapper allocates is above the declared workspace. For the CPU that is nothing at all,
since every temporary is made inside an op; for CUDA, whose ops are traced into the wrapper, it is
the widest activation of the step.
"""

from __future__ import annotations

import contextlib
import math
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._higher_order_ops.triton_kernel_wrap
import torch._inductor
import torch._inductor.config
import torch._inductor.ir
from torch import Tensor
from torch._dynamo.utils import ReinplaceCounters

from inkling_engine.artifacts.errors import FailedError
from inkling_engine.artifacts.spec import EngineSpec

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
        "cpp.march": spec.arch if spec.device == "cpu" else HOST_MARCH,
        "cpp.vec_isa_ok": False,  # nothing may depend on the vector units of this machine
        "cpp.threads": spec.threads,
        "aot_inductor.enable_line_tables": False,
    }
    return {key: value for key, value in wanted.items() if hasattr(torch._inductor.config, key)}


def compile_program(
    program: torch.export.ExportedProgram, spec: EngineSpec, path: Path, workspace: int
) -> None:
    """Lower `program` into the package `path`; `workspace` bounds each temporary, in bytes.

    Raises `FailedError` when a gate fails: the package is then removed.
    """
    ReinplaceCounters.clear()
    with torch.no_grad(), _shallow_nodes(), _launches_analysed_once():
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(path), inductor_configs=options(spec)
        )
    try:
        _gate_reinplaced()
        _gate_temporaries(path, workspace)
    except FailedError:
        path.unlink()
        raise


@contextlib.contextmanager
def _shallow_nodes() -> Iterator[None]:
    """Keep Inductor's descriptions of its nodes short while it lowers.

    Before torch 2.13 a node's text holds those of all its inputs, and lowering makes that text: in
    a chain of ops that share inputs it grows exponentially.
    """
    node: Any = torch._inductor.ir.ExternKernel
    before = node.__str__, node.__repr__
    node.__str__ = node.__repr__ = lambda self: f"{type(self).__name__}({self.name})"
    try:
        yield
    finally:
        node.__str__, node.__repr__ = before


@contextlib.contextmanager
def _launches_analysed_once() -> Iterator[None]:
    """Remember what each kind of launch writes while torch (before 2.12) lowers.

    It asks several times a launch, each time through Triton's front end: in a model of many layers
    that is nearly all of a build's time.
    """
    module: Any = torch._higher_order_ops.triton_kernel_wrap
    before = getattr(module, "identify_mutated_tensors", None)
    known: dict[Any, list[str]] = {}

    def identify(kernel: Any, arguments: dict[str, Any], descriptors: Any) -> list[str]:
        assert before is not None and not descriptors
        launched = kernel if hasattr(kernel, "params") else kernel.fn  # else with its warps, stages
        key = (launched, *((name, _kind(launched, name, arguments[name])) for name in arguments))
        if key not in known:
            known[key] = before(kernel, arguments, descriptors)
        return list(known[key])

    if before is None:
        yield
        return
    module.identify_mutated_tensors = identify
    try:
        yield
    finally:
        module.identify_mutated_tensors = before


def _kind(kernel: Any, name: str, value: Any) -> Any:
    """What Triton compiles an argument for: a constant's value, else its type and divisibility."""
    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    if name in kernel.arg_names and name not in constants:
        if hasattr(value, "dtype"):
            return value.dtype
        if type(value) is int:
            return int, value == 1, value % 16 == 0, -(2**31) <= value < 2**31
        if type(value) is float:
            return float
    return type(value), value


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
