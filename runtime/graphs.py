"""The compiled programs of an engine, each bound to its inputs, replayed by bucket name.

The only module that touches torch's private package loader. A program gets one input list, built
once; a run passes that same list, so every step reads and writes the same addresses. On the CPU a
replay is a plain call for each step; there is nothing to capture.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from inkling_engine.artifacts.manifest import Manifest
from inkling_engine.runtime.ops import load_ops
from inkling_engine.runtime.replay import RunnerFactory

Package = torch._C._aoti.AOTIModelPackageLoader
MODEL_NAME = "model"  # what a build names the one model in each package


class GraphSet:
    """Programs by name, each with its inputs in call order."""

    def __init__(self, programs: Mapping[str, Package], inputs: Mapping[str, list[Tensor]]) -> None:
        """Bind opened packages to their checked inputs."""
        assert programs.keys() == inputs.keys()
        self._calls = {name: (programs[name].run, inputs[name]) for name in programs}

    def run(self, name: str) -> None:
        """Run program `name` once; on the CPU it has completed when this returns."""
        call, inputs = self._calls[name]
        call(inputs)


def open_programs(folder: Path, manifest: Manifest, device: str, steps: int = 1) -> RunnerFactory:
    """Load the ops and open every program of an engine folder for `device`; the result binds them.

    Packages are opened single-threaded: one runner each, called by one thread at a time, as graph
    capture wants it. A CUDA program holds its kernels; a CPU program calls the folder's library.
    `steps` is how many a decode replay may take, which CUDA graphs are captured for.
    """
    index = -1
    if device == "cpu":
        load_ops(folder, manifest)
    else:
        torch.cuda.init()  # the loader does not begin torch's CUDA state
        index = torch.device(device).index
    programs = {
        program.name: Package(str(folder / program.file), MODEL_NAME, True, 1, index)
        for program in manifest.programs
    }
    if device == "cpu":
        return lambda _, inputs: GraphSet(programs, inputs)
    from inkling_engine.runtime.capture import capture

    return lambda manifest, inputs: capture(manifest, programs, inputs, steps)
