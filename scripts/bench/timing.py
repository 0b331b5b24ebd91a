"""Times of captured calls on a GPU: graphs of several copies, replayed by turns, medians of blocks.

A side of a comparison is a list of calls, each on inputs of its own, so that a replay moves more
than the L2 cache holds wherever a call reads more than a few megabytes. All sides of a case are
captured first and then take turns, so that clocks and neighbours are the same for all of them.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor

from inkling_engine.runtime.overlap import overlap_launches

L2_BYTES: Final = 60 << 20
MOST_COPIES = 48
BLOCK_MS: Final = 3.0

Call = Callable[[], Any]


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches: `bandwidth` in bytes/s (read and written), `arithmetic` in flop/s."""

    bandwidth: float = 4.3e12
    arithmetic: float = 790e12

    def floor_us(self, moved: float, flops: float) -> float:
        """Least microseconds of a call that moves `moved` bytes and does `flops` operations."""
        return max(moved / self.bandwidth, flops / self.arithmetic) * 1e6


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median, least and most over the blocks."""

    median: float
    least: float
    most: float


def copies_for(moved: float, least: int = 2) -> int:
    """How many calls on separate inputs of `moved` bytes overflow the L2 cache three times."""
    return int(min(MOST_COPIES, max(least, -(-3 * L2_BYTES // max(1, int(moved))))))


def limit_copies(most: int) -> None:
    """Make at most `most` copies of a call's inputs from now on."""
    global MOST_COPIES
    MOST_COPIES = most


def nbytes(*tensors: Tensor) -> int:
    """Bytes of `tensors` together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Captured(torch.cuda.CUDAGraph):
    """A graph that keeps its calls alive: it reads their inputs where they were."""

    calls: tuple[Call, ...] = ()


def capture(calls: Iterable[Call], overlap: bool = True) -> Captured:
    """One graph of all `calls`, after each has run once: compilation may not fall in a capture.

    If `overlap`, launches overlap as an engine's do; otherwise edges are as they were captured.
    """
    calls = tuple(calls)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for call in calls:
            call()
        stream.synchronize()
        graph = Captured(keep_graph=True)
        graph.calls = calls
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    if overlap:
        overlap_launches(graph.raw_cuda_graph())
    graph.instantiate()
    torch.cuda.synchronize()
    return graph


def by_turns(sides: Mapping[str, Call], blocks: int) -> dict[str, list[float]]:
    """Microseconds of each side's one call, block by block; sides take turns within a block."""
    repeats = {}
    for name, side in sides.items():
        elapsed(side, 1)
        repeats[name] = int(min(200, max(1, BLOCK_MS * 1e3 / max(1.0, elapsed(side, 2)))))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(blocks):
        for name, side in sides.items():
            times[name].append(elapsed(side, repeats[name]))
    return times


def elapsed(call: Call, repeats: int) -> float:
    """Microseconds of one of `repeats` calls in a row, by events on the device."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / repeats


def measure(sides: Mapping[str, Sequence[Call]], blocks: int) -> dict[str, Timing]:
    """Capture every side and time its calls by turns."""
    graphs = {name: capture(calls) for name, calls in sides.items()}
    times = by_turns({name: graph.replay for name, graph in graphs.items()}, blocks)
    return {
        name: summary([time / len(sides[name]) for time in found]) for name, found in times.items()
    }


def summary(times: Sequence[float]) -> Timing:
    """Median and range of `times`."""
    return Timing(median(times), min(times), max(times))


def measured_ceilings(blocks: int = 5) -> Ceilings:
    """Copy bandwidth over 4 GB, and bf16 product of 8192^3, on random data."""
    source = torch.randn(1 << 30, device="cuda", dtype=torch.float16)
    target = torch.empty_like(source)
    size = 8192
    x, y = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    sides: dict[str, Call] = {
        "copy": lambda: target.copy_(source),
        "product": lambda: torch.mm(x, y),
    }
    times = {name: median(found) * 1e-6 for name, found in by_turns(sides, blocks).items()}
    return Ceilings(2 * nbytes(source) / times["copy"], 2 * size**3 / times["product"])


def about() -> dict[str, Any]:
    """Device and versions, for a report."""
    import triton  # type: ignore[import-untyped]

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "processors": properties.multi_processor_count,
        "host_cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def device_events(run: Call, times: int = 1) -> list[Any]:
    """What the profiler saw on the device while `run` was called `times` times, in order of time."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(times):
            run()
        torch.cuda.synchronize()
    found = [event for event in profile.events() if str(event.device_type).endswith("CUDA")]
    return sorted(found, key=lambda event: (event.time_range.start, event.time_range.end))


def idle_before(events: Sequence[Any]) -> tuple[list[float], float]:
    """Microseconds without any of `events` before each one, and from the first's begin to the last
    end."""
    begin = end = events[0].time_range.start
    gaps = []
    for event in events:
        gaps.append(max(0.0, event.time_range.start - end))
        end = max(end, event.time_range.end)
    return gaps, end - begin
