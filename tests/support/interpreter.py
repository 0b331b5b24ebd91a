"""Triton's interpreter, repaired: what CI runs the kernels in."""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def repair_interpreter() -> None:
    """Correct what the interpreter does with bfloat16 and with scalar conditions.

    As it comes, `tl.dot` multiplies the bit patterns of bfloat16, conversion from float32
    truncates, and a scalar comparison broadcast to a mask is a tensor of int32.
    """
    builder = interpreter.InterpreterBuilder
    multiply, cast, convert = builder.create_dot, builder.cast_impl, builder.create_fp_to_fp
    splat = builder.create_splat

    def widen(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, tl.float32)

    def narrow(handle: Any) -> Any:
        rounded = torch.from_numpy(np.ascontiguousarray(handle.data)).bfloat16()
        return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    def between(source: Any, target: Any, otherwise: Callable[[], Any]) -> Any:
        pair = source.dtype.scalar, target.scalar
        if pair == (tl.bfloat16, tl.float32):
            return widen(source)
        return narrow(source) if pair == (tl.float32, tl.bfloat16) else otherwise()

    def create_dot(self: Any, a: Any, b: Any, accumulator: Any, *rest: Any) -> Any:
        return multiply(self, widen(a), widen(b), accumulator, *rest)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        return between(source, target, lambda: cast(self, source, target))

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        return between(source, target, lambda: convert(self, source, target, rounding))

    def create_splat(self: Any, kind: Any, source: Any) -> Any:
        if source.data.dtype != np.bool_:
            return splat(self, kind, source)
        return interpreter.TensorHandle(np.full(kind.shape, source.data), tl.int1)

    builder.create_splat = create_splat
    builder.create_dot = create_dot
    builder.cast_impl = cast_impl
    builder.create_fp_to_fp = create_fp_to_fp
