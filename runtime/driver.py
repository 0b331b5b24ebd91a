"""CUDA's driver through its C interface, for the few things that torch does not offer."""

from __future__ import annotations

import ctypes
import functools
from typing import Final

_NO_MEMORY: Final = 2  # CUDA_ERROR_OUT_OF_MEMORY


@functools.cache
def library() -> ctypes.CDLL:
    """The driver's library."""
    return ctypes.CDLL("libcuda.so.1")


def attempt(name: str, *arguments: object) -> int:
    """Call a function of the driver; its error code, 0 if all is well."""
    return int(getattr(library(), name)(*arguments))


def call(name: str, *arguments: object) -> None:
    """Call a function of the driver that fails for want of memory alone: RuntimeError."""
    code = attempt(name, *arguments)
    if code == _NO_MEMORY:
        raise RuntimeError(f"{name}: out of memory")
    assert code == 0, f"{name} returned {code}"
