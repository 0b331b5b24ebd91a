"""One step's state at the shapes of a rank: pools full of random state, its rows, its metadata.

The spec is planned by the project's own planner for a model whose layers are copies of one window
and one full layer, so that calls can take turns over pools. The context of every row is mapped and
holds random values; the new tokens are random too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from inkling_engine.artifacts.spec import Bucket, DraftShape, EngineSpec, ModelShape, StepKind
from inkling_engine.compile.driver import Chunk, Machine
from inkling_engine.compile.export import program_inputs
from inkling_engine.compile.options import BuildOptions, make_spec
from inkling_engine.compile.pools import destinations
from inkling_engine.compile.steps import ROW_INPUTS, TABLE_POOLS
from inkling_engine.kernels.step_metadata import StepMeta, step_metadata

NO_DRAFTS = DraftShape(depths=0, local_depths=(), chain_norm=False)


@dataclass
class Setting:
    """`rows` requests of `context` tokens each that process `tokens` more together."""

    shape: ModelShape
    kind: StepKind
    rows: int
    tokens: int
    context: int
    layers: int
    device: str
    spec: EngineSpec = field(init=False)
    bucket: Bucket = field(init=False)
    machine: Machine = field(init=False)
    row_inputs: dict[str, Tensor] = field(init=False)
    meta: StepMeta = field(init=False)

    def __post_init__(self) -> None:
        self.bucket = Bucket(kind=self.kind, rows=self.rows, tokens=self.tokens)
        self.spec = bench_spec(self.shape, self.bucket, self.context, self.layers, self.device)
        self.machine = Machine(self.spec, {}, self.device)
        for name, pool in self.machine.pools.items():
            if name.startswith(("kv_", "conv_")):
                pool.normal_()
        map_pages(self.machine, self.rows)
        inputs = program_inputs(self.spec, self.bucket, ())
        self.row_inputs = self.machine.rows(inputs, self._chunks())
        self.meta = StepMeta(*step_metadata(*self.table_arguments()))

    @property
    def pools(self) -> dict[str, Tensor]:
        """The machine's pools by name."""
        return self.machine.pools

    @property
    def row_state(self) -> tuple[Tensor, ...]:
        """What ops with convolution state take of the rows."""
        meta = self.meta
        return (
            meta.slots,
            meta.sources,
            meta.starts,
            meta.lengths,
            meta.destination_slots,
            meta.destination_offsets,
        )

    def table_arguments(self) -> tuple[Tensor | int, ...]:
        """Arguments of `step_metadata`, its tensors fresh copies."""
        return (
            *(self.pools[name].clone() for name in TABLE_POOLS),
            *(self.row_inputs[name].clone() for name in ROW_INPUTS),
            self.spec.page_size,
            self.spec.snapshot_grid,
            destinations(self.spec, self.bucket),
            0,
        )

    def _chunks(self) -> list[Chunk]:
        count = self.tokens // self.rows
        generator = torch.Generator().manual_seed(self.tokens)
        ids = torch.randint(self.shape.real_vocab, (self.rows, count), generator=generator)
        return [
            Chunk(slot=1 + i, start=self.context, tokens=line, admit=True)
            for i, line in enumerate(ids.tolist())
        ]


def bench_spec(
    shape: ModelShape, bucket: Bucket, context: int, layers: int, device: str
) -> EngineSpec:
    """A bf16 spec of one bucket whose pools have `layers` window and `layers` full layers."""
    shape = msgspec.structs.replace(
        shape, layers=2 * layers, local_layers=tuple(range(layers)), drafts=NO_DRAFTS
    )
    extend = bucket.kind == "extend"
    options = BuildOptions(
        model="bench",
        dtype="bf16",
        max_context=max(64, context + bucket.tokens // bucket.rows),
        max_running=bucket.rows,
        decode_buckets=str(bucket.rows),
        extend_buckets=f"{bucket.tokens}x{bucket.rows}" if extend else "64x1",
    )
    spec = make_spec(options, options.model, shape, device)
    return msgspec.structs.replace(spec, buckets=(bucket,))


def map_pages(machine: Machine, rows: int) -> None:
    """Map all pages of slots 1 to `rows`, where `compile.driver` would map them."""
    for name in ("full_table", "window_table"):
        table = machine.pools[name]
        width = table.shape[1]
        pages = torch.arange(1, rows * width + 1, dtype=torch.int32, device=table.device)
        table[1 : rows + 1] = pages.view(rows, width)
