"""Snapshots: the scatter that every step has captures a request's windows at exactly a boundary.

A snapshot must be, bit by bit, the windows of the same request prefilled to that length alone,
wherever the boundary lies in whichever chunk, row or step kind; and a request that starts from one,
over shared pages, must go on as if it had never stopped.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.programs import Programs
from support.rig import WINDOWS, Flow, Model, Rig, Trace, Traces, bits
from support.schedules import Batch, draw_batch, draw_bucket
from support.stepper import convert

from inkling_engine.artifacts.errors import UsageError
from inkling_engine.artifacts.spec import Bucket

pytestmark = pytest.mark.usefixtures("native_library")

SIZES: dict[str, Any] = {"max_running": 8, "max_context": 64, "extend_buckets": "32x8"}
WHOLE = Bucket(kind="extend", rows=8, tokens=64)


@dataclass
class Captures:
    """What the snapshot slots must hold: a plain account of destinations given and boundaries met."""

    rig: Rig
    waiting: dict[int, list[int]] = field(default_factory=dict)
    held: dict[int, tuple[Trace, int]] = field(default_factory=dict)

    @property
    def slots(self) -> range:
        """The snapshot slots."""
        spec = self.rig.model.spec
        return range(1 + spec.max_running, spec.pools.slots)

    def give(self, flow: Flow, destinations: Sequence[int]) -> None:
        """Send `destinations` of the next boundaries with the flow's next chunk; 0 is none."""
        flow.snapshots, self.waiting[flow.slot] = destinations, list(destinations)

    def note(self, flow: Flow, count: int) -> None:
        """Account for the next `count` tokens of a flow; call before they run."""
        grid = self.rig.model.spec.snapshot_grid
        for length in range(flow.length + 1, flow.length + count + 1):
            waiting = self.waiting.get(flow.slot)
            if length % grid == 0 and waiting and (destination := waiting.pop(0)):
                self.held[destination] = flow.trace, length

    def advance(self, bucket: Bucket, batch: Batch) -> None:
        """Run a batch and check every snapshot slot."""
        for pair in filter(None, batch):
            self.note(*pair)
        self.rig.advance(bucket, batch)
        self.check()

    def check(self) -> None:
        """Captured windows and lengths are exact; other snapshot slots hold what they held."""
        for slot in self.slots:
            if slot in self.held:
                trace, length = self.held[slot]
                assert self.rig.pools["snapshot_lengths"][slot] == length, f"snapshot {slot}"
                windows, expected = self.rig.windows(slot, length), trace.windows[length - 1]
                assert torch.equal(bits(windows), bits(expected)), f"snapshot {slot} at {length}"
            else:
                rings = [self.rig.pools[name][:, slot] for name in WINDOWS]
                assert all(ring.isnan().all() for ring in rings), f"snapshot {slot} was written"


def draw_destinations(captures: Captures, choose: random.Random) -> list[int]:
    """Destinations for the next boundaries, none of them twice, some of them inert."""
    width = captures.rig.pools["snapshot_slots"].shape[1]
    count = choose.randint(1, min(width, len(captures.slots)))
    return [slot * choose.choice((0, 1, 1)) for slot in choose.sample(captures.slots, count)]


@pytest.fixture(scope="module")
def pairs(
    small: Model, ring: Model, small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Model]:
    """Models by page and grid sizes."""
    found = {"page 4, grid 8": small, "page 4, grid 8, ring": ring}
    for page, grid in ((8, 8), (4, 12), (1, 3)):
        options = SIZES | {"page_size": page, "snapshot_grid": grid}
        scratch = tmp_path_factory.mktemp("pair")
        machine = convert(small_checkpoint, scratch, **options)
        found[f"page {page}, grid {grid}"] = Model(machine.spec, machine.weights)
    return found


