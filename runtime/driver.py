"""CUDA's driver through its C interface, for the few things that torch does not offer."""

from __future__ import annotations

import ctypes
import functools


@functools.cache
def library() -> ctypes.CDLL:
    """The driver's library."""
    return ctypes.CDLL("libcuda.so.1")


def attempt(name: str, *arguments: object) -> int:
    """Call a function of the driver; its error code, 0 if all is well."""
    return int(getattr(library(), name)(*arguments))


def call(name: str, *arguments: object) -> None:
    """Call a function of the driver that must not fail."""
    code = attempt(name, *arguments)
    assert code == 0, f"{name} returned {code}"
