"""Short-convolution state: windows, snapshots and outputs, however a sequence is cut into chunks.

The plain implementation keeps a request's whole history and knows no rings; its fp32 operations
are the kernels' own, so every comparison is bitwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from inkling_engine.kernels._case_rows import INERT, Row, Step
from inkling_engine.kernels._cases import Ranks, normal
from inkling_engine.kernels._conv import Rows, short_conv, window
from inkling_engine.kernels.attention_prologue import attention_prologue
from inkling_engine.kernels.boundary import boundary

pytestmark = pytest.mark.usefixtures("native_library")

LINES = 5  # live slots 1..4
SNAPSHOTS = range(LINES, LINES + 6)
HEADS, KV_HEADS, DIM, REL = 4, 2, 16, 4
KV = 2 * KV_HEADS * DIM
WIDTH = HEADS * DIM + KV + HEADS * REL
GRID = 8


def plain_conv(x: Tensor, weight: Tensor) -> Tensor:
    """y [N, C] of one whole sequence `x` [N, C]."""
    history = torch.cat([torch.zeros(3, x.shape[1]), x.float()])
    lines = []
    for token in range(len(x)):
        y = history[token + 3]
        for tap in range(4):
            y = y + weight[:, tap] * history[token + tap]
        lines.append(y)
    return torch.stack(lines)


def plain_window(x: Tensor, length: int) -> Tensor:
    """The last three inputs before `length`, zeros before the first."""
    return torch.cat([torch.zeros(3, x.shape[1], dtype=x.dtype), x[:length]])[-3:]


@dataclass
class Sequence:
    """A request that is fed in chunks: its slot, its inputs, where it stands."""

    slot: int
    inputs: Tensor
    length: int = 0
    source: int = 0

    def row(self, count: int, snapshots: tuple[tuple[int, int], ...] = ()) -> Row:
        """The next `count` tokens."""
        return Row(self.slot, self.length, count, self.source, snapshots)

    def take(self, count: int) -> Tensor:
        """The inputs of the next `count` tokens, which are then done."""
        self.length, begin = self.length + count, self.length
        self.source = 0
        return self.inputs[begin : self.length]


@dataclass
class Layer:
    """State of one layer and its weights; every pool starts as NaN."""

    dtype: torch.dtype
    width: int
    ring: int = 3
    rings: Tensor = field(init=False)
    kv: Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = (1, 1 + max(SNAPSHOTS), self.ring, self.width)
        self.rings = torch.full(shape, torch.nan, dtype=self.dtype)
        step = Step((INERT,), 1, page_size=4, table_width=16, lines=LINES)
        shape_kv = (1, step.pages, 2, KV_HEADS, 4, DIM)
        self.kv = torch.full(shape_kv, torch.nan, dtype=self.dtype)

    def window(self, slot: int, length: int) -> Tensor:
        """The last three inputs before `length` in the ring of `slot`."""
        return window(self.rings[0, slot], length)


def run_boundary(layer: Layer, rows: list[Row], x: Tensor) -> tuple[Tensor, Tensor]:
    """One step of the boundary over `x` [T, C] with a zero residual."""
    step = Step(tuple(rows), len(x), lines=LINES)
    width = x.shape[1]
    weight = normal(width, 4, scale=0.5)
    norm = torch.ones(width, dtype=x.dtype)
    common = (step.token_rows, step.slots, step.sources, step.starts, step.lengths)
    tail = (*step.destinations, *Ranks().tensors, 0, 0, 1, 1e-6, 1)
    result = boundary(x, torch.zeros_like(x), weight, norm, layer.rings, *common, *tail)
    return result[0], result[1]


def run_prologue(layer: Layer, rows: list[Row], x: Tensor) -> tuple[Tensor, Tensor]:
    """One step of the attention prologue over `x` [T, WIDTH]."""
    step = Step(tuple(rows), len(x), page_size=4, table_width=16, lines=LINES)
    norms = 1 + normal(2, DIM, dtype=x.dtype, scale=0.1)
    result = attention_prologue(
        x,
        normal(KV, 4, scale=0.5),
        norms[0],
        norms[1],
        layer.kv,
        layer.rings,
        step.positions,
        step.token_rows,
        step.locations,
        step.slots,
        step.sources,
        step.starts,
        step.lengths,
        *step.destinations,
        0,
        HEADS,
        GRID,
        0.1,
        1e-6,
    )
    return result[0], result[1]


def crossings(row: Row, free: list[int]) -> Row:
    """`row` with a snapshot from `free` at each multiple of GRID that it reaches."""
    offsets = [n - row.length for n in range(GRID, row.length + row.count + 1, GRID)]
    pairs = tuple((offset, free.pop(0)) for offset in offsets if offset > 0)
    return Row(row.slot, row.length, row.count, row.source, pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunks", [(1,) * 20, (2,) * 10, (3, 1, 16), (20,), (7, 1, 1, 11)])
def test_windows_outputs_and_snapshots_are_those_of_the_whole_history(
    chunks: tuple[int, ...], dtype: torch.dtype
) -> None:
    layer, sequence = Layer(dtype, 24), Sequence(slot=2, inputs=normal(20, 24, dtype=dtype))
    weight, free, found = normal(24, 4, scale=0.5), list(SNAPSHOTS), []
    for count in chunks:
        row = crossings(sequence.row(count), free)
        found.append(run_boundary(layer, [row], sequence.take(count))[0])
        kept = plain_window(sequence.inputs, sequence.length)
        assert torch.equal(layer.window(2, sequence.length), kept)
    assert torch.equal(torch.cat(found), plain_conv(sequence.inputs, weight).to(dtype))
    for slot, length in zip(SNAPSHOTS, (8, 16), strict=False):
        assert torch.equal(layer.window(slot, length), plain_window(sequence.inputs, length))
    untouched = [0, 1, 3, 4, *free]
    assert layer.rings[0, untouched].isnan().all()


def test_several_grid_crossings_in_one_chunk_near_its_start() -> None:
    """Boundaries at offsets 1 and 2 mix the old window with new inputs."""
    layer, sequence = Layer(torch.float32, 8), Sequence(slot=1, inputs=normal(40, 8))
    run_boundary(layer, [sequence.row(7)], sequence.take(7))
    row = sequence.row(19, ((1, 5), (2, 7), (17, 6)))
    run_boundary(layer, [row], sequence.take(19))
    for slot, length in ((5, 8), (7, 9), (6, 24), (1, 26)):
        assert torch.equal(layer.window(slot, length), plain_window(sequence.inputs, length))


def test_a_row_resumes_from_a_snapshot_that_stays_as_it_is() -> None:
    layer, sequence = Layer(torch.float32, 8), Sequence(slot=1, inputs=normal(30, 8))
    run_boundary(layer, [sequence.row(20, ((16, 6),))], sequence.take(20))
    snapshot = layer.rings[0, 6].clone()
    resumed = [Sequence(slot, sequence.inputs, length=16, source=6) for slot in (3, 2)]
    for _ in range(2):
        x = torch.cat([one.inputs[one.length : one.length + 5] for one in resumed])
        rows = [one.row(5) for one in resumed]
        y = run_boundary(layer, rows, x)[0].view(2, 5, 8)
        wanted = plain_conv(sequence.inputs, normal(8, 4, scale=0.5))
        begin = resumed[0].length
        for one, found in zip(resumed, y, strict=True):
            one.take(5)
            assert torch.equal(found, wanted[begin : begin + 5])
            kept = plain_window(sequence.inputs, one.length)
            assert torch.equal(layer.window(one.slot, one.length), kept)
    assert torch.equal(layer.rings[0, 6], snapshot)


@pytest.mark.parametrize("ring", [3, 4, 7])
def test_old_inputs_are_read_before_any_is_written(ring: int) -> None:
    """Rows that start from each other's slots, and a snapshot into a slot that a row starts from."""
    layer, x = Layer(torch.float32, 8, ring), normal(6, 8)
    rows = [Row(1, 5, 2, source=2, snapshots=((1, 3),)), Row(2, 9, 1, source=1), Row(4, 4, 3, 3)]
    old = {row.source: normal(3, 8, seed=row.source) for row in rows}
    for row in rows:
        layer.rings[0, row.source, torch.arange(row.length - 3, row.length) % ring] = old[
            row.source
        ]
    found = run_boundary(layer, rows, x)[0]
    weight, begin = normal(8, 4, scale=0.5), 0
    for row in rows:
        strip = torch.cat([old[row.source], x[begin : begin + row.count]])
        y = plain_conv(strip, weight)[3:]
        assert torch.equal(found[begin : begin + row.count], y)
        assert torch.equal(layer.window(row.slot, row.length + row.count), strip[-3:])
        begin += row.count
    assert torch.equal(layer.window(3, 6), torch.cat([old[2], x[:2]])[1:4])


