"""CUDA: one captured graph a program, and the host's two windows on the device.

Every bucket is warmed up and captured at load, largest first, in one memory pool; afterwards a
step is one graph launch. The host fills pinned row buffers, which travel only when something
changed, and reads the step's line of the result ring from a pinned mirror.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from inkling_engine.artifacts.manifest import Manifest
from inkling_engine.runtime.graphs import Package

WARM_UPS = 3  # a first run loads kernels and makes library handles, which capture forbids


def pinned(tensor: Tensor) -> Tensor:
    """Zeroed page-locked host memory with the shape and dtype of `tensor`."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def step_stream() -> torch.cuda.Stream:
    """The one stream on which an engine's copies and replays follow one another."""
    return _stream_of(torch.cuda.current_device())


@functools.cache
def _stream_of(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def sender(host: Tensor, device: Tensor) -> Callable[[], None]:
    """What sends pinned `host` to `device` in stream order, without waiting."""

    def send() -> None:
        with torch.cuda.stream(step_stream()):
            device.copy_(host, non_blocking=True)

    return send


class CapturedGraphs:
    """The engine's programs as graphs; `run` replays one and fetches its result line."""

    def __init__(
        self,
        manifest: Manifest,
        programs: Mapping[str, Package],
        inputs: Mapping[str, list[Tensor]],
        rings: Sequence[Tensor],
        counter: Tensor,
    ) -> None:
        """Warm up and capture every program over its bound inputs.

        `rings` are the result pools that the host reads, `counter` counts the steps.
        """
        self._stream, self._inputs, self._rings = step_stream(), inputs, rings
        self.mirrors = [pinned(ring) for ring in rings]
        self._done, self._steps = torch.cuda.Event(), 0
        self._addresses = {n: [t.data_ptr() for t in tensors] for n, tensors in inputs.items()}
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self.outputs: dict[str, list[Tensor]] = {}
        order = sorted(manifest.programs, key=lambda program: -program.bucket.tokens)
        with torch.cuda.stream(self._stream):
            for program in order:
                for _ in range(WARM_UPS):
                    programs[program.name].run(inputs[program.name])
        self._stream.synchronize()
        memory = torch.cuda.graph_pool_handle()
        for program in order:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory, stream=self._stream):
                self.outputs[program.name] = programs[program.name].run(inputs[program.name])
            self._graphs[program.name] = graph
        counter.zero_()  # warm-ups ran inert steps, which it counted
        torch.cuda.synchronize()

    def run(self, name: str) -> None:
        """Replay program `name` and wait for its result line."""
        line = self._steps % self._rings[0].shape[0]
        self._steps += 1
        with torch.cuda.stream(self._stream):
            self._graphs[name].replay()
            for mirror, ring in zip(self.mirrors, self._rings, strict=True):
                mirror[line].copy_(ring[line], non_blocking=True)
            self._done.record()
        self._done.synchronize()

    def check_addresses(self) -> None:
        """Assert that no input of any graph has moved since it was captured."""
        for name, tensors in self._inputs.items():
            found = [tensor.data_ptr() for tensor in tensors]
            assert found == self._addresses[name], f"an input of {name} moved after capture"


def capture(
    manifest: Manifest, programs: Mapping[str, Package], inputs: Mapping[str, list[Tensor]]
) -> CapturedGraphs:
    """Capture all programs; the result pools are found among their inputs."""
    # Products that a program leaves to the library follow these flags of the process.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    first = manifest.programs[0]
    named = dict(zip(first.inputs, inputs[first.name], strict=True))
    rings = [named["pools.results_int"], named["pools.results_float"]]
    return CapturedGraphs(manifest, programs, inputs, rings, named["pools.step_counter"])