@pytest.mark.parametrize(
    "name",
    [
        "page 4, grid 8",
        "page 4, grid 8, ring",
        "page 8, grid 8",
        "page 4, grid 12",
        "page 1, grid 3",
    ],
)
@settings(max_examples=8)
@given(seed=st.integers(0, 1 << 32), pages=st.integers(0, 9))
def test_any_schedule_captures_every_boundary(
    pairs: dict[str, Model],
    name: str,
    small_traces: Traces,
    seed: int,
    pages: int,
) -> None:
    choose, rig = random.Random(seed), Rig(pairs[name], pages=pages)
    captures, most = Captures(rig), max(bucket.tokens for bucket in rig.model.spec.buckets)
    traces = [small_traces(n, at=7 * n, new=10, temperature=0.0) for n in (22, 9, 40)]
    flows = list(map(Flow, traces, choose.sample(range(1, 9), 3)))
    while not all(flow.done for flow in flows):
        batch = draw_batch(flows, most, choose)
        for pair in filter(None, batch):
            if choose.random() < 0.4:
                captures.give(pair[0], draw_destinations(captures, choose))
        if any(batch):
            captures.advance(draw_bucket(batch, choose), batch)


def test_a_grid_that_pages_do_not_divide_is_refused(small_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="snapshot-grid"):
        convert(small_checkpoint, tmp_path, page_size=8, snapshot_grid=4, max_context=64)