def test_inert_rows_and_padded_tokens_touch_no_state() -> None:
    layer = Layer(torch.float32, 8)
    before = layer.rings.clone()
    x = normal(4, 8)
    hidden, _ = run_boundary(layer, [INERT, INERT], x)
    assert torch.equal(layer.rings.view(torch.int32), before.view(torch.int32))
    alone = torch.cat([plain_conv(token[None], normal(8, 4, scale=0.5)) for token in x])
    assert torch.equal(hidden, alone)


def test_reference_agrees_with_the_plain_history() -> None:
    layer, sequence = Layer(torch.float32, 8), Sequence(slot=1, inputs=normal(11, 8))
    weight, found = normal(8, 4, scale=0.5), []
    for count in (2, 1, 8):
        step = Step((sequence.row(count),), count, lines=LINES)
        rows = Rows(step.slots, step.sources, step.starts, step.lengths, *step.destinations)
        found.append(short_conv(sequence.take(count), weight, layer.rings[0], rows))
    assert torch.equal(torch.cat(found), plain_conv(sequence.inputs, weight))
    assert torch.equal(layer.window(1, 11), plain_window(sequence.inputs, 11))


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """A cut of a sequence into chunks, and for each chunk the (slot, count) of its neighbours."""
    chunks = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    slots = st.lists(st.sampled_from([1, 3, 4]), max_size=3, unique=True)
    counts = st.integers(0, 4)
    neighbours = [[(slot, draw(counts)) for slot in draw(slots)] for _ in chunks]
    return chunks, neighbours


