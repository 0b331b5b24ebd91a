"""CUDA: captured graphs, and the host's two windows on the device.

Every bucket is warmed up and captured at load, largest first, in one memory pool; afterwards a
replay is one graph launch. A decode bucket has a second graph where replays of several steps are
asked for: its step captured so often in a row. The host fills pinned row buffers, which travel only
when something changed, and reads the replay's lines of the result ring from a pinned mirror.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inkling_engine.artifacts.manifest import Manifest
from inkling_engine.runtime.graphs import Package
from inkling_engine.runtime.overlap import overlap_launches
from inkling_engine.runtime.timing import Timings

if TYPE_CHECKING:
    from inkling_engine.runtime.seat import Seat

WARM_UPS = 2  # the first run loads kernels and makes library handles, which capture forbids


def pinned(tensor: Tensor) -> Tensor:
    """Zeroed page-locked host memory with the shape and dtype of `tensor`."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=True)


@functools.cache
def step_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of `device` on which copies and replays follow one another."""
    return torch.cuda.Stream(device)


class Upload:
    """Sends pinned `host` to `device` in stream order, without waiting."""

    def __init__(self, host: Tensor, device: Tensor) -> None:
        """Nothing is sent yet."""
        self._host, self._device = host, device
        self._stream, self._sent = step_stream(device.device), torch.cuda.Event()

    def send(self) -> None:
        """Send all of it."""
        with torch.cuda.stream(self._stream):
            self._device.copy_(self._host, non_blocking=True)
            self._sent.record()

    def wait(self) -> None:
        """Until the last sending is over, and the host may write again."""
        self._sent.synchronize()


class CapturedGraphs:
    """The engine's programs as graphs; `replay` launches one and fetches its result lines.

    `seat`, of one rank of several, sees to it that ranks wait for one another no longer than they must.
    Ranks other than 0 fetch nothing.
    """

    overlaps = True
    seat: Seat | None = None

    def __init__(
        self,
        manifest: Manifest,
        programs: Mapping[str, Package],
        inputs: Mapping[str, list[Tensor]],
        steps: int = 1,
    ) -> None:
        """Warm up and capture every program over its bound inputs; decode buckets also `steps`
        times in one graph."""
        first = manifest.programs[0]
        named = dict(zip(first.inputs, inputs[first.name], strict=True))
        self._rings = [named["pools.results_int"], named["pools.results_float"]]
        self._stream = step_stream(self._rings[0].device)
        self.mirrors = [pinned(ring) for ring in self._rings]
        self._ended = torch.cuda.Event(), torch.cuda.Event()
        self._steps = self._replays = 0
        self._programs, self._inputs = programs, inputs
        self._graphs: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}
        self.outputs: dict[tuple[str, int], list[Tensor]] = {}
        self.timings = Timings()
        order = sorted(manifest.programs, key=lambda program: -program.bucket.tokens)
        torch.cuda.synchronize(self._rings[0].device)  # memory was zeroed on another stream
        with torch.cuda.stream(self._stream):
            with self.timings.phase("warm up"):
                for program in order:
                    for _ in range(WARM_UPS):
                        self.run(program.name)
                self._stream.synchronize()
            gc.collect()
            torch.cuda.empty_cache()
            memory = torch.cuda.graph_pool_handle()
            with self.timings.phase("capture"):
                for program in order:
                    self._capture(program.name, 1, memory)
                    if steps > 1 and program.bucket.kind != "extend":
                        self._capture(program.name, steps, memory)
            named["pools.step_counter"].zero_()  # warm-ups ran inert steps, which it counted
        self._stream.synchronize()

    def run(self, name: str) -> list[Tensor]:
        """One step of program `name` as it is, on the current stream; its outputs."""
        return self._programs[name].run(self._inputs[name])

    def _capture(self, name: str, steps: int, memory: Any) -> None:
        """Capture `steps` steps. `torch.cuda.graph` would synchronise and empty caches each time."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.capture_begin(pool=memory)
        try:
            for _ in range(steps):
                self.outputs[name, steps] = self.run(name)
        finally:
            graph.capture_end()
        overlap_launches(graph.raw_cuda_graph())
        graph.instantiate()
        self._graphs[name, steps] = graph

    def replay(self, name: str, steps: int) -> Callable[[], None]:
        """Launch `steps` steps of program `name`; the result waits for their result lines. Its
        event is used again by the replay after next."""
        ended, seat = self._ended[self._replays % 2], self.seat
        with torch.cuda.stream(self._stream):
            self._graphs[name, steps].replay()
            for lines in self._lines(steps) if seat is None or seat.rank == 0 else ():
                for mirror, ring in zip(self.mirrors, self._rings, strict=True):
                    mirror[lines].copy_(ring[lines], non_blocking=True)
            if seat:
                seat.mark()
            ended.record()
        self._replays += 1
        self._steps += steps
        return functools.partial(_watched, ended, seat) if seat else ended.synchronize

    def _lines(self, steps: int) -> Iterator[slice]:
        """The ring lines of the next `steps` steps: one piece, or two where the ring ends."""
        count = self._rings[0].shape[0]
        start = self._steps % count
        yield slice(start, min(start + steps, count))
        if start + steps > count:
            yield slice(0, start + steps - count)


def _watched(ended: torch.cuda.Event, seat: Seat) -> None:
    """Wait for `ended`, where other ranks may be waited for."""
    while not ended.query():
        seat.watch()


def capture(
    manifest: Manifest,
    programs: Mapping[str, Package],
    inputs: Mapping[str, list[Tensor]],
    steps: int,
) -> CapturedGraphs:
    """Capture all programs, under the flags that products left to a library follow."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return CapturedGraphs(manifest, programs, inputs, steps)
