"""Rounds of drafting on one rank: their floor, how busy they keep the GPU, and the same kernels as two
graphs with a host visit between.

Acceptance is forced, since drafts of random weights are never right. What the two-graph form costs
is what engines pay that launch drafting after the host has read what was accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from bench.rank import RankStep, step_floor
from bench.timing import capture, device_events, idle_before
from torch import Tensor

from inkling_engine.artifacts.spec import Bucket, EngineSpec
from inkling_engine.compile.models.inkling.calls import Calls
from inkling_engine.compile.pools import draft_rows
from inkling_engine.compile.steps import draft_phase, target_phase
from inkling_engine.kernels.step_metadata import StepMeta

BUSY_REPLAYS, BLOCKS, ROUNDS = 10, 5, 12


def round_floor(
    spec: EngineSpec, bucket: Bucket, context: int, hit: float, item: int = 2
) -> tuple[float, float]:
    """(bytes, floating-point operations) of a round: the verify step's, and for each depth its
    weights, its keys and values and the head's rows of the draft vocabulary, once."""
    shape, rows = spec.shape, bucket.rows
    read, work = step_floor(shape, bucket, context, hit, item)
    phase = draft_rows(spec, bucket)
    for depth in range(spec.spec_depth):
        kind = shape.draft_kind(depth)
        keys = min(context, kind.window) if kind.window else context
        width = (2 * kind.heads + 2 * kind.kv_heads) * kind.head_dim + kind.heads * shape.rel_dim
        matrix = shape.hidden * (width + 2 * shape.hidden + 3 * shape.dense_width)
        head = spec.draft_vocab * shape.hidden
        read += item * (matrix + head + 2 * rows * keys * kind.kv_heads * kind.head_dim)
        work += 2.0 * (phase * matrix + rows * head)
    return read, work


def busy_share(graph: torch.cuda.CUDAGraph) -> float:
    """Share of the time of some replays in a row in which a kernel runs."""
    gaps, span = idle_before(device_events(graph.replay, BUSY_REPLAYS))
    return 1 - sum(gaps) / span


def two_graphs(machine: RankStep, bucket: Bucket, rows: dict[str, Tensor]) -> Callable[[], None]:
    """A round as a verify graph, a host visit that reads what was accepted, and a draft graph."""
    spec, weights, pools = machine.spec, machine.weights, machine.pools
    made: list[tuple[StepMeta, Tensor, Tensor]] = []

    def verify() -> None:
        made[:] = [target_phase(spec, bucket, weights, pools, rows, Calls(spec))]

    def draft() -> None:
        meta, hidden, _ = made[0]
        draft_phase(spec, bucket, weights, pools, meta, hidden, Calls(spec))

    first, second = capture([verify]), capture([draft])
    results = pools["results_int"][0]
    mirror = torch.empty_like(results, device="cpu").pin_memory()

    def run() -> None:
        first.replay()
        mirror.copy_(results, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        second.replay()

    return run


def side_by_side(
    machine: RankStep,
    bucket: Bucket,
    rows: dict[str, Tensor],
    graph: torch.cuda.CUDAGraph,
    context: int,
) -> dict[str, float]:
    """Microseconds of a round in one replay and in two graphs, medians of blocks taken by turns."""
    sides = {"one replay": graph.replay, "two graphs": two_graphs(machine, bucket, rows)}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(BLOCKS):
        for name, side in sides.items():
            machine.reset(bucket.rows, context)
            side()
            torch.cuda.synchronize()
            start = perf_counter()
            for _ in range(ROUNDS):
                side()
            torch.cuda.synchronize()
            times[name].append((perf_counter() - start) * 1e6 / ROUNDS)
    return {name: median(found) for name, found in times.items()}
