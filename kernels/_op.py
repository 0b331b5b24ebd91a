"""How an op is declared: schema, reference, fake, and where its cases are.

The schema (with its mutations) is registered once a process in the namespace `inkling`. On the
CPU the implementation is the native library (`native.py`), loaded when it is first needed; the
reference is the specification and is called as a plain function, also for whole steps under
`use_references()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

NAMESPACE = "inkling"
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_references_active = False


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
    define_schema(op.schema)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return op


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
