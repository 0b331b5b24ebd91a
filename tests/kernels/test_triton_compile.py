"""Every Triton launch of the main configurations compiles for sm_90 without a GPU, as recorded.

`triton_resources.json` holds warps, registers a thread and shared bytes a program of each launch;
none may spill. The figures differ between Triton versions: the record holds the largest of those that
wrote it, and there are margins. Run this file with parts of names, or none, to print the table; with
--record it also raises the record to it.
"""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import sys
import time
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from inkling_engine.compile.backends.patches import for_lowering
from inkling_engine.kernels._op import Op
from inkling_engine.kernels._triton import POINTERS, CompileCase, meta
from inkling_engine.kernels.ops import OPS

pytest.importorskip("triton", reason="needs Triton")

RECORD = Path(__file__).with_name("triton_resources.json")
CAPABILITY = 90
REGISTER_MARGIN, SHARED_MARGIN = 24, 4096
SHARED_LIMIT = 232448  # bytes that a program may have on Hopper
REGISTERS = 65536  # of a multiprocessor
DTYPES = {kind: dtype for dtype, kind in POINTERS.items()}
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
_compiled: dict[str, Resources] = {}


class Resources(NamedTuple):
    """What one program takes: registers of a thread, shared and spilled bytes."""

    warps: int
    registers: int
    shared: int
    spilled: int


def cases_of(op: Op) -> list[CompileCase]:
    """The op's launches of the main configurations."""
    module = import_module(f"inkling_engine.kernels.{op.name}.triton_kernel")
    cases: list[CompileCase] = module.compile_cases()
    return cases


@cache
def compile_cases() -> dict[str, CompileCase]:
    """All launches by name."""
    cases = [case for op in OPS for case in cases_of(op)]
    assert len({case.name for case in cases}) == len(cases), "two launches have one name"
    return {case.name: case for case in cases}


def compiled(case: CompileCase) -> Resources:
    """What one launch takes; those of several ops that are the same are compiled once."""
    same = repr(dataclasses.replace(case, name="", inputs=()))
    if same not in _compiled:
        _compiled[same] = compile_launch(case)
    return _compiled[same]


def compile_launch(case: CompileCase) -> Resources:
    """Compile one launch for sm_90; the figures are the assembler's."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(case.signature)
    divisible = [["tt.divisibility", 16]]
    source = ASTSource(
        case.kernel,
        signature=case.signature,
        constexprs={(names.index(name),): value for name, value in case.constexprs.items()},
        attrs={(names.index(name),): divisible for name in case.divisible},
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    log = io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        binary = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
    spills, used = SPILLS.search(log.getvalue()), USED.search(log.getvalue())
    assert spills is not None and used is not None, log.getvalue()
    return Resources(
        binary.metadata.num_warps,
        int(used[1]),
        binary.metadata.shared,
        int(spills[1]) + int(spills[2]),
    )


def recorded() -> dict[str, list[int]]:
    """The table: [warps, registers, shared bytes] by launch; empty if there is none."""
    table: dict[str, list[int]] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return table


def test_the_record_names_every_launch() -> None:
    assert sorted(recorded()) == sorted(compile_cases())


@pytest.mark.parametrize("name", sorted(recorded()))
def test_launch_compiles_within_its_record(name: str) -> None:
    case, (warps, registers, shared) = compile_cases()[name], recorded()[name]
    found = compiled(case)
    assert found.spilled == 0, "the kernel spills"
    assert found.warps == warps and found.shared <= min(shared + SHARED_MARGIN, SHARED_LIMIT)
    assert found.registers <= registers + REGISTER_MARGIN
    assert found.registers * found.warps * 32 <= REGISTERS


class NoDevice:
    """What Triton's driver says of a device that is not there."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", CAPABILITY, 32)


def written_parameters(case: CompileCase) -> set[str]:
    """The parameters that torch's export takes for written, from the kernel's Triton IR."""
    from torch._higher_order_ops import triton_kernel_wrap as wrap

    values = dict(case.constexprs)
    for name, kind in case.signature.items():
        if kind.startswith("*"):
            values[name] = meta(1, dtype=DTYPES[kind])
        elif kind != "constexpr":
            values[name] = 1.5 if kind.startswith("fp") else 16
    with for_lowering("x86-64-v2"):
        if hasattr(wrap, "identify_mutated_tensors"):  # torch < 2.12
            return set(wrap.identify_mutated_tensors(case.kernel, values, {}))
        accesses = wrap.identify_accessed_tensors(case.kernel, values, {})
    return {write.name for write in accesses.read_writes.writes}


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_export_sees_no_other_argument_written(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each step would copy that weight or pool. An address that depends on what a function
    returns counts as one into every pointer which that function was given."""
    from triton.runtime import driver

    monkeypatch.setattr(type(driver), "active", NoDevice())
    schema = getattr(torch.ops.inkling, op.name).default._schema
    declared = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    kernels: dict[tuple[str, int], CompileCase] = {}
    for case in cases_of(op):
        kernels.setdefault((case.kernel.__name__, len(case.constexprs)), case)
    for case in kernels.values():
        written = written_parameters(case)
        assert written < set(case.signature), "the analysis failed"
        wrong = [name for name, at in case.inputs if name in written and not declared[at]]
        assert not wrong, f"{case.name}: {wrong}"


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_kernel_waits_for_the_one_before(op: Op) -> None:
    """Else it could read what is not written yet, since captured launches overlap."""
    for case in cases_of(op):
        assert re.search(r"\b(follow|follow_as|await_last)\(", case.kernel.src), case.name


def main(record: bool, wanted: list[str]) -> None:
    """Print the table of the launches whose name contains one of `wanted`."""
    old = recorded()
    table = {name: old[name] for name in compile_cases() if name in old}
    for name, case in compile_cases().items():
        if wanted and not any(part in name for part in wanted):
            continue
        start = time.perf_counter()
        found = compiled(case)
        seconds = time.perf_counter() - start
        print(f"{name:40s} {seconds:4.1f} s {found}", flush=True)
        largest = zip(table.get(name, (0, 0, 0)), found, strict=False)
        table[name] = [max(pair) for pair in largest]
    if record:
        lines = [f"  {json.dumps(name)}: {table[name]}" for name in sorted(table)]
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main("--record" in sys.argv, [part for part in sys.argv[1:] if part != "--record"])
