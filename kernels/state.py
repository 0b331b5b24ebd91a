"""Memory of a step: pools, row buffers and seeded weights, from plain layout values.

Build and run both allocate with these functions, so that a program sees the same alignment and
the same contents everywhere.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

ALIGNMENT = 256
_ODD, _OTHER_ODD = 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D
_STEPS, _DROPPED = 1 << 23, 40  # of 64 bits
_PIECE = 1 << 21  # elements drawn at a time
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
}


Block = tuple[int, int, int]


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
    """Seeded values for the weight `layout`: `draw_block` of the tensor of its name, scaled so that
    activations stay of order one."""
    tensor = allocate(layout, device)
    whole = [(0, size, 1) for size in layout.shape]
    draw_block(tensor, layout.name, whole, seed, weight_scale(layout.name, layout.shape[-1]))
    return tensor


def weight_scale(name: str, width: int) -> float | None:
    """Standard deviation for the weight `name`, whose last dimension is `width`: 0.3 for taps and
    biases, for matrices one over the root of `width`; None for norms and scales, which are 1."""
    leaf = name.rsplit(".", 1)[-1]
    if leaf.endswith(("norm", "scale")):
        return None
    return 0.3 if leaf.endswith(("conv", "bias", "rel_proj")) else float(width**-0.5)


def draw_block(
    target: Tensor, name: str, block: Sequence[Block], seed: int, scale: float | None
) -> None:
    """Fill `target` with the `block` (start, stop, step by axis) of the drawn tensor `name`.

    Each element is even in +-sqrt(3) * `scale`, a function of seed, name and its own index: any block
    of any size is the slice of the whole, and the same bits on every device. Ones without `scale`.
    """
    if scale is None:
        target.fill_(1)
        return
    lengths = [len(range(*axis)) for axis in block]
    kept = [at for at, length in enumerate(lengths) if length > 1] or [0]
    keys = [_index_keys(axis, f"{seed} {at} {name}", target) for at, axis in enumerate(block)]
    first = keys[kept[0]]
    for at, key in enumerate(keys):
        if at not in kept:
            first = first ^ key
    unit = torch.tensor(scale * 3**0.5 / _STEPS, dtype=torch.float32).item()
    _fill(target.view([lengths[at] for at in kept]), [first, *(keys[at] for at in kept[1:])], unit)


def _index_keys(axis: Block, name: str, like: Tensor) -> Tensor:
    """64 random bits for each index of the tensor's `axis`, [indices] int64."""
    start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)
    indices = torch.arange(*axis, dtype=torch.int64, device=like.device)
    return _scramble(indices.mul_(_ODD).add_(start))


def _fill(target: Tensor, keys: list[Tensor], unit: float) -> None:
    """Multiples of `unit` up to `_STEPS` either way, from the keys of each axis; a bounded piece of
    `target` at a time."""
    if len(keys) > 2:
        for item, key in zip(target, keys[0], strict=True):
            _fill(item, [keys[1] ^ key, *keys[2:]], unit)
        return
    rows = keys[0][:, None] if len(keys) == 2 else keys[0].new_zeros(1, 1)
    lines, size = target.view(len(rows), -1), max(1, _PIECE // len(keys[-1]))
    for at in range(0, len(rows), size):
        bits = _scramble(rows[at : at + size] ^ keys[-1])
        torch.mul(bits.bitwise_right_shift_(_DROPPED), unit, out=lines[at : at + size])


def _scramble(bits: Tensor) -> Tensor:
    """Mix int64 `bits` in place: every bit reaches the uppermost ones."""
    bits.mul_(_ODD)
    return bits.bitwise_xor_(bits >> 32).mul_(_OTHER_ODD)


def _aligned_bytes(size: int, device: str) -> Tensor:
    raw = torch.zeros(size + ALIGNMENT, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + size]
