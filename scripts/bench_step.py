#!/usr/bin/env python3
"""Whole steps of one rank of inkling-small, replayed from a CUDA graph, beside their floors.

The floor of a step is the larger of bytes over the copy bandwidth and operations over the bf16
product rate, both measured in the same run. `--ops` captures the ops called one by one instead of
a compiled program: the same kernels, without the compile time. Medians over bursts of replays of a
decode step, and over single replays of an extend step. Prints a table, the most expensive kernels
of each step, and JSON on request. With `--drafts` rounds of drafting take the place of decode steps,
3 and 4 drafts accepted by turns: then also how busy a replay keeps the GPU, and the same kernels as
two graphs with a host visit between.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from inkling_engine.artifacts.spec import Bucket, StepKind
from inkling_engine.kernels import _op, table

_op.target_cuda()  # before any op module is imported
sys.path.append(str(Path(__file__).resolve().parent))

from bench.rank import SPARE, RankStep, rank_spec, rank_weights, step_floor
from bench.rounds import busy_share, round_floor, side_by_side
from bench.timing import Ceilings, about, capture, device_events, measured_ceilings

from inkling_engine.compile.backends.aoti import compile_program, open_program
from inkling_engine.compile.export import export_step
from inkling_engine.compile.program import workspace

TOP = 10
BURST = 8  # decode replays in a row, as in steady decoding; extends start from a reset state


@dataclass(frozen=True)
class Measured:
    """One step: microseconds, floors in microseconds, and what its replay launches."""

    kind: str
    rows: int
    tokens: int
    context: int
    experts_hit: float
    time: float
    spread: float
    byte_floor: float
    arithmetic_floor: float
    nodes: int
    top: list[tuple[str, int, float]]
    rounds: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Time over the floor."""
        return self.time / max(self.byte_floor, self.arithmetic_floor)


def main() -> int:
    """Measure what is asked for; 0."""
    options = parse()
    facts, ceilings = about() | {"command": " ".join(sys.argv)}, measured_ceilings()
    torch.cuda.empty_cache()
    print(facts, ceilings, sep="\n", flush=True)
    rows, contexts, chunks = options.batch, options.context, options.extend
    spec = rank_spec(
        options.model,
        options.tp,
        max(rows, default=1),
        max(contexts, default=0),
        max(chunks, default=512),
        options.layers,
        options.drafts,
    )
    machine = RankStep(spec, rank_weights(spec, options.stream))
    taken = torch.cuda.memory_allocated() / 1e9
    print(f"{spec.shape.layers} layers, {options.stream} experts, {taken:.1f} GB", flush=True)
    drafts = options.drafts
    kind: StepKind = "verify" if drafts else "decode"
    buckets = [
        (Bucket(kind=kind, rows=n, tokens=n * (1 + drafts), drafts=drafts), contexts) for n in rows
    ]
    buckets += [(Bucket(kind="extend", rows=1, tokens=n), [0]) for n in chunks]
    measured = []
    for bucket, lengths in buckets:
        inputs = machine.rows(bucket)
        machine.reset(bucket.rows, lengths[0])
        run = make_run(options, machine, bucket, inputs)
        graph = capture([run])
        for length in lengths:
            result = measure(options, machine, bucket, inputs, graph, length, ceilings)
            measured.append(result)
            show(result)
            if bucket.drafts:
                result.rounds.update(side_by_side(machine, bucket, inputs, graph, length))
                result.rounds["busy"] = busy_share(graph)
                print(f"  round: {result.rounds}", flush=True)
        del graph, run
    if options.json:
        report = [asdict(m) | {"ratio": m.ratio} for m in measured]
        whole = {
            "about": facts,
            "ceilings": asdict(ceilings),
            "stream": options.stream,
            "steps": report,
        }
        options.json.write_text(json.dumps(whole, indent=1))
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="inkling-small", help="a preset")
    parser.add_argument("--tp", type=int, default=8, help="ranks; one of them is measured")
    parser.add_argument("--layers", type=int, help="keep only the first layers")
    parser.add_argument("--batch", type=numbers, default=[1, 8, 32, 128])
    parser.add_argument("--context", type=numbers, default=[1024, 8192, 65536])
    parser.add_argument("--extend", type=numbers, default=[512, 2048, 4096])
    parser.add_argument("--stream", choices=("uniform", "skewed"), default="uniform")
    parser.add_argument("--drafts", type=int, default=0, help="drafts of a round")
    parser.add_argument("--ops", action="store_true", help="capture ops, compile nothing")
    parser.add_argument("--replays", type=int, default=60)
    parser.add_argument("--json", type=Path, help="write the results here too")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    """Parse `1,8,32`; empty for none."""
    return [int(part) for part in text.split(",") if part]


