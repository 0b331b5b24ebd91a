"""Memory of an engine, and its programs' inputs checked against the manifest once.

A program checks nothing by itself: a wrong shape or dtype gives wrong numbers, a misaligned input
is copied and what the step writes into it is lost. So every input is compared here, by name,
before the first step; afterwards nothing is allocated and no address changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from inkling_engine.artifacts.manifest import Manifest, ProgramEntry
from inkling_engine.kernels.state import DTYPES, Layout, allocate_rows
from inkling_engine.runtime import debug
from inkling_engine.runtime.metadata import RowInputs, Upload
from inkling_engine.runtime.mirror import Copy, Mirror
from inkling_engine.runtime.pool import StatePool, host_view
from inkling_engine.runtime.replay import Loop, Replayer, RunnerFactory
from inkling_engine.runtime.results import ResultRing
from inkling_engine.runtime.seat import Seat
from inkling_engine.runtime.timing import Timings
from inkling_engine.runtime.tokens import Tokenizer

INPUT_ALIGNMENT = 16


@dataclass(frozen=True)
class Loaded:
    """What an engine runs on: allocated, checked and bound."""

    manifest: Manifest
    pool: StatePool
    rows: dict[str, RowInputs]
    results: ResultRing
    replayer: Replayer
    tokenizer: Tokenizer | None
    timings: Timings
    steps: int = 1  # of one decode replay, at most


def assemble(
    manifest: Manifest,
    weights: Mapping[str, Tensor],
    make_runner: RunnerFactory,
    tokenizer: Tokenizer | None = None,
    timings: Timings | None = None,
    *,
    device: str = "cpu",
    steps: int = 1,
    seat: Seat | None = None,
) -> Loaded:
    """Allocate pools and row buffers on `device`, bind every program's inputs, and make the runner.

    Decode replays take up to `steps` steps. With a `seat` this is one rank of several.
    """
    timings = timings or Timings()
    with timings.phase("pools"):
        pool = StatePool(manifest, device, seat)
        buffers = {
            program.name: allocate_rows(program.rows, program.row_bytes, device)
            for program in manifest.programs
        }
    with timings.phase("bind"):
        inputs = {
            program.name: _bind(program, manifest, weights, pool, buffers[program.name][1], device)
            for program in manifest.programs
        }
        mirrors: dict[str, Mirror] = {}
        rows = {
            program.name: _row_inputs(program, buffers[program.name][0], mirrors if seat else None)
            for program in manifest.programs
        }
    runner = make_runner(manifest, inputs)
    timings.update(getattr(runner, "timings", {}))
    rings = [pool.tensors["results_int"], pool.tensors["results_float"]]
    ints, floats = getattr(runner, "mirrors", rings)
    results = _result_ring(ints, floats, manifest.spec.spec_depth)
    replayer = runner if isinstance(runner, Replayer) else Loop(runner)
    if seat:
        with timings.phase("ranks"):
            seat.meet(pool.tensors)
        replayer = seat.replayer(replayer, mirrors)
    if debug.active():
        replayer = debug.Checked(replayer, debug.address_check(inputs))
    return Loaded(manifest, pool, rows, results, replayer, tokenizer, timings, steps)


def _bind(
    program: ProgramEntry,
    manifest: Manifest,
    weights: Mapping[str, Tensor],
    pool: StatePool,
    rows: Mapping[str, Tensor],
    device: str,
) -> list[Tensor]:
    """The inputs of one program in call order."""
    expected: dict[str, Layout] = {}
    found: dict[str, Tensor] = {}
    layouts: dict[str, tuple[Layout, ...]] = {
        "weights": manifest.recipe,
        "pools": manifest.pools,
        "rows": program.rows,
    }
    for kind, tensors in (("weights", weights), ("pools", pool.tensors), ("rows", rows)):
        expected |= {f"{kind}.{layout.name}": layout for layout in layouts[kind]}
        found |= {f"{kind}.{name}": tensor for name, tensor in tensors.items()}
    for name in program.inputs:
        assert name in expected, f"{program.name}: unknown input {name}"
        assert name in found, f"{program.name}: input {name} was not given"
        _check(f"{program.name}: {name}", found[name], expected[name], device)
    return [found[name] for name in program.inputs]


def _check(name: str, tensor: Tensor, layout: Layout, device: str) -> None:
    assert tensor.dtype == DTYPES[layout.dtype], f"{name} is {tensor.dtype}, not {layout.dtype}"
    shape = tuple(tensor.shape)
    assert shape == layout.shape, f"{name} has shape {shape}, not {layout.shape}"
    assert tensor.is_contiguous(), f"{name} has strides {tensor.stride()}"
    assert tensor.device == torch.device(device), f"{name} is on {tensor.device}, not {device}"
    assert not tensor.requires_grad, f"{name} requires a gradient"
    assert tensor.data_ptr() % INPUT_ALIGNMENT == 0, f"{name} is misaligned"


def _row_inputs(
    program: ProgramEntry, buffer: Tensor, mirrors: dict[str, Mirror] | None
) -> RowInputs:
    """What the host fills: the program's own buffer, or memory that is sent there, which is pinned for a
    GPU. With `mirrors`, to which the program's is added, it is sent to all ranks."""
    upload: Upload
    if buffer.device.type == "cpu":
        if mirrors is None:
            return RowInputs(program, host_view(buffer))
        host = memoryview(bytearray(buffer.nbytes))
        upload = Copy(host, host_view(buffer))
    else:
        from inkling_engine.runtime import capture

        memory = capture.pinned(buffer)
        host, upload = host_view(memory), capture.Upload(memory, buffer)
    if mirrors is not None:
        upload = mirrors[program.name] = Mirror(host, upload)
    return RowInputs(program, host, upload)


def _result_ring(ints: Tensor, floats: Tensor, drafts: int) -> ResultRing:
    lines, rows, width = ints.shape
    views = host_view(ints).cast("i"), host_view(floats).cast("f")
    return ResultRing(*views, (lines, rows, width), drafts)
