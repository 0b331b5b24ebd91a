"""What a kernel reads before it waits has been written: the launches of decode steps and rounds.

A launch begins when the one before it lets it: behind its wait, or at once if it is hasty. So behind a
launch that is not hasty all but that one has ended, and behind hasty ones that many launches less.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from inkling_engine.artifacts.spec import Bucket, StepKind
from inkling_engine.compile.export import program_inputs
from inkling_engine.compile.models.inkling.shape import preset
from inkling_engine.compile.options import MOST_RUNNING, MOST_TOKENS, BuildOptions, make_spec
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
    "few_boundary_kernel": ROWS | {"residual", "token_rows"},
    "prologue_kernel": ROWS | {"token_rows"},
    "decode_kernel": ROWS | {"locations"},
    "verify_kernel": {"slots", "starts", "lengths", "page_table"},
    "choose_kernel": {"starts"},
    "up_kernel": {"y", "starts"},
    "down_kernel": {"logits", "starts"},
    "gate_up_few_kernel": {"starts"},
    "down_few_kernel": {"chosen", "weights", "starts"},
    "direct_kernel": {"starts"},
    "mix_kernel": {"weights", "starts"},
    "scan_kernel": {"slots", "emits", "request_state"},
    "pick_kernel": {"slots", "emits"},
}
GUESSING = {"draft_scan_kernel", "draft_pick_kernel", "draft_input_kernel"}
HASTY = {  # by rows, drafts and tokens: the kernels that let the next launch begin at once
    (1, 0, 1): {"vector_kernel", "boundary_kernel", "down_kernel"},
    (8, 0, 8): {"down_few_kernel"},
    (1, 8, 9): {"few_boundary_kernel", "down_few_kernel", *GUESSING},
    (8, 8, 72): GUESSING,
    (1, 0, 16): {"few_boundary_kernel", "down_few_kernel"},  # extends
    (1, 0, 64): {"few_boundary_kernel"},
}


class Launch(NamedTuple):
    """A kernel, its arguments by name and its programs along each axis."""

    kernel: Any
    values: dict[str, Any]
    grid: tuple[int, ...]

    @property
    def hasty(self) -> bool:
        """Whether it lets the next launch begin before its own wait."""
        always = "begin_next()" in self.kernel.src
        return always and self.values.get("HASTY", True)


def launched(
    monkeypatch: pytest.MonkeyPatch, world: int, rows: int, drafts: int, tokens: int
) -> list[Launch]:
    """All launches of a step of so many tokens on one of `world` ranks: a round of `drafts` if there are
    any, else a decode step or an extend."""
    noted: list[Launch] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def note(*arguments: Any, **named: Any) -> None:
                values = dict(zip(self.kernel.arg_names, arguments, strict=False)) | named
                noted.append(Launch(self.kernel, values, grid))

            return note

    def empty(entry: Layout) -> Tensor:
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")

    shape = preset("inkling-small")
    assert shape is not None
    options = BuildOptions(
        model="inkling-small",
        decode_buckets=str(rows),
        max_context=2048,
        tp=world,
        spec_depth=drafts,
    )
    spec = make_spec(options, "inkling-small", shape, "cuda")
    kind: StepKind = "verify" if drafts else "decode" if rows == tokens else "extend"
    bucket = Bucket(kind=kind, rows=rows, tokens=tokens, drafts=drafts)
    weights = {entry.name: empty(entry) for entry in step_weights(spec)}
    pools = {entry.name: empty(entry) for entry in pool_entries(spec)}
    inputs = program_inputs(spec, bucket, step_weights(spec))
    lines = {entry.name: empty(entry) for entry in inputs.rows}
    monkeypatch.setattr(_triton, "_Recorder", Recorder)
    monkeypatch.setattr(Op, "__call__", lambda op, *arguments: op.launch(*arguments))
    _triton.launches("step", step, spec, bucket, weights, pools, lines)
    return noted


@pytest.mark.parametrize("world", [1, 8])
@pytest.mark.parametrize(("rows", "drafts", "tokens"), HASTY)
def test_early_reads_are_of_launches_that_have_ended(
    world: int, rows: int, drafts: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = launched(monkeypatch, world, rows, drafts, tokens)
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
    names = {launch.kernel.__name__ for launch in noted}
    assert checked == names & set(EARLY)
    assert checked >= ({"choose_kernel"} if tokens > 1 else {"up_kernel", "down_kernel"})
    hasty = {launch.kernel.__name__ for launch in noted if launch.hasty}
    assert hasty == names & HASTY[rows, drafts, tokens]
    assert HASTY[rows, drafts, tokens] - names <= (
        {"boundary_kernel", *GUESSING} if world > 1 else set()
    )


@pytest.mark.parametrize(
    ("rows", "drafts", "tokens"),
    [
        (MOST_RUNNING, 0, MOST_RUNNING),
        (MOST_RUNNING, 8, 9 * MOST_RUNNING),
        (16, 0, MOST_TOKENS),
        (MOST_RUNNING, 0, MOST_TOKENS),
    ],
)
def test_the_largest_steps_are_launches_that_cuda_can_make(
    rows: int, drafts: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes 2^31 - 1 programs along x and 65,535 along y and z."""
    noted = launched(monkeypatch, 1, rows, drafts, tokens)
    limits = 2**31 - 1, 65_535, 65_535
    assert noted and all(
        size <= limit for launch in noted for size, limit in zip(launch.grid, limits, strict=False)
    )