def event_times(
    run: Callable[[], object], count: int, before: Callable[[], object], burst: int
) -> list[float]:
    """Microseconds of a call, `count` times from bursts of calls in a row, after two not counted."""
    times = []
    for _ in range(count + 2):
        before()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(burst):
            run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / burst)
    return times[2:]


def make_run(
    options: argparse.Namespace, machine: RankStep, bucket: Bucket, rows: dict[str, Tensor]
) -> Callable[[], object]:
    """What runs the step: the ops, or a program compiled from them."""
    if options.ops:
        return machine.eager(bucket, rows)
    program, _ = export_step(machine.spec, bucket, machine.inputs(bucket))
    with tempfile.TemporaryDirectory() as scratch:
        package = Path(scratch) / "step.pt2"
        compile_program(program, machine.spec, package, workspace(machine.spec, bucket))
        loaded = open_program(package, "cuda")
    arguments = machine.arguments(bucket, rows)
    return lambda: loaded(arguments)


def measure(
    options: argparse.Namespace,
    machine: RankStep,
    bucket: Bucket,
    rows: dict[str, Tensor],
    graph: torch.cuda.CUDAGraph,
    context: int,
    ceilings: Ceilings,
) -> Measured:
    """Time replays of `graph` with `context` tokens behind every row."""
    decode = bucket.kind != "extend"
    most = (options.replays + 16) * (5 if bucket.drafts else 1)
    assert not decode or most < SPARE, "replays overrun the pages"
    machine.reset(bucket.rows, context)
    with torch.no_grad():
        hit = machine.experts_hit(bucket, rows)
    machine.reset(bucket.rows, context)

    def before() -> None:
        if not decode:
            machine.reset(bucket.rows, context)

    burst = BURST if decode else 1
    times = event_times(graph.replay, max(3, options.replays // burst), before, burst)
    before()
    launched = kernels(graph)
    if bucket.drafts:
        read, work = round_floor(machine.spec, bucket, context, hit)
    else:
        read, work = step_floor(machine.spec.shape, bucket, context, hit)
    ordered = sorted(times)
    check_finished(machine, bucket)
    return Measured(
        kind=bucket.kind,
        rows=bucket.rows,
        tokens=bucket.tokens,
        context=context,
        experts_hit=hit,
        time=median(times),
        spread=ordered[int(len(ordered) * 0.9)] - ordered[int(len(ordered) * 0.1)],
        byte_floor=ceilings.floor_us(read, 0),
        arithmetic_floor=ceilings.floor_us(0, work),
        nodes=sum(count for _, count, _ in launched),
        top=launched[:TOP],
    )


def check_finished(machine: RankStep, bucket: Bucket) -> None:
    """Assert that every row was still live: a finished row would have done no work."""
    finished = machine.pools["request_state"][1 : bucket.rows + 1, table.FINISH].tolist()
    assert not any(finished), f"rows finished while measured: {finished}"


def kernels(graph: torch.cuda.CUDAGraph) -> list[tuple[str, int, float]]:
    """(name, count, microseconds) of what one replay launches, the most expensive first."""
    counts: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for event in device_events(graph.replay):
        counts[event.name] += 1
        times[event.name] += event.device_time
    return [(name, counts[name], round(time, 1)) for name, time in times.most_common()]


def show(m: Measured) -> None:
    """Print one step."""
    floor = max(m.byte_floor, m.arithmetic_floor)
    kind = "arithmetic" if m.arithmetic_floor > m.byte_floor else "bytes"
    print(
        f"\n{m.kind} rows {m.rows} tokens {m.tokens} context {m.context}: {m.time:.0f} us"
        f" (spread {m.spread:.0f}), floor {floor:.0f} us ({kind}), ratio {m.ratio:.2f},"
        f" {m.nodes} nodes, {m.experts_hit:.1f} experts hit"
    )
    total = math.fsum(time for _, _, time in m.top)
    for name, count, time in m.top:
        print(f"  {time:9.1f} us {count:4d} x {time / count:7.1f}  {name[:90]}")
    print(f"  {total:9.1f} us in these", flush=True)


if __name__ == "__main__":
    sys.exit(main())
