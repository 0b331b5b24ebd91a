"""Memory of a step: pools, row buffers and seeded weights, from plain layout values.

Build and run both allocate with these functions, so that a program sees the same alignment and
the same contents everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

ALIGNMENT = 256
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
}


class Layout(Protocol):
    """What a manifest says of a tensor."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class RowLayout(Layout, Protocol):
    """A tensor inside a row buffer."""

    @property
    def offset(self) -> int: ...


def allocate(layout: Layout, device: str = "cpu") -> Tensor:
    """A zeroed tensor of `layout`, its address a multiple of 256 bytes."""
    dtype = DTYPES[layout.dtype]
    size = math.prod(layout.shape) * dtype.itemsize
    return _aligned_bytes(size, device).view(dtype).view(layout.shape)


def allocate_rows(
    layouts: Iterable[RowLayout], size: int, device: str = "cpu"
) -> tuple[Tensor, dict[str, Tensor]]:
    """One zeroed row buffer of `size` bytes and its named views."""
    buffer = _aligned_bytes(size, device)
    views = {}
    for layout in layouts:
        dtype = DTYPES[layout.dtype]
        stop = layout.offset + math.prod(layout.shape) * dtype.itemsize
        views[layout.name] = buffer[layout.offset : stop].view(dtype).view(layout.shape)
    return buffer, views


def random_weight(layout: Layout, seed: int, device: str = "cpu") -> Tensor:
    """Seeded values for the weight `layout`, scaled so that activations stay of order one.

    Norms and scales are 1, taps and biases normal with deviation 0.3, matrices normal over the
    square root of their last dimension.
    """
    tensor = allocate(layout, device)
    leaf = layout.name.rsplit(".", 1)[-1]
    if leaf.endswith(("norm", "scale")):
        return tensor.fill_(1)
    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + sum(layout.name.encode()))
    small = leaf.endswith(("conv", "bias", "rel_proj"))
    return tensor.normal_(generator=generator).mul_(0.3 if small else layout.shape[-1] ** -0.5)


def _aligned_bytes(size: int, device: str) -> Tensor:
    raw = torch.zeros(size + ALIGNMENT, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + size]
