"""All ranks of a model in one process: a machine each, whose exchanges know one another.

A step runs in as many threads as there are ranks: a collective waits for the others, and no rank can
go on alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from inkling_engine.artifacts.spec import Bucket, EngineSpec
from inkling_engine.compile.convert import write_weights
from inkling_engine.compile.driver import Chunk, Machine
from inkling_engine.compile.export import program_inputs
from inkling_engine.compile.models.inkling.names import recipes
from inkling_engine.compile.options import BuildOptions
from inkling_engine.compile.plan import make_plan
from inkling_engine.kernels._op import use_references
from inkling_engine.runtime.weights import draw_weight

OWN = ("kv_", "conv_kv_", "rank", "peers", "exchange")  # pools in which the ranks differ


@dataclass(frozen=True)
class Ranks:
    """The machines of all ranks, the first is rank 0; `native` chooses the kernels."""

    machines: Sequence[Machine]
    native: bool

    def __post_init__(self) -> None:
        """Tell every machine its rank and where the exchanges are."""
        addresses = [machine.pools["exchange"].data_ptr() for machine in self.machines]
        for rank, machine in enumerate(self.machines):
            machine.pools["rank"][0] = rank
            machine.pools["peers"][: len(addresses)] = torch.tensor(addresses)

    @property
    def spec(self) -> EngineSpec:
        """The spec that all share."""
        return self.machines[0].spec

    def step(self, bucket: Bucket, chunks: Sequence[Chunk]) -> list[Tensor]:
        """One step of every rank; each one's columns of the logits."""
        inputs = program_inputs(self.spec, bucket, ())
        return self.run(bucket, [machine.rows(inputs, chunks) for machine in self.machines])

    def run(self, bucket: Bucket, rows: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """One step of every rank over row inputs of its own; each one's logits."""
        with nullcontext() if self.native else use_references():  # noqa: SIM117
            with ThreadPoolExecutor(len(rows)) as pool:
                begun = [
                    pool.submit(machine.native, bucket, own)
                    for machine, own in zip(self.machines, rows, strict=True)
                ]
                return [run.result() for run in begun]

    def replicated(self) -> Iterator[tuple[str, list[Tensor]]]:
        """The pools that must be the same bits on all ranks, with each one's contents."""
        for name in self.machines[0].pools:
            if not name.startswith(OWN):
                yield name, [machine.pools[name] for machine in self.machines]


def convert(
    folder: Path, scratch: Path, tp: int, *, native: bool, drawn: int | None = None, **options: Any
) -> Ranks:
    """The ranks with the weights of the checkpoint in `folder`, converted by the build's own code, or
    with weights of the seed `drawn`."""
    given: dict[str, Any] = {"device": "cpu", "max_running": 3, "decode_buckets": "3"}
    given |= {"page_size": 8, "snapshot_grid": 16, "extend_buckets": "64x3"} | options
    plan = make_plan(BuildOptions(model=str(folder), tp=tp, **given))
    assert plan.checkpoint is not None
    spec, machines = plan.spec, []
    for rank in plan.ranks:
        path, layout = scratch / f"{tp}-{rank}.safetensors", plan.checkpoint.layout
        if drawn is None:
            recipe = recipes(spec.shape, spec.dtype, layout, tp, rank)
            write_weights(plan.checkpoint, recipe, path)
            machines.append(Machine(spec, load_file(path)))
        else:
            first = recipes(spec.shape, spec.dtype, layout, tp)
            weights = {one.name: draw_weight(one, drawn, "cpu", rank, tp) for one in first}
            machines.append(Machine(spec, weights))
    return Ranks(machines, native)


class AllRanks:
    """The code of a step for an engine's rank 0: the other ranks take it beside, over pools of their own.

    After each step all that is not of one rank must be the same bits on all.
    """

    def __init__(self, ranks: Ranks) -> None:
        """Weights of every rank but the first, which the engine has, are those of `ranks`."""
        self._weights = [machine.weights for machine in ranks.machines[1:]]
        self._ranks: Ranks | None = None

    def __call__(
        self,
        spec: EngineSpec,
        bucket: Bucket,
        weights: Mapping[str, Tensor],
        pools: Mapping[str, Tensor],
        rows: Mapping[str, Tensor],
    ) -> Tensor:
        """Run `bucket` on all ranks; logits [rows, rank 0's columns]."""
        if self._ranks is None:
            own = Machine(spec, weights)
            own.pools = dict(pools)
            self._ranks = Ranks([own, *(Machine(spec, w) for w in self._weights)], True)
        others = [{name: row.clone() for name, row in rows.items()} for _ in self._weights]
        logits = self._ranks.run(bucket, [rows, *others])
        for name, copies in self._ranks.replicated():
            assert all(torch.equal(copy, copies[0]) for copy in copies), name
        return logits[0]
