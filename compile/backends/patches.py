"""Changes to torch that hold while a program is lowered, and the two ways to make one.

Each mends what torch, or an older one, does otherwise: node texts that grow exponentially, kernels
that are analysed at every launch, assembly that may write anything, host code for the machine that
compiles.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch._higher_order_ops.triton_kernel_wrap
import torch._inductor.config
import torch._inductor.cpp_builder
import torch._inductor.ir

_MISSING: Final = object()
Analysis = Callable[[Any, dict[str, Any], Any], list[str]]


@contextlib.contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` within the block; builds of torch without it have it there too."""
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextlib.contextmanager
def item(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner[name]` is `value` within the block."""
    before = owner.get(name, _MISSING)
    owner[name] = value
    try:
        yield
    finally:
        if before is _MISSING:
            del owner[name]
        else:
            owner[name] = before


@contextlib.contextmanager
def for_lowering(march: str) -> Iterator[None]:
    """What every lowering needs; the host code is for the machine `march`, as gcc names it."""
    with contextlib.ExitStack() as stack:
        node: Any = torch._inductor.ir.ExternKernel
        for name in ("__str__", "__repr__"):
            stack.enter_context(attribute(node, name, _short_text))
        analyses: Any = torch._higher_order_ops.triton_kernel_wrap
        if analyse := vars(analyses).get("identify_mutated_tensors"):  # torch before 2.12
            once = analysed_once(analyse)
            stack.enter_context(attribute(analyses, "identify_mutated_tensors", once))
        operation: Any = analyses.Op
        pure = assembly_is_pure(operation.__post_init__)
        stack.enter_context(attribute(operation, "__post_init__", pure))
        builder: Any = torch._inductor.cpp_builder
        if not hasattr(torch._inductor.config, "cpp.march"):  # torch before 2.12
            flags = flags_for(march, builder._get_optimization_cflags)
            stack.enter_context(attribute(builder, "_get_optimization_cflags", flags))
        yield


def _short_text(node: Any) -> str:
    """A node's text; before torch 2.13 it holds those of all its inputs, and lowering makes it: in
    a chain of ops that share inputs it grows exponentially."""
    return f"{type(node).__name__}({node.name})"


def analysed_once(analyse: Analysis) -> Analysis:
    """`analyse`, which tells what a launch writes, called once for launches of one kind.

    Each call goes through Triton's front end, and torch makes several a launch: in a model of many
    layers that is nearly all of a build's time.
    """
    known: dict[Any, list[str]] = {}

    def identify(kernel: Any, arguments: dict[str, Any], descriptors: Any) -> list[str]:
        assert not descriptors, "kernels without tensor descriptors"
        launched = kernel if hasattr(kernel, "params") else kernel.fn  # else with its warps, stages
        key = (launched, *((name, _kind(launched, name, arguments[name])) for name in arguments))
        if key not in known:
            known[key] = analyse(kernel, arguments, descriptors)
        return list(known[key])

    return identify


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


def assembly_is_pure(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """`check` of an operation that is analysed, after which inline assembly is known to write
    nothing: our kernels' waits and prefetches. Else every argument would be taken for written."""

    def checked(operation: Any) -> None:
        check(operation)
        if operation.name == "tt.elementwise_inline_asm":
            object.__setattr__(operation, "is_pure", True)

    return checked


def flags_for(march: str, flags: Callable[..., Any]) -> Callable[..., Any]:
    """`flags`, which gives compiler and linker flags, for `march` in place of this machine."""

    def changed(*arguments: Any, **named: Any) -> Any:
        compiler, linker = flags(*arguments, **named)
        assert "march=native" in compiler, compiler
        return [f"march={march}" if flag == "march=native" else flag for flag in compiler], linker

    return changed
