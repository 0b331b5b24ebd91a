"""Exchange blocks of GPUs, over a driver that keeps memory in files: what is mapped, refused, let go."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from inkling_engine.kernels._exchange import ERROR, OWNER
from inkling_engine.runtime import driver, gpu_blocks
from inkling_engine.runtime.errors import IncompatibleError
from inkling_engine.runtime.gpu_blocks import GpuBlocks

PAGE, WORDS = 1 << 16, 9000
DEVICE = torch.device("cuda", 0)


class Driver:
    """The calls of libcuda that are used. Memory is a file, its handle a descriptor."""

    def __init__(self) -> None:
        self.mapped: dict[int, mmap.mmap] = {}
        self.reserved = self.handles = 0
        self.refuses = ""
        self.readers: list[int] = []

    def cuMemGetAllocationGranularity(self, page: Any, wanted: Any, least: Any) -> int:
        page._obj.value = PAGE
        return 0

    def cuMemCreate(self, memory: Any, size: Any, wanted: Any, flags: Any) -> int:
        assert size.value % PAGE == 0 and wanted._obj.handles == 1
        memory._obj.value = os.memfd_create("gpu")
        os.ftruncate(memory._obj.value, size.value)
        self.handles += 1
        return 0

    def cuMemExportToShareableHandle(self, handle: Any, memory: Any, kind: Any, flags: Any) -> int:
        handle._obj.value = os.dup(memory.value)
        return 0

    def cuMemImportFromShareableHandle(self, memory: Any, handle: Any, kind: Any) -> int:
        if self.refuses == "import":
            return 217
        memory._obj.value = os.dup(handle.value)
        self.handles += 1
        return 0

    def cuMemRelease(self, memory: Any) -> int:
        os.close(memory.value)
        self.handles -= 1
        return 0

    def cuMemAddressReserve(
        self, address: Any, size: Any, alignment: Any, wanted: Any, flags: Any
    ) -> int:
        address._obj.value = 1  # known when it is mapped
        self.reserved += 1
        return 0

    def cuMemMap(self, address: Any, size: Any, offset: Any, memory: Any, flags: Any) -> int:
        whole = mmap.mmap(memory.value, size.value)
        address.value = ctypes.addressof(ctypes.c_char.from_buffer(whole))
        self.mapped[address.value] = whole
        return 0

    def cuMemSetAccess(self, address: Any, size: Any, access: Any, count: Any) -> int:
        assert access._obj.flags == 3
        self.readers.append(access._obj.place.id)
        return 217 if self.refuses == "address" else 0

    def cuMemUnmap(self, address: Any, size: Any) -> int:
        del self.mapped[address.value]
        return 0

    def cuMemAddressFree(self, address: Any, size: Any) -> int:
        self.reserved -= 1
        return 0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    one = Driver()
    monkeypatch.setattr(driver, "library", lambda: one)
    tensor, cpu = gpu_blocks._tensor, torch.device("cpu")
    monkeypatch.setattr(gpu_blocks, "_tensor", lambda at, words, _: tensor(at, words, cpu))
    monkeypatch.setattr(gpu_blocks, "pinned", torch.zeros_like)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    yield one
    assert (one.mapped, one.reserved, one.handles) == ({}, 0, 0)


def pools() -> dict[str, torch.Tensor]:
    """Pools that warm-ups have written."""
    return {name: torch.full((8,), 7) for name in ("rank", "peers", "step_counter", "conv_attn")}


def pair() -> tuple[GpuBlocks, GpuBlocks]:
    """The blocks as both of two ranks see them."""
    one, two = (GpuBlocks(WORDS, 2, rank, DEVICE) for rank in range(2))
    mine, theirs = pools(), pools()
    handles = one.share(mine | {"exchange": one.own}), two.share(theirs)
    one.meet({1: handles[1]}, {1: 99}, mine)
    two.meet({0: handles[0]}, {}, theirs)
    for handle in handles:
        os.close(handle)
    assert mine["peers"][:2].tolist() == [one.own.data_ptr(), one.all[1].data_ptr()]
    assert int(mine["step_counter"].sum()) == int(mine["conv_attn"].sum()) == 0
    assert int(mine["rank"][0]) == 7, "steps do not write it"
    return one, two


def test_each_sees_what_the_other_writes(fake: Driver) -> None:
    one, two = pair()
    assert len(one.own) == WORDS and one.own.data_ptr() != two.all[0].data_ptr()
    two.own[100:] = 5
    assert int(one.all[1].sum()) == 5 * (WORDS - 100) + 2
    one.close()
    assert int(two.all[1].sum()) == 5 * (WORDS - 100) + 2, "a mapping keeps the memory"
    two.close()
    two.close()
    assert fake.readers == [0] * 4


def test_the_error_word_is_seen_behind_a_replay_and_written_beside_it(fake: Driver) -> None:
    one, two = pair()
    one.own[ERROR] = 2
    assert one.missing() is None, "the host has not seen it"
    one.mark()
    assert one.missing() == 1
    two.give_up(0)
    assert int(two.own[ERROR]) == 1
    one.close()
    two.close()


@pytest.mark.parametrize("what", ["import", "address"])
def test_memory_that_cannot_be_shared_is_refused(fake: Driver, what: str) -> None:
    one = GpuBlocks(WORDS, 2, 0, DEVICE)
    fake.refuses = what
    with pytest.raises(IncompatibleError, match=f"cannot {what} memory of .*: error 217") as caught:
        one.meet({1: one._handle}, {}, pools())
    assert caught.value.field == "GPU of rank 0"
    one.close()


def test_memory_that_is_not_the_others_is_refused(fake: Driver) -> None:
    one, two = (GpuBlocks(WORDS, 2, rank, DEVICE) for rank in range(2))
    two.own[OWNER] = 7
    with pytest.raises(IncompatibleError, match="cannot read memory of rank 1: .* rank 6's"):
        one.meet({1: two._handle}, {}, pools())
    one.close()
    two.close()


def test_the_drivers_structures_have_their_sizes() -> None:
    assert ctypes.sizeof(gpu_blocks._Properties) == 32
    assert ctypes.sizeof(gpu_blocks._Access) == 12
