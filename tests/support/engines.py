"""Engines over the real step without AOTInductor: the runtime as it is, any code for the step.

`Exported` is the step as torch.export sees it, the very graph that a build lowers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from support.rig import Model, StepCode, Tensors
from torch import Tensor

from inkling_engine.artifacts.compat import Environment
from inkling_engine.artifacts.layout import program_file, program_name
from inkling_engine.artifacts.manifest import SCHEMA_VERSION, Manifest, ProgramEntry
from inkling_engine.artifacts.spec import Bucket, EngineSpec
from inkling_engine.compile.export import Inputs, export_step, program_inputs
from inkling_engine.compile.models.inkling.names import recipes
from inkling_engine.compile.pools import pool_entries
from inkling_engine.compile.weights import step_weights
from inkling_engine.kernels.state import allocate
from inkling_engine.runtime.binding import assemble
from inkling_engine.runtime.engine import Engine


class Exported:
    """The exported step, one export a bucket, made when it is first needed."""

    def __init__(self) -> None:
        """Nothing is exported yet."""
        self._modules: dict[Bucket, tuple[Inputs, torch.nn.Module]] = {}

    def __call__(
        self, spec: EngineSpec, bucket: Bucket, weights: Tensors, pools: Tensors, rows: Tensors
    ) -> Tensor:
        """Run `bucket`; logits [rows, real vocabulary]."""
        if bucket not in self._modules:
            inputs = program_inputs(spec, bucket, step_weights(spec))
            self._modules[bucket] = inputs, export_step(spec, bucket, inputs)[0].module()
        inputs, module = self._modules[bucket]
        groups = ((inputs.weights, weights), (inputs.pools, pools), (inputs.rows, rows))
        with torch.no_grad():
            logits: Tensor = module(*([values[e.name] for e in names] for names, values in groups))
        return logits


class StepRunner:
    """Runs a bucket's step over bound inputs; `logits` [R, V] are the last step's."""

    def __init__(self, run: StepCode) -> None:
        """Inputs are bound later."""
        self._run, self.logits = run, torch.empty(0)

    def bind(self, manifest: Manifest, inputs: Mapping[str, list[Tensor]]) -> StepRunner:
        """The runner factory that the runtime asks."""
        self._spec = manifest.spec
        self._bound: dict[str, tuple[Bucket, dict[str, dict[str, Tensor]]]] = {}
        for program in manifest.programs:
            groups: dict[str, dict[str, Tensor]] = {"weights": {}, "pools": {}, "rows": {}}
            for name, tensor in zip(program.inputs, inputs[program.name], strict=True):
                group, _, leaf = name.partition(".")
                groups[group][leaf] = tensor
            self._bound[program.name] = program.bucket, groups
        return self

    def run(self, name: str) -> None:
        """Run program `name` once."""
        bucket, groups = self._bound[name]
        self.logits = self._run(
            self._spec, bucket, groups["weights"], groups["pools"], groups["rows"]
        )


def open_engine(
    model: Model, run: StepCode, *, prefix_cache: bool = True
) -> tuple[Engine, StepRunner]:
    """An engine of `model` whose steps `run` runs."""
    runner = StepRunner(run)
    weights = {e.name: allocate(e).copy_(model.weights[e.name]) for e in step_weights(model.spec)}
    loaded = assemble(manifest_of(model.spec), weights, runner.bind)
    return Engine(loaded, prefix_cache=prefix_cache), runner


def manifest_of(spec: EngineSpec) -> Manifest:
    """What a build would write of `spec`, without files."""
    programs = []
    for bucket in spec.buckets:
        inputs = program_inputs(spec, bucket, step_weights(spec))
        entry = ProgramEntry(
            name=program_name(bucket),
            bucket=bucket,
            file=program_file(bucket),
            inputs=inputs.names,
            rows=inputs.rows,
            row_bytes=inputs.row_bytes,
            outputs=(),
            ops=(),
            proof="none",
        )
        programs.append(entry)
    return Manifest(
        schema_version=SCHEMA_VERSION,
        engine_id="eager",
        created="2026-01-01T00:00:00Z",
        spec=spec,
        environment=Environment.current().for_build(built_with_gpu=False),
        op_schemas=(),
        kernel_library="",
        programs=tuple(programs),
        pools=pool_entries(spec),
        recipe=recipes(spec.shape, spec.dtype, "original", spec.tp, 0),
        weights=(),
        source="",
    )
