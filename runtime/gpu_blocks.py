"""Exchange blocks on GPUs: each in the memory of its rank's GPU, mapped by all processes.

The driver's virtual memory calls make, export and map them: a mapping keeps the memory, so nobody
reads what is gone when another rank dies. A mapping needs no context on the other GPU. The host sees
the error word by a copy behind each replay, and writes it beside a replay that waits, from pinned
memory on a stream of its own: no kernel has to end for that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

from inkling_engine.kernels._exchange import ERROR, OWNER, WORD
from inkling_engine.runtime.capture import pinned
from inkling_engine.runtime.driver import attempt, call
from inkling_engine.runtime.errors import IncompatibleError
from inkling_engine.runtime.pool import host_view
from inkling_engine.runtime.seat import Blocks

_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_KEPT = ("rank", "peers")  # pools that steps do not write


class _Place(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("kind", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("kind", ctypes.c_int),  # 1: pinned to its place
        ("handles", ctypes.c_int),
        ("place", _Place),
        ("unused", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("place", _Place), ("flags", ctypes.c_int))


class GpuBlocks(Blocks):
    """The exchange blocks of all ranks as `rank` on GPU `device` sees them."""

    def __init__(self, words: int, world: int, rank: int, device: torch.device) -> None:
        """Make the own block, of `words` words."""
        self._device, self._mapped = device, list[tuple[ctypes.c_void_p, ctypes.c_size_t]]()
        super().__init__(words, world, rank)
        self._word = self.own[ERROR : ERROR + 1]
        self._seen, self._alarm = pinned(self._word), pinned(self._word)
        self._view = host_view(self._seen).cast("q")
        self._side = torch.cuda.Stream(device)

    def share(self, pools: Mapping[str, Tensor]) -> int:
        """Zero the pools, which warm-ups without the other ranks have written."""
        for name, pool in pools.items():
            if name not in _KEPT:
                pool.zero_()
        handle = super().share(pools)
        torch.cuda.synchronize(self._device)
        return handle

    def meet(
        self, handles: Mapping[int, int], sockets: Mapping[int, int], pools: Mapping[str, Tensor]
    ) -> None:
        """Map the blocks behind `handles` and fill `peers`."""
        super().meet(handles, {}, pools)
        torch.cuda.synchronize(self._device)

    def mark(self) -> None:
        """Let `missing` see the error word, once the current stream has come here."""
        self._seen.copy_(self._word, non_blocking=True)

    def give_up(self, rank: int) -> None:
        """End the waits of this rank's kernels, since `rank` is gone."""
        self._alarm[0] = 1 + rank
        with torch.cuda.stream(self._side):
            self._word.copy_(self._alarm, non_blocking=True)

    def close(self) -> None:
        """Wait for what runs, and unmap all blocks."""
        super().close()
        with suppress(RuntimeError):  # of a kernel that failed: the process has seen that
            torch.cuda.synchronize(self._device)
        while self._mapped:
            address, size = self._mapped.pop()
            call("cuMemUnmap", address, size)
            call("cuMemAddressFree", address, size)

    def _error(self) -> int:
        return int(self._view[0])

    def _open(self) -> int:
        wanted, size = _properties(self._device), self._size()
        memory, handle = ctypes.c_uint64(), ctypes.c_int()
        call("cuMemCreate", ctypes.byref(memory), size, ctypes.byref(wanted), ctypes.c_uint64(0))
        kind, flags = ctypes.c_int(_DESCRIPTOR), ctypes.c_uint64(0)
        call("cuMemExportToShareableHandle", ctypes.byref(handle), memory, kind, flags)
        call("cuMemRelease", memory)  # the descriptor keeps it
        return handle.value

    def _map(self, handle: int) -> Tensor:
        memory, address, size = ctypes.c_uint64(), ctypes.c_void_p(), self._size()
        number, kind = ctypes.c_void_p(handle), ctypes.c_int(_DESCRIPTOR)
        code = attempt("cuMemImportFromShareableHandle", ctypes.byref(memory), number, kind)
        self._require("import", code)
        none = ctypes.c_size_t(0), ctypes.c_void_p(0), ctypes.c_uint64(0)
        call("cuMemAddressReserve", ctypes.byref(address), size, *none)
        call("cuMemMap", address, size, none[0], memory, none[2])
        self._mapped.append((address, size))
        call("cuMemRelease", memory)
        access = _Access(_Place(_ON_DEVICE, self._device.index), _READ_WRITE)
        code = attempt("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
        self._require("address", code)
        assert address.value is not None
        return _tensor(address.value, self.words, self._device)

    def _require_owner(self, rank: int) -> None:
        """A kernel here must be able to read the block."""
        try:
            found = int((self.all[rank][OWNER : OWNER + 1] + 0).item()) - 1
        except RuntimeError as error:
            self._refuse(f"read memory of rank {rank}: {error}")
        if found != rank:
            self._refuse(f"read memory of rank {rank}: it is said to be rank {found}'s")

    def _require(self, what: str, code: int) -> None:
        if code:
            self._refuse(f"{what} memory of another rank's GPU: error {code} of the driver")

    def _refuse(self, what: str) -> None:
        expected = "GPUs of one machine that can address one another's memory"
        remedy = "see `nvidia-smi topo -p2p rw`; choose other GPUs, or build with --tp 1"
        raise IncompatibleError(f"GPU of rank {self.rank}", f"cannot {what}", expected, remedy)

    def _size(self) -> ctypes.c_size_t:
        """Bytes of a block: whole pages of the GPU."""
        page, wanted = ctypes.c_size_t(), _properties(self._device)
        least = ctypes.c_int(0)
        call("cuMemGetAllocationGranularity", ctypes.byref(page), ctypes.byref(wanted), least)
        return ctypes.c_size_t(-(-self.words * WORD // page.value) * page.value)


def _properties(device: torch.device) -> _Properties:
    return _Properties(1, _DESCRIPTOR, _Place(_ON_DEVICE, device.index))


def _tensor(address: int, words: int, device: torch.device) -> Tensor:
    """Memory at an address as [words] int64."""
    size = words * WORD
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    return torch.empty(0, dtype=torch.int64, device=device).set_(storage)
