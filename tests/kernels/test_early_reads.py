"""What a kernel reads before it waits has been written: the launches of a decode step of one row.

A launch begins when the one before it lets it: behind its wait, or at once if it is hasty. So behind a
launch that is not hasty all but that one has ended, and behind hasty ones that many launches less.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from inkling_engine.artifacts.spec import Bucket
from inkling_engine.compile.export import program_inputs
from inkling_engine.compile.models.inkling.shape import preset
from inkling_engine.compile.options import BuildOptions, make_spec
from inkling_engine.compile.pools import pool_entries
from inkling_engine.compile.steps import step
from inkling_engine.compile.weights import step_weights
from inkling_engine.kernels import _triton
from inkling_engine.kernels._op import Op
from inkling_engine.kernels.state import DTYPES, Layout

pytest.importorskip("triton", reason="needs Triton")

ROWS = {"slots", "sources", "starts", "lengths", "destination_slots"}
EARLY = {  # by kernel: what it reads before it waits, weights and what earlier steps wrote left out
    "boundary_kernel": ROWS | {"residual"},
    "ranks_boundary_kernel": ROWS | {"residual"},
    "decode_kernel": ROWS | {"locations"},
    "up_kernel": {"y", "starts"},
    "down_kernel": {"logits", "starts"},
}


class Launch(NamedTuple):
    """A kernel and its arguments by name."""

    kernel: Any
    values: dict[str, Any]

    @property
    def hasty(self) -> bool:
        """Whether it lets the next launch begin before its own wait."""
        always = "begin_next()" in self.kernel.src
        return always and self.values.get("HASTY", True)


def launched(monkeypatch: pytest.MonkeyPatch, world: int) -> list[Launch]:
    """All launches of a decode step of one row, one of `world` ranks."""
    noted: list[Launch] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return self._note

        def _note(self, *arguments: Any, **named: Any) -> None:
            values = dict(zip(self.kernel.arg_names, arguments, strict=False)) | named
            noted.append(Launch(self.kernel, values))

    def empty(entry: Layout) -> Tensor:
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")

    shape = preset("inkling-small")
    assert shape is not None
    options = BuildOptions(model="inkling-small", decode_buckets="1", max_context=2048, tp=world)
    spec = make_spec(options, "inkling-small", shape, "cuda")
    bucket = Bucket(kind="decode", rows=1, tokens=1)
    weights = {entry.name: empty(entry) for entry in step_weights(spec)}
    pools = {entry.name: empty(entry) for entry in pool_entries(spec)}
    inputs = program_inputs(spec, bucket, step_weights(spec))
    rows = {entry.name: empty(entry) for entry in inputs.rows}
    monkeypatch.setattr(_triton, "_Recorder", Recorder)
    monkeypatch.setattr(Op, "__call__", lambda op, *arguments: op.launch(*arguments))
    _triton.launches("step", step, spec, bucket, weights, pools, rows)
    return noted


@pytest.mark.parametrize("world", [1, 8])
def test_early_reads_are_of_launches_that_have_ended(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = launched(monkeypatch, world)
    written: dict[int, int] = {}  # by tensor, the launch that has it first
    checked = set()
    for number, launch in enumerate(noted):
        before = number - 1
        while before >= 0 and noted[before].hasty:
            before -= 1
        name = launch.kernel.__name__
        for argument, value in launch.values.items():
            if isinstance(value, Tensor):
                first = written.setdefault(id(value), number)
                if argument in EARLY.get(name, ()) and first < number:
                    assert first < before, f"{name} {number} reads {argument} of {first} early"
                    checked.add(name)
    other = "boundary_kernel" if world > 1 else "ranks_boundary_kernel"
    assert checked == set(EARLY) - {other}
    hasty = {launch.kernel.__name__ for launch in noted if launch.hasty}
    assert hasty == {"vector_kernel", "boundary_kernel", "down_kernel"} - {other}
