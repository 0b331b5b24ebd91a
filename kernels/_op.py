"""How an op is declared: schema, reference, fake, and where its cases are.

The schema (with its mutations) is registered once a process in the namespace `inkling`. On the
CPU the implementation is the native library (`native/`), loaded when it is first needed. A process
that works for CUDA says so before it imports an op (`target_cuda`): the ops are then Triton
launches that export traces into the program. The reference is the specification and is called as
a plain function, also for whole steps under `use_references()`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "inkling"
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_references_active = False
_cuda = False


@dataclass(frozen=True)
class Op:
    """One op: call it with its public arguments; `reference` is the plain-torch specification."""

    name: str
    signature: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]

    @property
    def schema(self) -> str:
        """The full schema, as `Library.define` takes it."""
        return self.name + self.signature

    @property
    def launch(self) -> Callable[..., Any]:
        """The op's Triton launches, with the op's arguments and results."""
        module = self.reference.__module__.removesuffix(".reference") + ".triton_kernel"
        launch: Callable[..., Any] = getattr(import_module(module), self.name)
        return launch

    @property
    def cases(self) -> ModuleType:
        """The op's `cases` module: shapes, inputs and tolerances."""
        return import_module(self.reference.__module__.removesuffix(".reference") + ".cases")

    def __call__(self, *arguments: Any) -> Any:
        """Run the registered implementation, or the reference under `use_references()`."""
        if _references_active:
            return self.reference(*arguments)
        return getattr(torch.ops.inkling, self.name).default(*arguments)


def define(
    name: str, signature: str, reference: Callable[..., Any], fake: Callable[..., Any]
) -> Op:
    """Register `name` with its schema and fake, and return the op.

    A schema that an opened engine has defined already must be the same one.
    """
    op = Op(name, signature, reference, fake)
    if _cuda:
        _define_triton(op)
        return op
    define_schema(op.schema)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return op


def _define_triton(op: Op) -> None:
    """Register the op's launches as a `triton_op`, whose schema comes from a Python signature."""
    schema = torch._C.parse_schema(f"{NAMESPACE}::{op.schema}")
    kinds = {"Tensor": Tensor, "int": int, "float": float, "bool": bool}
    parameters = [
        inspect.Parameter(
            argument.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            annotation=kinds[str(argument.type)],
        )
        for argument in schema.arguments
    ]
    results: Any = {0: None, 1: Tensor}.get(len(schema.returns))
    if len(schema.returns) > 1:
        results = tuple.__class_getitem__((Tensor,) * len(schema.returns))

    def launch(*arguments: Any) -> Any:
        return op.launch(*arguments)

    signature = inspect.Signature(parameters, return_annotation=results)
    setattr(launch, "__signature__", signature)  # noqa: B010  (functions declare no such field)
    mutated = tuple(a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write)
    torch.library.triton_op(f"{NAMESPACE}::{op.name}", launch, mutates_args=mutated)


def target_cuda() -> None:
    """Make the ops that this process imports from now on Triton launches on CUDA."""
    global _cuda
    _cuda = True


def define_schema(schema: str) -> None:
    """Define `schema` in the namespace unless the same one is there already."""
    name = schema.split("(", 1)[0]
    if hasattr(torch.ops.inkling, name):
        found = str(getattr(torch.ops.inkling, name).default._schema)
        wanted = str(torch._C.parse_schema(f"{NAMESPACE}::{schema}"))
        assert found == wanted, f"op {name} is defined as {found}, not as {wanted}"
        return
    _library.define(schema, tags=TAGS)


@contextlib.contextmanager
def use_references() -> Iterator[None]:
    """Within the block every op call runs the op's reference: the eager oracle of a step."""
    global _references_active
    before, _references_active = _references_active, True
    try:
        yield
    finally:
        _references_active = before
