"""The boundary over two or more GPUs against an all-reduce with two kernels behind it.

Every rank is a process with a GPU. For each number of rows: our boundary is compared with the fp32
reference, to the bit where rounding allows, and between ranks; then sides take turns as captured graphs:
ours, NCCL's all-reduce, and torch's one-shot and two-shot all-reduce over symmetric memory, the last
three followed by a convolution kernel and a fused residual-norm kernel (`bench/chain.py`). Peers' graphs
are replayed as they were captured; NCCL's chain also with our overlapped launches, and so are the two
kernels alone. What is stated is the slowest rank's median time of one call, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from bench.chain import conv_residual_norm
from bench.links import Link, start
from bench.timing import Call, about, capture, elapsed
from torch import Tensor

from inkling_engine.kernels._case_rows import Row, Step
from inkling_engine.kernels._exchange import LIMIT, exchange_words
from inkling_engine.kernels.boundary import reference
from inkling_engine.kernels.boundary.triton_kernel import boundary

WIDTH, EPS, DECODE = 4096, 1e-6, 128
CALLS = 24  # of a step; even, and so is what a replay makes, so that no slot follows itself
PLAIN = ("NCCL", "one-shot", "two-shot")  # captured as anyone's graph is
Sides = Mapping[str, Sequence[Call]]


class Inputs:
    """`calls` boundaries of `rows` tokens: a row each, or above DECODE one row of all."""

    def __init__(self, rows: int, calls: int, link: Link) -> None:
        each = tuple(Row(1 + i, 9 + i) for i in range(rows))
        self.step = Step(each if rows <= DECODE else (Row(1, 9, rows),), bucket_tokens=rows)
        torch.manual_seed(1 + link.rank)
        self.x = [torch.randn(rows, WIDTH, device="cuda").bfloat16() for _ in range(calls)]
        torch.manual_seed(0)
        self.residual = [torch.randn(rows, WIDTH, device="cuda").bfloat16() for _ in range(calls)]
        self.taps = [torch.randn(WIDTH, 4, device="cuda") / 2 for _ in range(calls)]
        self.gain = [(1 + torch.randn(WIDTH, device="cuda") / 9).bfloat16() for _ in range(calls)]
        slots = 1 + len(self.step.rows)
        self.pool = self.step.rings(calls, slots, WIDTH, torch.bfloat16).cuda()
        step = self.step
        rows_of = step.token_rows, step.slots, step.sources, step.starts, step.lengths
        self.rows = [tensor.cuda() for tensor in (*rows_of, *step.destinations)]

    def ours(self, ranks: tuple[Tensor, ...], world: int) -> list[Call]:
        """Our boundaries, and the step's end."""
        made: list[Call] = []
        for i, x in enumerate(self.x):
            arguments: list[Any] = [x, self.residual[i], self.taps[i], self.gain[i], self.pool]
            arguments += [*self.rows, *ranks, i, i, CALLS, EPS, world]
            made.append(partial(boundary, *arguments))
        return [*made, partial(ranks[2][:1].add_, 1)]

    def chain(self, x: Tensor, i: int) -> tuple[Tensor, Tensor]:
        """The two kernels of call `i` on the summed `x`."""
        _, slots, _, starts, lengths, *_ = self.rows
        return conv_residual_norm(
            x,
            self.residual[i],
            self.taps[i],
            self.gain[i],
            self.pool[i],
            starts,
            slots,
            lengths,
            EPS,
        )

    def reference(self, parts: Sequence[Tensor], i: int) -> tuple[Tensor, Tensor]:
        """What call `i` must give for the ranks' `parts` of x, from the rings as they are."""
        total = torch.zeros_like(parts[0], dtype=torch.float32)
        for part in parts:
            total += part.float()
        mine = self.residual[i], self.taps[i], self.gain[i], self.pool, *self.rows
        none = (torch.zeros(1),) * 4  # of one rank nothing is read
        arguments: list[Any] = [total.to(parts[0].dtype), *(t.cpu() for t in mine), *none]
        return reference.boundary(*[*arguments, i, 0, 1, EPS, 1])


