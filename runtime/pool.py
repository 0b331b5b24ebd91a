"""`StatePool`: every byte that outlives a step, allocated once from the manifest.

Each pool is its own contiguous, 256-byte aligned tensor whose address never changes: programs
write into it in place, and a misaligned input would be copied and its mutation lost.

Debug interface, for tests and the curious: `digest_slot` and `digest_page` name content by
SHA-256, `poison_slot` and `poison_page` overwrite what nobody may read. `debug` has the same for
whole engines.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Iterable
from typing import Final, Literal

from torch import Tensor

from inkling_engine.artifacts.manifest import Manifest
from inkling_engine.kernels.state import allocate

_GARBAGE: Final = 0x7F7F7F7F
_LINES: Final = (
    "request_state",
    "request_ints",
    "request_floats",
    "token_counts",
    "full_table",
    "window_table",
    "snapshot_slots",
)

Table = Literal["full", "window"]


def host_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor; the view keeps the tensor alive."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    size = tensor.numel() * tensor.element_size()
    block = (ctypes.c_char * size).from_address(tensor.data_ptr())
    block.owner = tensor  # type: ignore[attr-defined]
    return memoryview(block).cast("B")


class StatePool:
    """The pools of one engine by name, in manifest order."""

    def __init__(self, manifest: Manifest, device: str = "cpu") -> None:
        """Allocate and zero every pool; sizes must agree with the spec's."""
        self.tensors = {entry.name: allocate(entry, device) for entry in manifest.pools}
        self._check(manifest)

    def _check(self, manifest: Manifest) -> None:
        spec, sizes = manifest.spec, manifest.spec.pools
        assert sizes.slots == 1 + spec.max_running + sizes.snapshots
        assert sizes.table_width * spec.page_size >= spec.max_context + spec.spec_depth
        for name, pages in (("kv_full", sizes.full_pages), ("kv_window", sizes.window_pages)):
            assert self.tensors[name].shape[1] == pages, f"{name} does not have {pages} pages"
        for name in self._convs():
            assert self.tensors[name].shape[1] == sizes.slots, f"{name}: not {sizes.slots} slots"
        for name in _LINES:
            assert self.tensors[name].shape[0] == 1 + spec.max_running, f"{name}: wrong line count"
        assert self.tensors["results_int"].shape[0] == sizes.results

    def _convs(self) -> list[str]:
        return [name for name in self.tensors if name.startswith("conv_")]

    def digest_slot(self, slot: int) -> str:
        """SHA-256 of all conv rings in a live or snapshot slot, in the pools' order."""
        return digest(self.tensors[name][:, slot] for name in self._convs())

    def digest_page(self, table: Table, page: int) -> str:
        """SHA-256 of a physical page's keys and values in all layers of its kind."""
        return digest([self.tensors[f"kv_{table}"][:, page]])

    def poison_slot(self, slot: int, value: float = math.nan) -> None:
        """Fill a slot nobody may read: conv rings and floats with `value`, the rest of its
        request table line (a live slot's only) with a garbage integer."""
        for name in self._convs():
            self.tensors[name][:, slot] = value
        for name in _LINES:
            line = self.tensors[name]
            if slot < line.shape[0]:
                line[slot] = value if line.dtype.is_floating_point else _GARBAGE

    def poison_page(self, table: Table, page: int, value: float = math.nan) -> None:
        """Fill a physical page nobody may read with `value`."""
        self.tensors[f"kv_{table}"][:, page] = value


def digest(parts: Iterable[Tensor]) -> str:
    """SHA-256 of the bytes of tensors on any device, one after another."""
    found = hashlib.sha256()
    for part in parts:
        found.update(host_view(part.cpu().contiguous()))
    return found.hexdigest()
