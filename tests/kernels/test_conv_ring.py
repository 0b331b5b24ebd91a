"""Conv rings under rollback: what is committed is what one straight run gives, bit by bit.

A sequence moves by chunks, by decode steps and by verify chunks of which only a beginning is
committed, leaves snapshots at any offset, and goes on in another slot from any of them. Neighbours
in the batch, rejected inputs and all memory that nobody owns are garbage.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.test_conv_state import (
    DIM,
    HEADS,
    KV,
    WIDTH,
    Layer,
    plain_window,
    run_boundary,
    run_prologue,
)
from torch import Tensor

from inkling_engine.kernels import _conv
from inkling_engine.kernels._case_rows import INERT, Row, Step
from inkling_engine.kernels._cases import normal
from inkling_engine.kernels._conv import Rows
from inkling_engine.kernels._op import use_references

pytestmark = pytest.mark.usefixtures("native_library")

LONGEST = 60
SNAPSHOTS = range(5, 11)
Run = Callable[[Layer, list[Row], Tensor], Tensor]


@dataclass(frozen=True)
class Move:
    """`count` tokens of which `kept` are committed, a snapshot at `offset` (0: none); `back`: from
    the newest snapshot, in another slot."""

    count: int
    kept: int
    offset: int = 0
    back: bool = False


@st.composite
def move(draw: st.DrawFn, drafts: int) -> Move:
    """A chunk, a decode step or a verify chunk."""
    kind = draw(st.sampled_from(["chunk", "decode", "verify"]))
    count = {"chunk": draw(st.integers(1, 20)), "decode": 1}.get(kind, 1 + drafts)
    if kind == "verify":
        count = draw(st.integers(1, count))  # fewer drafts than there is room for
    kept = draw(st.integers(1, count)) if kind == "verify" else count
    return Move(count, kept, draw(st.integers(0, count)), draw(st.integers(0, 4)) == 4)


def boundary_outputs(layer: Layer, rows: list[Row], x: Tensor) -> Tensor:
    """hidden [T, KV]."""
    return run_boundary(layer, rows, x)[0]


def prologue_outputs(layer: Layer, rows: list[Row], x: Tensor) -> Tensor:
    """Keys and values [T, KV] as they lie in the pages."""
    run_prologue(layer, rows, x)
    step = Step(tuple(rows), len(x), page_size=4, table_width=16, lines=5)
    kv = layer.kv[0, step.locations // 4, :, :, step.locations % 4]
    return kv.flatten(1)


RUNS: dict[str, tuple[Run, int, int]] = {  # what runs, width of its input, first channel convolved
    "boundary": (boundary_outputs, KV, 0),
    "prologue": (prologue_outputs, WIDTH, HEADS * DIM),
}


def follow(op: str, ring: int, moves: list[Move], dtype: torch.dtype = torch.float32) -> None:
    """Do the moves; each step's committed outputs and all windows must be a straight run's."""
    run, width, first = RUNS[op]
    inputs = normal(LONGEST, width, dtype=dtype)
    wanted = run(Layer(dtype, KV), [Row(2, 0, LONGEST)], inputs)
    layer, slot, length, source = Layer(dtype, KV, ring), 2, 0, 0
    snapshots: dict[int, int] = {}  # length by slot
    for number, one in enumerate(moves):
        if one.back and snapshots:
            source, length = next(reversed(snapshots.items()))
            slot = slot % 4 + 1
        count, kept = (min(n, LONGEST - length) for n in (one.count, one.kept))
        if not kept:
            break
        offset = min(one.offset, count)
        to = next(free for free in SNAPSHOTS if free not in {source, *snapshots})
        rejected = normal(count - kept, width, dtype=dtype, seed=100 + number)
        padding = normal(2, width, dtype=dtype)
        x = torch.cat([inputs[length : length + kept], rejected, padding])
        row = Row(slot, length, count, source, ((offset, to),) if offset else ())
        found = run(layer, [INERT, row], x)
        assert torch.equal(found[:kept], wanted[length : length + kept]), f"outputs of {number}"
        if 0 < offset <= kept:
            snapshots[to] = length + offset
            if len(snapshots) == len(SNAPSHOTS) - 1:
                del snapshots[next(iter(snapshots))]
        length, source = length + kept, 0
        for place, end in ((slot, length), *snapshots.items()):
            window = plain_window(inputs[:, first : first + KV], end)
            assert torch.equal(layer.window(place, end), window), f"window of {place} at {number}"


@pytest.mark.parametrize("drafts", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("op", RUNS)
@settings(max_examples=60)
@given(data=st.data(), half=st.booleans(), plainly=st.booleans())
def test_any_moves_give_the_bits_of_a_straight_run(
    op: str, drafts: int, data: st.DataObject, half: bool, plainly: bool
) -> None:
    moves = data.draw(st.lists(move(drafts), min_size=1, max_size=14))
    with use_references() if plainly else nullcontext():
        follow(op, 3 + drafts, moves, torch.bfloat16 if half else torch.float32)


FAULTS: dict[str, Callable[[Tensor, Rows], tuple[Tensor, Rows]]] = {  # what is stored instead
    "an input at the entry after its own": lambda z, rows: (
        z,
        rows._replace(lengths=rows.lengths + 1),
    ),
    "old inputs stay with the source": lambda z, rows: (z, rows._replace(sources=rows.slots)),
    "a snapshot one input early": lambda z, rows: (
        z,
        rows._replace(destination_offsets=(rows.destination_offsets - 1).clamp(min=0)),
    ),
    "the last input is not kept": lambda z, rows: (z[:-1], rows),
}
SCRIPT = [
    Move(5, 5),
    Move(5, 2),
    Move(5, 1, offset=1),
    Move(1, 1),
    Move(1, 1, back=True),
    Move(1, 1),
]


def test_the_script_of_the_faults_is_sound() -> None:
    with use_references():
        follow("boundary", 7, SCRIPT)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _conv._store

    def planted(strip: Tensor, pool: Tensor, rows: Rows, row: int) -> None:
        strip, rows = FAULTS[fault](strip, rows)
        store(strip, pool, rows, row)

    monkeypatch.setattr(_conv, "_store", planted)
    with use_references(), pytest.raises(AssertionError, match="(outputs|window) of"):
        follow("boundary", 7, SCRIPT)


@pytest.mark.parametrize("op", RUNS)
@pytest.mark.parametrize("drafts", [1, 2, 4, 8])
def test_a_ring_one_entry_too_short_is_found(op: str, drafts: int) -> None:
    moves = [Move(9, 9), Move(1 + drafts, 1), Move(1, 1)]
    follow(op, 3 + drafts, moves)
    with pytest.raises(AssertionError, match="at 1"):
        follow(op, 2 + drafts, moves)
