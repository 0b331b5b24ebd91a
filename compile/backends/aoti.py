"""AOTInductor: an exported step becomes one package file, and must pass the build gates.

The gates prove that nothing copies a pool: re-inplacing missed no byte, and the generated wrapper
allocates no tensor of its own (every temporary is made inside an op).
"""

from __future__ import annotations

import contextlib
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._inductor
import torch._inductor.config
import torch._inductor.ir
from torch import Tensor
from torch._dynamo.utils import ReinplaceCounters

from inkling_engine.artifacts.errors import FailedError
from inkling_engine.artifacts.spec import EngineSpec

ALLOCATIONS = re.compile(r"aoti_torch_empty_strided|aoti_torch_clone|aoti_torch_copy_")


def options(spec: EngineSpec) -> dict[str, Any]:
    """Inductor's options for `spec`; keys that this torch does not know are left out."""
    wanted = {
        "freezing": False,
        "cpp.march": spec.arch,
        "cpp.vec_isa_ok": False,  # nothing may depend on the vector units of this machine
        "cpp.threads": spec.threads,
        "aot_inductor.enable_line_tables": False,
    }
    return {key: value for key, value in wanted.items() if hasattr(torch._inductor.config, key)}


def compile_program(program: torch.export.ExportedProgram, spec: EngineSpec, path: Path) -> None:
    """Lower `program` into the package `path`.

    Raises `FailedError` when a gate fails: the package is then removed.
    """
    ReinplaceCounters.clear()
    with torch.no_grad(), _shallow_nodes():
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(path), inductor_configs=options(spec)
        )
    try:
        _gate_reinplaced()
        _gate_temporaries(path)
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


def open_program(path: Path) -> Callable[[list[Tensor]], list[Tensor]]:
    """Load a package; the result takes the inputs in call order and returns the outputs."""
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1)
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


def _gate_temporaries(path: Path) -> None:
    """The workspace declared for a CPU wrapper is nothing: ops make their own outputs."""
    with zipfile.ZipFile(path) as package:
        sources = [n for n in package.namelist() if n.endswith("wrapper.cpp")]
        assert sources, f"no generated wrapper in {path}"
        text = "".join(package.read(name).decode() for name in sources)
    found = sorted(set(ALLOCATIONS.findall(text.partition("run_impl(")[2])))
    if found:
        raise FailedError(
            "gate temporaries", found, "no allocation or copy", "keep the step a sequence of ops"
        )
