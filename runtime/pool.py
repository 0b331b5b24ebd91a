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
from inkling_engine.runtime.seat import POOL, Seat

_GARBAGE: Final = 0x7F7F7F7F
_LINES: Final = (
    "request_state",
    "request_ints",
    "request_floats",
    "token_counts",
    "full_table",
    "window_table",
    "snapshot_slots",
    "draft_tokens",
)
_STASHES: Final = ("draft_hidden", "recent_tokens")  # by slot too, where the engine drafts

Table = Literal["full", "window"]


def host_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor; the view keeps the tensor alive."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    size = tensor.numel() * tensor.element_size()
    block = (ctypes.c_char * size).from_address(tensor.data_ptr())
    block.owner = tensor  # type: ignore[attr-defined]
    return memoryview(block).cast("B")


class StatePool:
    """The pools of one rank by name, in manifest order; `seat` is its place among several."""

    def __init__(self, manifest: Manifest, device: str = "cpu", seat: Seat | None = None) -> None:
        """Allocate and zero every pool that the seat does not have; sizes must agree with the spec's."""
        self.seat, given = seat, seat.pools(manifest, device) if seat else {}
        self.tensors = {
            entry.name: given[entry.name] if entry.name in given else allocate(entry, device)
            for entry in manifest.pools
        }
        self._check(manifest)
        if seat:
            self.tensors["rank"][0] = seat.rank

    def _check(self, manifest: Manifest) -> None:
        spec, sizes = manifest.spec, manifest.spec.pools
        assert sizes.slots == 1 + spec.max_running + sizes.snapshots
        assert sizes.table_width * spec.page_size >= spec.max_context + spec.spec_depth
        for name, pages in (("kv_full", sizes.full_pages), ("kv_window", sizes.window_pages)):
            assert self.tensors[name].shape[1] == pages, f"{name} does not have {pages} pages"
        for name, tensor in self._by_slot().items():
            assert tensor.shape[0] == sizes.slots, f"{name}: not {sizes.slots} slots"
        for name in _LINES:
            assert self.tensors[name].shape[0] == 1 + spec.max_running, f"{name}: wrong line count"
        assert self.tensors["results_int"].shape[0] == sizes.results

    def close(self) -> None:
        """Let go of the pools, and end the ranks that this one leads."""
        self.tensors.clear()
        if self.seat:
            self.seat.close()

    def replicated(self) -> dict[str, str]:
        """SHA-256 by name of the pools that every rank has alike."""
        own = ("kv_", "conv_kv_", "rank", "peers", POOL)
        names = [name for name in self.tensors if not name.startswith(own)]
        return {name: digest([self.tensors[name]]) for name in names}

    def _by_slot(self) -> dict[str, Tensor]:
        """What live and snapshot slots have alike, as [slots, ...] each."""
        found = {n: t.transpose(0, 1) for n, t in self.tensors.items() if n.startswith("conv_")}
        return found | {name: self.tensors[name] for name in _STASHES if name in self.tensors}

    def _paged(self, table: Table) -> list[Tensor]:
        """KV pools of the pages of `table`: the target's and the drafts'."""
        names = (f"kv_{table}", f"kv_draft_{table}")
        return [self.tensors[name] for name in names if name in self.tensors]

    def digest_slot(self, slot: int) -> str:
        """SHA-256 of a live or snapshot slot: all conv rings as they are, and with drafting what the
        depths are computed again from."""
        return digest(tensor[slot] for tensor in self._by_slot().values())

    def digest_page(self, table: Table, page: int) -> str:
        """SHA-256 of a physical page's keys and values in all layers of its kind."""
        return digest(pool[:, page] for pool in self._paged(table))

    def poison_slot(self, slot: int, value: float = math.nan) -> None:
        """Fill a slot nobody may read: rings, stashes and floats with `value`, integers, and the rest
        of its request table line (a live slot's only), with a garbage one."""
        lines = {name: self.tensors[name] for name in _LINES}
        for tensor in (*self._by_slot().values(), *lines.values()):
            if slot < tensor.shape[0]:
                tensor[slot] = value if tensor.dtype.is_floating_point else _GARBAGE

    def poison_page(self, table: Table, page: int, value: float = math.nan) -> None:
        """Fill a physical page nobody may read with `value`."""
        for pool in self._paged(table):
            pool[:, page] = value


def digest(parts: Iterable[Tensor]) -> str:
    """SHA-256 of the bytes of tensors on any device, one after another."""
    found = hashlib.sha256()
    for part in parts:
        found.update(host_view(part.cpu().contiguous()))
    return found.hexdigest()