def test_each_request_has_a_grid_of_its_own(small: Model, small_traces: Traces) -> None:
    """Packed at offsets 0, 13, 35 and 44: only the first starts on the grid of 8."""
    captures, free = Captures(Rig(small)), iter(range(9, 17))
    trace = small_traces(40, at=280, new=10)
    flows = [Flow(trace, slot) for slot in (3, 1, 7, 4)]
    lengths = (13, 22, 9, 17)
    for flow, length in zip(flows, lengths, strict=True):
        captures.give(flow, [next(free) for _ in range(length // 8)])
    captures.advance(WHOLE, list(zip(flows, lengths, strict=True)))
    assert {slot: length for slot, (_, length) in captures.held.items()} == {
        9: 8, 10: 8, 11: 16, 12: 8, 13: 8, 14: 16,
    }  # fmt: skip


@pytest.mark.parametrize("start", range(9))
def test_boundaries_anywhere_in_a_chunk(small: Model, small_traces: Traces, start: int) -> None:
    """Offsets 1 and 2 mix the old window with new inputs; one chunk crosses up to four boundaries."""
    captures, flow = Captures(Rig(small)), Flow(small_traces(40, at=280, new=10), 6)
    if start:
        captures.advance(WHOLE, [(flow, start)])
    captures.give(flow, [16, 9, 14, 0, 11])
    captures.advance(WHOLE, [None, (flow, 32)])
    captures.advance(WHOLE, [(flow, flow.left)])


@pytest.mark.parametrize("kind", ["decode", "extend"])
def test_decoding_crosses_the_grid(small: Model, small_traces: Traces, kind: str) -> None:
    """Tokens that were sampled cross boundaries too, alone or beside a prompt."""
    captures, flow = Captures(Rig(small)), Flow(small_traces(7, at=49, new=10), 2)
    other = Flow(small_traces(40, at=280, new=10), 5)
    captures.give(flow, [12, 15])
    captures.advance(WHOLE, [(flow, 7)])
    while not flow.done:
        alone = kind == "decode"
        bucket = Bucket(kind="decode", rows=4, tokens=4) if alone else WHOLE
        captures.advance(bucket, [(flow, 1)] if alone else [(other, 3), (flow, 1)])
    assert captures.held == {12: (flow.trace, 8), 15: (flow.trace, 16)}


@pytest.mark.parametrize("chunk", [1, 2, 5, 16])
@pytest.mark.parametrize("length", [8, 16, 24, 32])
def test_a_request_goes_on_from_a_snapshot(
    small: Model, small_traces: Traces, length: int, chunk: int
) -> None:
    """Two requests start from one snapshot beside the first, which goes on; a step later the
    snapshot may be overwritten."""
    rig, trace = Rig(small, pages=5), small_traces(40, at=280, new=10)
    first = Flow(trace, 1, snapshots=[0] * (length // 8 - 1) + [9])
    rig.advance(WHOLE, [(first, length + 3)])
    warm = [Flow(trace, slot, length=length, source=9) for slot in (8, 4)]
    for flow in warm:
        rig.share(flow.slot, 1, length)
    rig.advance(WHOLE, [(warm[0], chunk % 9), (first, 1), (warm[1], 2)])
    for name in WINDOWS:
        rig.pools[name][:, 9] = torch.nan
    while not all(flow.done for flow in (first, *warm)):
        left = [flow for flow in (first, *warm) if not flow.done]
        rig.advance(WHOLE, [(flow, min(chunk, flow.left or 1)) for flow in left])


def test_one_token_after_a_snapshot(small: Model, small_traces: Traces) -> None:
    """A prompt that a snapshot covers but for its last token samples what it samples cold."""
    rig, trace = Rig(small), small_traces(17, at=119, new=10)
    first = Flow(trace, 1, snapshots=[0, 9])
    rig.advance(WHOLE, [(first, 17)])
    warm = Flow(trace, 2, length=16, source=9)
    rig.share(2, 1, 16)
    rig.advance(WHOLE, [(warm, 1)])
    while not warm.done:
        rig.advance(Bucket(kind="decode", rows=2, tokens=2), [(warm, 1)])


def test_destinations_are_one_shot(small: Model, small_traces: Traces) -> None:
    """A destination is used by one boundary; later ones capture nothing."""
    captures, flow = Captures(Rig(small)), Flow(small_traces(40, at=280, new=10), 6)
    captures.give(flow, [10])
    for _ in range(4):
        captures.advance(WHOLE, [(flow, 10)])
    assert captures.held == {10: (flow.trace, 8)}
    assert not captures.rig.pools["snapshot_slots"][6].any()


def test_a_replayed_buffer_applies_nothing_twice(small: Model, small_traces: Traces) -> None:
    """After a step the one-shot lines of its buffer are inert, whoever has the slot by then."""
    rig, bucket = Rig(small), Bucket(kind="extend", rows=4, tokens=16)
    flow, later = Flow(small_traces(13, at=91, new=10), 3), Flow(small_traces(9, at=63, new=4), 3)
    flow.snapshots = [12]
    rows = rig.rows(bucket, [flow.take(13)])
    applied = {name: rows[name].clone() for name in ("admit_ints", "page_updates")}
    rig.replay(bucket, rows)
    for name, column in (("admit_ints", 0), ("page_updates", 1), ("snapshot_updates", 0)):
        assert not rows[name][:, column].any()
    assert applied["admit_ints"][0, 0] == 3 and applied["page_updates"][0, 1] == 3
    rig.advance(WHOLE, [(later, 9)])
    rig.pools["snapshot_lengths"][12] = 77
    rig.pools["full_table"][3, 3] = 5
    before = {name: pool.clone() for name, pool in rig.pools.items()}
    rows["row_slots"].zero_()
    rig.replay(bucket, rows)
    for name, pool in rig.pools.items():
        assert name.startswith(("results", "step")) or torch.equal(
            bits(pool), bits(before[name])
        ), name
    while not later.done:
        rig.advance(WHOLE, [(later, 1)])


def test_compiled_programs_capture_and_resume(programs: Programs, trained_traces: Traces) -> None:
    """Boundaries of the grid of 256 in every program; a request goes on from one over a ring."""
    trace, buckets = trained_traces(530, new=6), {b.tokens: b for b in programs.model.spec.buckets}
    rig = Rig(programs.model, programs, pages=2)
    captures = Captures(rig)
    flows = {tokens: Flow(trace, 1 + i) for i, tokens in enumerate(buckets)}
    for tokens, flow in flows.items():
        captures.advance(buckets[256], [(flow, 254)])
        captures.give(flow, [8 + flow.slot])
        captures.advance(buckets[tokens], [(flow, min(tokens, 1))])
        captures.advance(buckets[tokens], [(flow, 1 if tokens < 64 else 40)])
    assert {length for _, length in captures.held.values()} == {256} and len(captures.held) == 4
    warm = Flow(trace, 7, length=256, source=9)
    rig.share(7, flows[1].slot, 256)
    captures.give(warm, [14])
    captures.advance(buckets[256], [(warm, 250)])
    captures.advance(buckets[64], [(warm, 24)])
    while not warm.done:
        captures.advance(buckets[8], [(warm, 1)])
    assert captures.held[14] == (trace, 512)
