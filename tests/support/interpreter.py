"""Triton's interpreter, repaired: what CI runs the kernels in."""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
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
    _hasten()


def _hasten() -> None:
    """Have the same done in half the time.

    As it comes, each call of a function looks through the whole language for what to patch, it is
    computed whether sums and products overflow, which nobody reads without `debug`, an exclusive
    or is reduced element by element, and every numpy type is looked up in a table made for that.
    """
    patch, reduced = interpreter._patch_lang, interpreter.ReduceOps.apply_impl
    dtype_of_scalar = cache(interpreter._get_np_dtype)

    def patch_once(_: Any) -> Any:
        return patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        return self.rewrite()(*arguments, **named)

    def apply_reduction(self: Any, values: tuple[Any, ...]) -> Any:
        if self.combine_fn is not tl.standard._xor_combine:
            return reduced(self, values)
        (value,) = values
        found = np.bitwise_xor.reduce(value.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(found, value.dtype)

    def dtype_of(kind: Any) -> Any:
        return np.dtype(np.uint64) if kind.scalar.is_ptr() else dtype_of_scalar(kind.scalar)

    interpreter._patch_lang = patch_once
    interpreter.InterpretedFunction.__call__ = call
    interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl = lambda *_: None
    interpreter.ReduceOps.apply_impl = apply_reduction
    interpreter._get_np_dtype = dtype_of