@pytest.mark.parametrize("op", ["boundary", "prologue"])
@given(plan=plans(), seed=st.integers(0, 9), padding=st.integers(0, 3))
def test_any_split_with_any_neighbours_gives_the_same_bits(
    op: str, plan: tuple[list[int], list[list[tuple[int, int]]]], seed: int, padding: int
) -> None:
    chunks, neighbours = plan
    run, width = (run_boundary, KV) if op == "boundary" else (run_prologue, WIDTH)
    total = sum(chunks)
    whole, parts = Layer(torch.float32, KV), Layer(torch.float32, KV)
    inputs = normal(total, width, seed=seed)
    wanted = run(whole, [Row(2, 0, total)], inputs)
    sequence, found = Sequence(slot=2, inputs=inputs), []
    others = {slot: Sequence(slot, normal(40, width, seed=slot)) for slot in (1, 3, 4)}
    for index, count in enumerate(chunks):
        batch = [(others[slot], n) for slot, n in neighbours[index]]
        batch.insert(index % (len(batch) + 1), (sequence, count))
        rows = [one.row(n) if n else INERT for one, n in batch]
        begin = sum(n for one, n in batch[: [one for one, _ in batch].index(sequence)])
        x = torch.cat([*(one.take(n) for one, n in batch), normal(padding, width)])
        found.append([out[begin : begin + count] for out in run(parts, rows, x)])
    for out, pieces in zip(wanted, zip(*found, strict=True), strict=True):
        assert torch.equal(out, torch.cat(pieces))
    assert torch.equal(whole.window(2, total), parts.window(2, total))
    step = Step((Row(2, 0, total),), total, page_size=4, table_width=16, lines=LINES)
    pages = step.page_table[2][step.page_table[2] > 0].long()
    held, again = whole.kv[0, pages], parts.kv[0, pages]
    assert torch.equal(held.view(torch.int32), again.view(torch.int32))
    written = ~held.isnan().any(-1).any(2).any(1)  # [pages, page_size]
    assert int(written.sum()) == (min(total, 64) if op == "prologue" else 0)
