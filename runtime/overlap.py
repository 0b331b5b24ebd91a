"""Programmatic dependent launch inside a captured graph.

Kernels of this project begin by letting the next kernel start and by waiting until what earlier
ones wrote can be read (`kernels/_triton.py`). In a captured graph an edge still means "after it has
ended", so the next kernel's launch, which costs about a microsecond, waits too. Here edges into our
kernels become programmatic ones: a launch overlaps the kernel before it. Kernels of libraries do
not wait by themselves, so edges into them stay.

Torch gives a captured graph's handle, nothing more.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator

from inkling_engine.runtime.driver import attempt, call

OURS = re.compile(rb"[a-z]\w*_kernel(_\d+)?")  # a library's C++ kernels have mangled names
_KERNEL_NODE = 0
_PROGRAMMATIC = 1  # both the port of a kernel node and the type of a dependency


class _Edge(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


class _KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("sizes", ctypes.c_uint * 7),  # grid, block, shared bytes
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


def overlap_launches(graph: int) -> int:
    """Make every edge between a kernel and a kernel of ours programmatic; return how many.

    `graph` is the CUgraph of a capture that is not instantiated yet.
    """
    loose, known = [], dict[int, bool]()
    for source, target, edge in list(_edges(graph)):
        plain = not (edge.from_port or edge.to_port or edge.type)
        if plain and _is_kernel(source) and _is_ours(target, known):
            loose.append((source, target))
    count = len(loose)
    sources = (ctypes.c_void_p * count)(*(source for source, _ in loose))
    targets = (ctypes.c_void_p * count)(*(target for _, target in loose))
    before, after = (_Edge * count)(), (_Edge * count)()
    for edge in after:
        edge.from_port = edge.type = _PROGRAMMATIC
    for change, edges in (
        ("cuGraphRemoveDependencies_v2", before),
        ("cuGraphAddDependencies_v2", after),
    ):
        size = ctypes.c_size_t(count)
        call(change, ctypes.c_void_p(graph), sources, targets, edges, size)
    return count


def _edges(graph: int) -> Iterator[tuple[int, int, _Edge]]:
    count = ctypes.c_size_t(0)
    handle = ctypes.c_void_p(graph)
    call("cuGraphGetEdges_v2", handle, None, None, None, ctypes.byref(count))
    sources, targets = (ctypes.c_void_p * count.value)(), (ctypes.c_void_p * count.value)()
    edges = (_Edge * count.value)()
    call("cuGraphGetEdges_v2", handle, sources, targets, edges, ctypes.byref(count))
    for source, target, edge in zip(sources, targets, edges, strict=True):
        assert source is not None and target is not None
        yield source, target, edge


def _is_kernel(node: int) -> bool:
    kind = ctypes.c_int(-1)
    call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
    return kind.value == _KERNEL_NODE


def _is_ours(node: int, known: dict[int, bool]) -> bool:
    """Whether a node runs a kernel of ours; `known` remembers the answer by function."""
    if not _is_kernel(node):
        return False
    found = _KernelNode()
    call("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(node), ctypes.byref(found))
    function = found.function
    if function is None:  # a library's, launched through the runtime
        return False
    if function not in known:
        name = ctypes.c_char_p()
        failed = attempt("cuFuncGetName", ctypes.byref(name), ctypes.c_void_p(function))
        known[function] = not failed and bool(name.value and OURS.fullmatch(name.value))
    return known[function]
