"""Whole steps without an engine: a checkpoint, converted, under the step's eager code.

`Stepper` feeds one sequence chunk by chunk, with the ops' references or with the native kernels,
and `recorded` keeps what chosen ops of the model were given and returned. Buckets are larger than
the chunks, so that padded tokens and inert rows are always there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from inkling_engine.artifacts.spec import Bucket
from inkling_engine.compile.convert import write_weights
from inkling_engine.compile.driver import Chunk, Guesses, Machine
from inkling_engine.compile.export import program_inputs
from inkling_engine.compile.models.inkling import block, drafts, model
from inkling_engine.compile.models.inkling.names import recipes
from inkling_engine.compile.options import BuildOptions
from inkling_engine.compile.plan import make_plan
from inkling_engine.compile.steps import step
from inkling_engine.kernels import table
from inkling_engine.kernels._op import use_references
from inkling_engine.kernels.head import head

SLOT, ROWS, PADDING = 2, 3, 5
DECODE = Bucket(kind="decode", rows=ROWS, tokens=ROWS)


class Call(NamedTuple):
    """One recorded call of an op."""

    arguments: tuple[Any, ...]
    result: Any


class Stepper:
    """One sequence in slot 2 of a machine; `native` chooses the kernels."""

    def __init__(self, machine: Machine, *, native: bool) -> None:
        """Start with nothing processed."""
        self.machine, self.native, self.length = machine, native, 0

    def feed(self, tokens: Sequence[int] = ()) -> Tensor:
        """Process `tokens`, or the token sampled last; logits [real vocab] after the last one."""
        chunk = Chunk(slot=SLOT, start=self.length, tokens=tokens, admit=self.length == 0)
        self.length += chunk.count
        bucket = DECODE
        if tokens:
            bucket = Bucket(kind="extend", rows=ROWS, tokens=chunk.count + ROWS + PADDING)
        return self._step(bucket, chunk)[0]

    def verify(self, guesses: Sequence[int] = ()) -> list[int]:
        """One round on `guesses`, or on the engine's own drafts; returns the tokens it gave."""
        drafts = self.machine.spec.spec_depth
        bucket = Bucket(kind="verify", rows=ROWS, tokens=ROWS * (1 + drafts), drafts=drafts)
        chunk = Chunk(SLOT, self.length, guesses=Guesses(guesses, 0))
        self.machine.guess([chunk])
        self._step(bucket, chunk)
        count, *line = self.machine.results(1)[0][0, 1:].tolist()
        self.length += count
        return line[table.RESULT_HEADER - 2 :][:count]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [tokens, real vocab] after every row of `hidden`, what a step gave to `head`."""
        shape, count = self.machine.spec.shape, len(hidden)
        rows, emits = torch.arange(count).int(), torch.ones(count).int()
        weight = self.machine.weights["head"]
        with torch.no_grad(), self._kernels():
            every: Tensor = head(hidden, weight, rows, emits, 1 / shape.mup, shape.real_vocab)
        return every

    @property
    def sampled(self) -> int:
        """The token that the last step chose."""
        return int(self.machine.results(1)[0][0, table.RESULT_HEADER])

    @property
    def drafts(self) -> list[int]:
        """The drafts that the last step chose."""
        return self.machine.pools["draft_tokens"][SLOT].tolist()

    def _step(self, bucket: Bucket, chunk: Chunk) -> Tensor:
        machine = self.machine
        rows = machine.rows(program_inputs(machine.spec, bucket, ()), [chunk])
        with torch.no_grad(), self._kernels():
            return step(machine.spec, bucket, machine.weights, machine.pools, rows)

    def _kernels(self) -> AbstractContextManager[None]:
        return nullcontext() if self.native else use_references()


def convert(folder: Path, scratch: Path, dtype: str = "fp32", **options: Any) -> Machine:
    """A machine with the weights of the checkpoint in `folder`, converted by the build's own code."""
    given: dict[str, Any] = {"device": "cpu", "max_running": 3, "decode_buckets": "3"}
    given |= {"page_size": 8, "snapshot_grid": 16, "extend_buckets": "64x3"} | options
    plan = make_plan(BuildOptions(model=str(folder), dtype=dtype, **given))
    assert plan.checkpoint is not None
    spec, path = plan.spec, scratch / f"{folder.name}-{dtype}.safetensors"
    write_weights(plan.checkpoint, recipes(spec.shape, spec.dtype, plan.checkpoint.layout), path)
    return Machine(spec, load_file(path))


@contextmanager
def recorded(*names: str) -> Iterator[dict[str, list[Call]]]:
    """Record the model's calls of the ops `names`, in order, those of its draft depths included."""
    calls: dict[str, list[Call]] = {name: [] for name in names}
    places = [(m, name) for m in (block, model, drafts) for name in names if hasattr(m, name)]
    with pytest.MonkeyPatch.context() as patch:
        for module, name in places:
            patch.setattr(module, name, _recorder(getattr(module, name), calls[name]))
        yield calls


def _recorder(op: Any, calls: list[Call]) -> Any:
    def call(*arguments: Any) -> Any:
        result = op(*arguments)
        calls.append(Call(arguments, result))
        return result

    return call