def check(link: Link, inputs: Inputs, ranks: tuple[Tensor, ...]) -> str:
    """Compare one step of boundaries with the reference and between ranks."""
    calls = inputs.ours(ranks, link.world)
    off, worst, equal = 0, 0.0, True
    for i, call in enumerate(calls[:-1]):
        if i in (0, 1):
            wanted = inputs.reference(link.all(inputs.x[i].cpu()), i)
        found = call()
        torch.cuda.synchronize()
        if i in (0, 1):
            for one, other in zip(found, wanted, strict=True):
                one = one.cpu()
                worst = max(worst, float((one.float() - other.float()).abs().max()))
                off += int((one != other).sum())
            others = link.all([one.cpu() for one in found])
            equal &= all(
                torch.equal(a, b) for other in others for a, b in zip(other, others[0], strict=True)
            )
    calls[-1]()
    error = int(ranks[1][0])
    return f"ranks equal: {equal}, {off} elements differ from the reference, by {worst:.3g}; error {error}"


def sides_of(link: Link, inputs: Inputs, ranks: tuple[Tensor, ...]) -> tuple[Sides, Any]:
    """The calls of each side, and what puts their inputs back."""
    group = link.group.group_name
    mine = [x.clone() for x in inputs.x]
    theirs = [link.symmetric(*x.shape, dtype=x.dtype)[0] for x in inputs.x]

    def nccl(i: int) -> object:
        dist.all_reduce(mine[i])
        return inputs.chain(mine[i], i)

    def one_shot(i: int) -> object:
        return inputs.chain(torch.ops.symm_mem.one_shot_all_reduce(theirs[i], "sum", group), i)

    def two_shot(i: int) -> object:
        return inputs.chain(torch.ops.symm_mem.two_shot_all_reduce_(theirs[i], "sum", group), i)

    def back() -> None:
        for i, x in enumerate(inputs.x):
            mine[i].copy_(x)
            theirs[i].copy_(x)

    calls = range(len(inputs.x))
    sides: Sides = {
        "ours": inputs.ours(ranks, link.world),
        "NCCL": [partial(nccl, i) for i in calls],
        "one-shot": [partial(one_shot, i) for i in calls],
        "two-shot": [partial(two_shot, i) for i in calls],
        "NCCL overlapped": [partial(nccl, i) for i in calls],
        "kernels overlapped": [partial(inputs.chain, inputs.x[i], i) for i in calls],
    }
    return sides, back


def measure(link: Link, sides: Sides, back: Any, blocks: int, calls: int) -> dict[str, float]:
    """Microseconds of one call of each side: medians over blocks of the slowest rank."""
    graphs = {}
    for name, side in sides.items():
        back()
        link.barrier()
        graphs[name] = capture(side, overlap=name not in PLAIN)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(blocks):
        for name, graph in graphs.items():
            back()
            graph.replay()
            link.barrier()
            times[name].append(elapsed(graph.replay, 40) / calls)
    found = {name: median(found) for name, found in times.items()}
    every = link.all(found)
    return {name: max(one[name] for one in every) for name in found}


def work(link: Link, options: argparse.Namespace) -> None:
    """One rank's part."""
    most = max(options.rows)
    ranks = link.exchange(exchange_words(2 * most * WIDTH, link.world))
    ranks[1][LIMIT] = 60_000  # ms: ranks compile at their own speed
    records = []
    for rows in options.rows:
        calls = CALLS if rows <= DECODE else 4
        inputs = Inputs(rows, calls, link)
        said = check(link, inputs, ranks)
        sides, back = sides_of(link, inputs, ranks)
        times = measure(link, sides, back, options.blocks, calls)
        error = int(ranks[1][0])
        records.append({"rows": rows, "us": times, "check": said, "error": error})
        if link.rank == 0:
            print(f"rows {rows:4}: {said}", flush=True)
            print(
                "  "
                + ", ".join(f"{n} {t:.2f} us ({t / times['ours']:.2f})" for n, t in times.items())
            )
    if link.rank == 0 and options.json:
        report = {**about(), "world": link.world, "cases": records}
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rows", type=lambda text: tuple(map(int, text.split(","))), default=(1, 8, 32, 128, 4096)
    )
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--json", help="file for all numbers")
    options = parser.parse_args()
    start(options.world, work, options)


if __name__ == "__main__":
    main()
