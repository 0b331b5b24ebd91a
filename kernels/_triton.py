"""Launching Triton kernels: the same code compiled, traced into a program, interpreted or recorded.

A launch in an op's `triton_kernel.py` goes through `launchable`, so that export sees the kernel.
Configurations are functions of shapes alone; nothing is tuned when an engine is built or loaded.
`launches` calls an op on meta tensors and returns what it would launch, for compilation without
a GPU.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,assignment"

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
COMPILED = tl.constexpr(not INTERPRETED)
DIVISOR = 16  # of an integer that Triton specialises on; tensors are aligned to 256 bytes

_recorded: list[CompileCase] | None = None
_arguments: list[int] = []  # id of each argument of the op whose launches are recorded


@triton.jit
def follow():
    """Wait until what the launch before wrote can be read, and let the next launch begin.

    Every kernel calls it before it writes anything and before it reads what the launch before it
    wrote. Then a captured graph may overlap a launch with the kernel before it
    (`runtime/overlap.py`). What older launches wrote is there at once: the launch before has
    waited for it, or this one would not have begun.
    """
    await_last()
    begin_next()


@triton.jit
def await_last():
    """The first half of `follow`: wait for the launch before."""
    if COMPILED:
        gdc_wait()


@triton.jit
def begin_next():
    """The other half: let the next launch begin when all programs of this one have come here.

    A hasty kernel comes here first of all. Then the next launch may begin before the one before this
    one has ended, so it may read less early (`tests/kernels/test_early_reads.py`).
    """
    if COMPILED:
        gdc_launch_dependents()


@triton.jit
def follow_as(HASTY: tl.constexpr):
    """`follow` of a kernel that, if it is HASTY, has let the next launch begin first of all."""
    await_last()
    if not HASTY:
        begin_next()


@triton.jit
def loaded(x):
    """`x` as its load left it: what a use needs of its layout is done behind this, not at the load.

    The compiler rearranges a value between threads right behind its load, and that waits for it. With
    several loads first, and then this of each, they are all on the way at once.
    """
    if COMPILED:
        if x.dtype.primitive_bitwidth == 16:
            x = tl.inline_asm_elementwise(
                "mov.b16 $0, $1;", "=h,h", [x], dtype=x.dtype, is_pure=False, pack=1
            )
        else:
            x = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1
            )
    return x


@triton.jit
def load_along(
    pointers, mask, depth, LENGTH: tl.constexpr, STEP: tl.constexpr, DEPTH: tl.constexpr,
    EVICTION: tl.constexpr,
):  # fmt: skip
    """What lies at `pointers`, STEP further on, and so on for LENGTH: a tuple, all of it on the way at
    once. `depth` is how deep each of `pointers` is in a row of DEPTH; zeros behind that."""
    found = ()
    for start in tl.static_range(0, LENGTH, STEP):
        there = mask & (depth < DEPTH - start)
        found += (tl.load(pointers + start, there, other=0.0, eviction_policy=EVICTION),)
    return found


@triton.jit
def prefetch(pointers):
    """Fetch the cache lines at `pointers` to L2; no one waits for them."""
    if COMPILED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def prefetch_rows(
    weight, rows, start, ROWS: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr
):
    """Fetch LENGTH columns from `start` of the rows `rows` of weight [ROWS, WIDTH] to L2."""
    SPAN: tl.constexpr = 128 // (weight.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = (LENGTH + SPAN - 1) // SPAN
    STEP: tl.constexpr = 32 if LINES >= 32 else 8 if LINES >= 8 else 1
    rows = tl.minimum(rows, ROWS - 1).to(tl.int64)
    for line in range(0, LINES, STEP):
        column = tl.minimum(start + (line + tl.arange(0, STEP)) * SPAN, WIDTH - 1)
        prefetch(weight + rows[:, None] * WIDTH + column[None, :])


@dataclass(frozen=True)
class CompileCase:
    """One launch, as `triton.compile` takes it.

    `signature` has a Triton type ("*bf16", "i32", "fp32", "constexpr") for every parameter of
    `kernel`, `constexprs` the values of those that are "constexpr"; `divisible` are the pointers
    and integers that are multiples of 16. `inputs` are the parameters that are given an argument
    of the op, with its position.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    divisible: frozenset[str] = frozenset()
    inputs: tuple[tuple[str, int], ...] = ()


def launchable(kernel: Any) -> Any:
    """`kernel` as it must be launched: as it is in the interpreter, traceable otherwise."""
    if _recorded is not None:
        return _Recorder(kernel)
    return kernel if INTERPRETED else wrap_triton(kernel)


def launches(name: str, op: Callable[..., Any], *arguments: Any) -> list[CompileCase]:
    """What `op` launches for `arguments` (meta tensors), named `name`-kernel."""
    global _recorded, _arguments
    _recorded, _arguments = [], [id(argument) for argument in arguments]
    named: list[CompileCase] = []
    try:
        op(*arguments)
        seen: list[str] = []
        for case in _recorded:
            again = seen.count(case.name)
            seen.append(case.name)
            suffix = f"-{again + 1}" if again else ""
            full = f"{name}-{case.name.removesuffix('_kernel')}{suffix}"
            named.append(replace(case, name=full))
        return named
    finally:
        _recorded = None


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor of `shape` without memory, as `launches` takes it."""
    return torch.empty(shape, dtype=dtype, device="meta")


class _Recorder:
    """Stands for a kernel: a launch is noted, not done."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(size > 0 for size in grid), f"empty grid {grid}"
        return self._note

    def _note(self, *arguments: Any, num_warps: int = 4, num_stages: int = 3, **named: Any) -> None:
        assert _recorded is not None
        values = dict(zip(self.kernel.arg_names, arguments, strict=False)) | named
        fixed = {parameter.name for parameter in self.kernel.params if parameter.is_constexpr}
        signature, constexprs, divisible = {}, {}, set()
        for name in self.kernel.arg_names:
            kind = "constexpr" if name in fixed else _kind(values[name])
            signature[name] = kind
            if kind == "constexpr":
                constexprs[name] = values[name]
            elif kind.startswith("*") or (kind.startswith("i") and values[name] % DIVISOR == 0):
                divisible.add(name)
        given = [(name, id(value)) for name, value in values.items() if isinstance(value, Tensor)]
        inputs = tuple((name, _arguments.index(i)) for name, i in given if i in _arguments)
        case = CompileCase(
            self.kernel.__name__,
            self.kernel,
            signature,
            constexprs,
            num_warps,
            num_stages,
            frozenset(divisible),
            inputs,
        )
        _recorded.append(case)


def _kind(value: Any) -> str:
    """The type that Triton gives an argument; it specialises on the integer 1."""
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if value == 1:
        return "constexpr"
    return "i32" if -(2**31) <= value < 2**31 else "i64"
