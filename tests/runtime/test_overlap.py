"""Edges of a captured graph, on a driver that keeps a small graph of its own."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from inkling_engine.runtime import driver as cuda
from inkling_engine.runtime import overlap

KERNEL, MEMSET = 0, 2
NODES = {  # handle: (type, name or None for a library's kernel)
    1: (KERNEL, b"embed_norm_kernel"),
    2: (KERNEL, b"tile_kernel_3"),
    3: (KERNEL, None),
    4: (KERNEL, b"_ZN7cutlass6kernelI8f_kernelEEvT_"),
    5: (KERNEL, b"commit_kernel"),
    6: (MEMSET, None),
    7: (KERNEL, b"commit_kernel"),
}
PLAIN, PROGRAMMATIC = (0, 0, 0), (1, 0, 1)


class Driver:
    """The calls of libcuda that are used, over NODES and edges in a chain."""

    def __init__(self) -> None:
        self.edges = {(a, a + 1): PLAIN for a in range(1, 7)}

    def cuGraphGetEdges_v2(self, _: Any, sources: Any, targets: Any, edges: Any, count: Any) -> int:
        if sources is not None:
            for i, ((source, target), data) in enumerate(self.edges.items()):
                sources[i], targets[i] = source, target
                edges[i].from_port, edges[i].to_port, edges[i].type = data
        count._obj.value = len(self.edges)
        return 0

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        kind._obj.value = NODES[node.value][0]
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node: Any, found: Any) -> int:
        name = NODES[node.value][1]
        found._obj.function = node.value if name else None
        return 0

    def cuFuncGetName(self, name: Any, function: Any) -> int:
        name._obj.value = NODES[function.value][1]
        return 0

    def cuGraphRemoveDependencies_v2(self, _: Any, a: Any, b: Any, data: Any, count: Any) -> int:
        for i in range(count.value):
            assert self.edges.pop((a[i], b[i])) == read(data[i])
        return 0

    def cuGraphAddDependencies_v2(self, _: Any, a: Any, b: Any, data: Any, count: Any) -> int:
        for i in range(count.value):
            assert (a[i], b[i]) not in self.edges
            self.edges[a[i], b[i]] = read(data[i])
        return 0


def read(data: Any) -> tuple[int, int, int]:
    return data.from_port, data.to_port, data.type


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(cuda, "library", lambda: fake)
    return fake


def test_edges_into_our_kernels_become_programmatic(driver: Driver) -> None:
    assert overlap.overlap_launches(1) == 2
    assert driver.edges == {
        (1, 2): PROGRAMMATIC,
        (2, 3): PLAIN,  # a library's kernel does not wait by itself
        (3, 4): PLAIN,
        (4, 5): PROGRAMMATIC,
        (5, 6): PLAIN,
        (6, 7): PLAIN,  # only a kernel can let the next one begin
    }


def test_a_second_call_finds_nothing_to_change(driver: Driver) -> None:
    overlap.overlap_launches(1)
    before = dict(driver.edges)
    assert overlap.overlap_launches(1) == 0
    assert driver.edges == before


def test_the_drivers_structures_have_their_sizes() -> None:
    assert ctypes.sizeof(overlap._Edge) == 8
    assert ctypes.sizeof(overlap._KernelNode) == 72


def test_a_refusal_of_the_driver_is_seen(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "cuGraphNodeGetType", lambda *_: 1)
    with pytest.raises(AssertionError, match="cuGraphNodeGetType returned 1"):
        overlap.overlap_launches(1)
