#!/usr/bin/env python3
"""Decode steps of all ranks of inkling-small, replayed from a graph a GPU, beside their floor.

One process leads all GPUs; each rank's ops are captured while the others are absent, then their exchange
blocks are shown to one another. Random weights with a chosen expert stream (`bench/rank.py`), alike on
all ranks. The floor is a rank's bytes over the copy bandwidth measured in the run, and for each of the
exchanges, two a layer, one of the embedding and one to sample: LAUNCH_US for a captured launch, and what
the others must tell one rank of the sums over NVLINK.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from inkling_engine.artifacts.spec import Bucket, EngineSpec
from inkling_engine.kernels import _op, table

_op.target_cuda()  # before any op module is imported
sys.path.append(str(Path(__file__).resolve().parent))

from bench.rank import SPARE, RankStep, rank_weights, step_floor
from bench.timing import about, capture, measured_ceilings
from bench.work import one_rank

from inkling_engine.compile.models.inkling.shape import first_layers, preset
from inkling_engine.compile.options import BuildOptions, make_spec
from inkling_engine.kernels._exchange import ERROR

LAUNCH_US = 1.3
NVLINK = 450e9  # bytes a second into an H200
BURST, SETTLE = 8, 2


@dataclass(frozen=True)
class Rank:
    """One rank: its step on its device, what replays it, and its stream."""

    step: RankStep
    rows: dict[str, Tensor]
    graph: torch.cuda.CUDAGraph
    device: int
    stream: torch.cuda.Stream

    def replay(self) -> None:
        """Launch one step."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            self.graph.replay()

    def mark(self) -> torch.cuda.Event:
        """An event behind what was launched."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return event


def main() -> int:
    """Measure what is asked for; 0."""
    options = parse()
    facts, ceilings = about() | {"command": " ".join(sys.argv)}, measured_ceilings()
    torch.cuda.empty_cache()
    print(facts, ceilings, sep="\n", flush=True)
    world, records = len(options.devices), []
    spec = spec_of(options, world)
    weights = []
    for device in options.devices:
        with torch.cuda.device(device):
            torch.manual_seed(0)
            weights.append(rank_weights(spec, options.stream))
    for rows in options.batch:
        bucket = Bucket(kind="decode", rows=rows, tokens=rows)
        ranks = [make(spec, bucket, *pair) for pair in zip(weights, options.devices, strict=True)]
        hit = experts_hit(ranks[0], bucket, options.context)
        connect(ranks)
        for rank in ranks:
            with torch.cuda.device(rank.device):
                rank.step.reset(rows, options.context)
        times = sorted(steps(ranks, options.replays))
        require_agreement(ranks, rows)
        shape = first_layers(one_rank(options.model, world), spec.shape.layers)
        read, _ = step_floor(shape, bucket, options.context, hit)
        record = {
            "rows": rows,
            "us": median(times),
            "p10": times[len(times) // 10],
            "p90": times[len(times) * 9 // 10],
            "byte_floor": ceilings.floor_us(read, 0),
            "reduction_floor": reduction_floor(spec, rows),
            "experts_hit": hit,
        }
        record["ratio"] = record["us"] / (record["byte_floor"] + record["reduction_floor"])
        records.append(record)
        print({name: round(value, 2) for name, value in record.items()}, flush=True)
        del ranks
        torch.cuda.empty_cache()
    if options.json:
        report = {"about": facts, "layers": spec.shape.layers, "tp": world, "steps": records}
        options.json.write_text(json.dumps(report, indent=1))
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="inkling-small", help="a preset")
    parser.add_argument("--devices", type=numbers, default=[0, 1], help="a GPU for each rank")
    parser.add_argument("--layers", type=int, default=22, help="keep only the first layers")
    parser.add_argument("--batch", type=numbers, default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--stream", choices=("uniform", "skewed"), default="uniform")
    parser.add_argument("--replays", type=int, default=60)
    parser.add_argument("--json", type=Path, help="write the results here too")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    """Parse `1,8,32`."""
    return [int(part) for part in text.split(",")]


def spec_of(options: argparse.Namespace, world: int) -> EngineSpec:
    """The engine's spec, for the largest batch."""
    whole = preset(options.model)
    assert whole is not None, f"no preset {options.model}"
    build = BuildOptions(
        model=options.model,
        tp=world,
        decode_buckets=str(max(options.batch)),
        extend_buckets="512x1",
        max_context=options.context + SPARE,
    )
    return make_spec(build, options.model, first_layers(whole, options.layers), "cuda")


