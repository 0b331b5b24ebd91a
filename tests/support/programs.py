"""An engine folder's compiled programs as the code of a step, for a `Rig` or a test of its own."""

from __future__ import annotations

from pathlib import Path

from support.rig import Model, Tensors
from torch import Tensor

from inkling_engine.artifacts.layout import weights_file
from inkling_engine.artifacts.manifest import ProgramEntry
from inkling_engine.artifacts.spec import Bucket, EngineSpec
from inkling_engine.artifacts.store import open_manifest
from inkling_engine.compile.backends.aoti import open_program
from inkling_engine.runtime.ops import load_ops
from inkling_engine.runtime.weights import read_weights


class Programs:
    """Every program of an engine folder, called with the eager step's arguments."""

    def __init__(self, folder: Path) -> None:
        """Open all programs; `model` has the engine's spec and weights."""
        manifest = open_manifest(folder)
        load_ops(folder, manifest)
        self.model = Model(manifest.spec, read_weights(folder / weights_file(0), manifest))
        self.entries: dict[Bucket, ProgramEntry] = {p.bucket: p for p in manifest.programs}
        self._runs = {p.bucket: open_program(folder / p.file, "cpu") for p in manifest.programs}

    def inputs(
        self, bucket: Bucket, weights: Tensors, pools: Tensors, rows: Tensors
    ) -> dict[str, Tensor]:
        """The inputs of `bucket`'s program by name, in call order."""
        groups = {"weights": weights, "pools": pools, "rows": rows}
        names = self.entries[bucket].inputs
        return {n: groups[n.partition(".")[0]][n.partition(".")[2]] for n in names}

    def __call__(
        self, spec: EngineSpec, bucket: Bucket, weights: Tensors, pools: Tensors, rows: Tensors
    ) -> Tensor:
        """Run `bucket`'s program; logits [rows, real vocabulary]."""
        assert spec == self.model.spec, "the programs are of another engine"
        (logits,) = self._runs[bucket](list(self.inputs(bucket, weights, pools, rows).values()))
        return logits
