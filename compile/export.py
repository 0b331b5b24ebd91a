"""torch.export of one bucket's step with fake parameters: no weight and no pool is in memory.

The exported program takes three flat lists (weights, pools, rows) in manifest order. It must be a
pure sequence of our ops: any other tensor operation, number among the inputs or folded constant is
a broken invariant, since it could copy a pool or freeze a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from inkling_engine.artifacts.manifest import RowEntry, TensorEntry
from inkling_engine.artifacts.spec import Bucket, EngineSpec
from inkling_engine.compile.pools import pool_entries, row_entries
from inkling_engine.compile.steps import step
from inkling_engine.kernels._op import NAMESPACE
from inkling_engine.kernels.state import DTYPES, Layout


@dataclass(frozen=True)
class Inputs:
    """A program's inputs in call order, by group."""

    weights: tuple[TensorEntry, ...]
    pools: tuple[TensorEntry, ...]
    rows: tuple[RowEntry, ...]
    row_bytes: int

    @property
    def names(self) -> tuple[str, ...]:
        """Input names as the manifest lists them."""
        groups = (("weights", self.weights), ("pools", self.pools), ("rows", self.rows))
        return tuple(f"{group}.{entry.name}" for group, entries in groups for entry in entries)


def program_inputs(spec: EngineSpec, bucket: Bucket, weights: Sequence[TensorEntry]) -> Inputs:
    """Inputs of `bucket`'s program; `weights` are the tensors that the step reads."""
    rows, row_bytes = row_entries(spec, bucket)
    return Inputs(tuple(weights), pool_entries(spec), rows, row_bytes)


class StepModule(torch.nn.Module):
    """The step of one bucket over flat input lists; holds names only, no tensor."""

    def __init__(self, spec: EngineSpec, bucket: Bucket, inputs: Inputs) -> None:
        super().__init__()
        self.spec, self.bucket, self.inputs = spec, bucket, inputs

    def forward(self, weights: list[Tensor], pools: list[Tensor], rows: list[Tensor]) -> Tensor:
        """Name the inputs and run the step."""
        return step(
            self.spec,
            self.bucket,
            _named(self.inputs.weights, weights),
            _named(self.inputs.pools, pools),
            _named(self.inputs.rows, rows),
        )


def _named(entries: Sequence[Layout], tensors: list[Tensor]) -> dict[str, Tensor]:
    return {entry.name: tensor for entry, tensor in zip(entries, tensors, strict=True)}


def export_step(
    spec: EngineSpec, bucket: Bucket, inputs: Inputs
) -> tuple[torch.export.ExportedProgram, tuple[str, ...]]:
    """Export `bucket`; returns the program and its ops in order, attributes included."""
    with FakeTensorMode(), torch.no_grad():
        arguments = tuple(
            [_fake(entry, spec.device) for entry in entries]
            for entries in (inputs.weights, inputs.pools, inputs.rows)
        )
        module = StepModule(spec, bucket, inputs)
        program = torch.export.export(module, arguments, strict=False)
    return program, _op_list(program)


def _fake(entry: Layout, device: str) -> Tensor:
    return torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=device)


def _op_list(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """Every op with its numeric attributes, checked to be ours alone."""
    signature = program.graph_signature
    assert not (signature.parameters or signature.buffers or signature.lifted_tensor_constants), (
        f"constants in the exported step: {signature}"
    )
    listed = []
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target.__name__ == "getitem":
            continue
        assert node.target.namespace == NAMESPACE, f"not an op of ours: {node.target}"
        schema = node.target._schema.arguments
        pairs = zip(schema, node.args, strict=True)
        numbers = [f"{a.name}={value}" for a, value in pairs if isinstance(value, int | float)]
        listed.append(
            f"{node.target._schema.name.removeprefix(NAMESPACE + '::')}({', '.join(numbers)})"
        )
    return tuple(listed)