def make(spec: EngineSpec, bucket: Bucket, weights: dict[str, Tensor], device: int) -> Rank:
    """A rank that thinks the others are absent, its step captured."""
    with torch.cuda.device(device):
        step = RankStep(spec, weights)
        rows = step.rows(bucket)
        step.reset(bucket.rows, 0)
        graph = capture([step.eager(bucket, rows)])
        return Rank(step, rows, graph, device, torch.cuda.Stream())


def experts_hit(rank: Rank, bucket: Bucket, context: int) -> float:
    """Distinct experts of a step, of tokens whose embedding this rank has."""
    shape, state = rank.step.spec.shape, rank.step.pools["request_state"]
    with torch.cuda.device(rank.device), torch.no_grad():
        rank.step.reset(bucket.rows, context)
        state[:, table.LAST_TOKEN] %= shape.vocab // rank.step.spec.tp
        return rank.step.experts_hit(bucket, rank.rows)


def connect(ranks: list[Rank]) -> None:
    """Show all ranks each other's exchange blocks, all of them as before the first step."""
    blocks = [rank.step.pools["exchange"] for rank in ranks]
    for at, rank in enumerate(ranks):
        pools = rank.step.pools
        for other, block in enumerate(blocks):
            pools["peers"][other] = block.data_ptr()
            block[:1].copy_(blocks[at][:1])  # turns on peer access
        pools["rank"][0] = at
    for rank in ranks:
        rank.step.pools["exchange"].zero_()
        rank.step.pools["step_counter"].zero_()
    for rank in ranks:
        torch.cuda.synchronize(rank.device)


def steps(ranks: list[Rank], count: int) -> list[float]:
    """Microseconds of a step, the slowest rank's, from bursts of `BURST` in a row."""
    times = []
    for burst in range(SETTLE + max(3, count // BURST)):
        before = [rank.mark() for rank in ranks]
        for _ in range(BURST):
            for rank in ranks:
                rank.replay()
        after = [rank.mark() for rank in ranks]
        for event in after:
            event.synchronize()
        taken = [a.elapsed_time(b) for a, b in zip(before, after, strict=True)]
        if burst >= SETTLE:
            times.append(1e3 * max(taken) / BURST)
    return times


def require_agreement(ranks: list[Rank], rows: int) -> None:
    """Assert that no rank waited in vain, all rows went on, and all ranks have the same requests."""
    states = [rank.step.pools["request_state"][1 : rows + 1].cpu() for rank in ranks]
    errors = [int(rank.step.pools["exchange"][ERROR]) for rank in ranks]
    assert not any(errors), f"error words {errors}"
    assert not bool(states[0][:, table.FINISH].any()), "rows finished while measured"
    assert all(torch.equal(state, states[0]) for state in states), "ranks differ"


def reduction_floor(spec: EngineSpec, rows: int) -> float:
    """Microseconds of a decode step's exchanges: launches, and the others' parts of the sums."""
    shape, others = spec.shape, spec.tp - 1
    sums = 1 + 2 * shape.layers
    told = others * rows * sums * shape.hidden * 2
    return (sums + 1) * LAUNCH_US + told / NVLINK * 1e6


if __name__ == "__main__":
    sys.exit(main())
