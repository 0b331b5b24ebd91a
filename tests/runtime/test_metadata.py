"""Row buffers say what a plan says, byte by byte, and are written only when something changed."""

from __future__ import annotations

import struct
from array import array
from typing import Any

import pytest
from support.fake_spec import EOS, build_manifest, build_spec

from inkling_engine.artifacts.manifest import ProgramEntry
from inkling_engine.kernels import table
from inkling_engine.runtime.encode import encode_params
from inkling_engine.runtime.metadata import RowInputs
from inkling_engine.runtime.plan import Plan
from inkling_engine.runtime.requests import Sequence, open_request
from inkling_engine.runtime.results import ResultRing
from inkling_engine.runtime.sampling import SamplingParams

pytestmark = pytest.mark.null

SPEC = build_spec()
MANIFEST = build_manifest(SPEC)


def _entry(kind: str, rows: int) -> ProgramEntry:
    return next(p for p in MANIFEST.programs if (p.bucket.kind, p.bucket.rows) == (kind, rows))


def _sequence(prompt: int = 3, **values: Any) -> Sequence:
    params = SamplingParams(**values)
    sequence = open_request(0, list(range(3, 3 + prompt)), params, SPEC, 7).sequences[0]
    encode_params(sequence, SPEC)
    return sequence


class Buffer:
    """A row buffer and its fields as lists."""

    def __init__(self, entry: ProgramEntry) -> None:
        self.entry = entry
        self.bytes = bytearray(entry.row_bytes)
        self.inputs = RowInputs(entry, memoryview(self.bytes))

    def read(self, name: str) -> list[Any]:
        row = next(row for row in self.entry.rows if row.name == name)
        count = 1
        for extent in row.shape:
            count *= extent
        code = "f" if row.dtype == "float32" else "i"
        flat = list(struct.unpack_from(f"{count}{code}", self.bytes, row.offset))
        width = row.shape[-1]
        return (
            flat if len(row.shape) == 1 else [flat[i : i + width] for i in range(0, count, width)]
        )


def test_rows_are_written_and_padded() -> None:
    buffer = Buffer(_entry("extend", 4))
    plan = Plan(
        buffer.entry.bucket,
        slots=[3, 1],
        counts=[4, 1],
        flags=[0, table.SAMPLE | table.FROM_TABLE],
        tokens=[9, 8, 7, 6, 0],
        pages=[(table.FULL_TABLE, 3, 0, 5), (table.WINDOW_TABLE, 3, 1, 6)],
    )
    assert buffer.inputs.fill(plan)
    assert buffer.read("row_slots") == [3, 1, 0, 0]
    assert buffer.read("row_counts") == [4, 1, 0, 0]
    assert buffer.read("row_flags") == [0, 3, 0, 0]
    assert buffer.read("row_sources") == [0] * 4
    assert buffer.read("token_ids")[:5] == [9, 8, 7, 6, 0]
    assert buffer.read("page_updates")[:3] == [[0, 3, 0, 5], [1, 3, 1, 6], [0] * 4]


def test_snapshot_lines_and_sources() -> None:
    """Lines are whole: what an earlier replay left behind a destination is overwritten."""
    buffer, sequence = Buffer(_entry("extend", 4)), _sequence()
    sequence.start(3)
    plan = Plan(buffer.entry.bucket, [sequence], [3], [4], [0], [9, 8, 7, 6])
    plan.snapshots, plan.sources = [(sequence, [5, 6])], {0: 7}
    buffer.inputs.fill(plan)
    assert buffer.read("snapshot_updates") == [[3, 5, 6], *[[0] * 3] * 3]
    assert buffer.read("row_sources") == [7, 0, 0, 0]
    plan = Plan(buffer.entry.bucket, [sequence], [3], [4], [0], [9, 8, 7, 6])
    plan.snapshots = [(sequence, [6])]
    buffer.inputs.fill(plan)
    assert buffer.read("snapshot_updates")[0] == [3, 6, 0]
    assert buffer.read("row_sources") == [0] * 4


def test_a_preempted_sequence_enters_with_what_it_had() -> None:
    buffer, sequence = Buffer(_entry("extend", 2)), _sequence(max_tokens=9)
    sequence.start(2)
    sequence.feed, sequence.length = [3, 4, 5, 30, 31], 4
    plan = Plan(buffer.entry.bucket, [sequence], [2], [1], [1], [31], [sequence])
    buffer.inputs.fill(plan)
    assert buffer.read("admit_ints")[0][: table.ADMIT_HEADER] == [2, 4, 2, 0]


def test_fewer_rows_leave_no_old_ones() -> None:
    buffer = Buffer(_entry("decode", 4))
    for slots in ([1, 2, 3, 4], [2], [4, 1]):
        count = len(slots)
        buffer.inputs.fill(Plan(buffer.entry.bucket, [], slots, [1] * count, [3] * count))
        assert buffer.read("row_slots") == slots + [0] * (4 - count)
        assert buffer.read("row_counts") == [1] * count + [0] * (4 - count)


def test_a_steady_decode_step_writes_nothing() -> None:
    buffer = Buffer(_entry("decode", 2))

    def plan() -> Plan:
        return Plan(buffer.entry.bucket, [], [1, 2], [1, 1], [3, 3])

    assert buffer.inputs.fill(plan())
    before = bytes(buffer.bytes)
    buffer.bytes[0] ^= 0xFF  # a write would undo this
    assert not buffer.inputs.fill(plan())
    buffer.bytes[0] ^= 0xFF
    assert bytes(buffer.bytes) == before
    paged = plan()
    paged.pages.append((table.FULL_TABLE, 2, 1, 9))
    assert buffer.inputs.fill(paged)
    assert buffer.read("page_updates")[0] == [0, 2, 1, 9]


class Wire:
    """An upload that keeps what was sent; the buffer may be written only after `wait`."""

    def __init__(self, buffer: bytearray) -> None:
        self.buffer, self.sent, self.busy = buffer, [bytes(buffer)], False

    def wait(self) -> None:
        assert bytes(self.buffer) == self.sent[-1], "written while it may still be read"
        self.busy = False

    def send(self) -> None:
        assert not self.busy, "written while it may still be read"
        self.sent.append(bytes(self.buffer))
        self.busy = True


def test_what_is_sent_applies_nothing_twice() -> None:
    entry = _entry("decode", 2)
    bytes_ = bytearray(entry.row_bytes)
    wire = Wire(bytes_)
    inputs = RowInputs(entry, memoryview(bytes_), wire)
    first = next(row.offset for row in entry.rows if row.name == "admit_ints")
    steady = Plan(entry.bucket, [], [1, 2], [1, 1], [3, 3])
    paged = Plan(entry.bucket, [], [1, 2], [1, 1], [3, 3], pages=[(table.FULL_TABLE, 2, 1, 9)])
    fewer = Plan(entry.bucket, [], [2], [1], [3])
    assert [inputs.fill(plan) for plan in (steady, paged, steady, fewer)] == [
        *[True, True, False, True]
    ]
    lines = [sent[first:] for sent in wire.sent[1:]]
    assert any(lines[1]) and not any(lines[0]) and not any(lines[2])
    assert wire.sent[1][:first] == wire.sent[2][:first] != wire.sent[3][:first]


def test_admission_lines() -> None:
    sequence = _sequence(
        temperature=0.5,
        top_p=0.25,
        min_p=0.125,
        top_k=7,
        seed=(5 << 32) | 0xFFFFFFFE,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=2.0,
        logit_bias={9: -1.5, 4: 2.0},
        max_tokens=11,
        min_tokens=2,
        stop_token_ids=[6],
    )
    sequence.start(3)
    buffer = Buffer(_entry("extend", 2))
    plan = Plan(buffer.entry.bucket, [sequence], [3], [3], [1], [3, 4, 5], [sequence])
    buffer.inputs.fill(plan)
    line, rest = buffer.read("admit_ints")
    header = [0] * table.INT_HEADER
    header[table.PROMPT_LENGTH], header[table.MAX_TOKENS] = 3, 11
    header[table.MIN_TOKENS], header[table.TOP_K] = 2, 7
    header[table.SEED_LOW], header[table.SEED_HIGH] = -2, 5
    stops = [6, EOS, table.INERT_TOKEN, table.INERT_TOKEN]
    assert line == [3, 0, 0, 0, *header, *stops, 9, 4, 0]
    assert set(rest) == {0}
    floats = [0.0] * table.FLOAT_HEADER
    floats[table.TEMPERATURE], floats[table.TOP_P], floats[table.MIN_P] = 0.5, 0.25, 0.125
    floats[table.PRESENCE], floats[table.FREQUENCY], floats[table.REPETITION] = 1.0, -1.0, 2.0
    assert buffer.read("admit_floats")[0] == [*floats, -1.5, 2.0, 0.0]


def test_inert_values_are_encoded_for_what_is_off() -> None:
    sequence = _sequence(temperature=1e-7, top_k=-1, ignore_eos=True, max_tokens=None)
    ints, floats = sequence.admit_ints, sequence.admit_floats
    assert (ints[table.TOP_K], ints[table.MAX_TOKENS]) == (0, 61)
    assert set(ints[table.INT_HEADER : table.INT_HEADER + 4]) == {table.INERT_TOKEN}
    assert (floats[table.TEMPERATURE], floats[table.TOP_P], floats[table.REPETITION]) == (0, 1, 1)


def test_every_seed_fits_its_two_words() -> None:
    for seed in (0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1):
        ints = _sequence(seed=seed).admit_ints
        low, high = ints[table.SEED_LOW], ints[table.SEED_HIGH]
        assert (low & 0xFFFFFFFF) | ((high & 0xFFFFFFFF) << 32) == seed


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_result_lines_are_found_by_step_and_row(drafts: int) -> None:
    lines, rows, top, most = 3, 2, 2, 1 + drafts
    places = most * (1 + top)
    width = table.RESULT_HEADER + places
    ints = array("i", range(lines * rows * width))
    floats = array("f", range(lines * rows * places))
    ring = ResultRing(memoryview(ints), memoryview(floats), (lines, rows, width), drafts)
    for step in range(7):
        for row, at in enumerate(ring.rows(step, rows)):
            first = ((step % lines) * rows + row) * width
            assert ring.ints[at] == first
            base = ((step % lines) * rows + row) * places
            token = first + table.RESULT_HEADER
            for index in range(most):
                found, behind = ring.logprob(at, index, 1), most + index * top
                assert (found.token_id, found.logprob) == (token + index, base + index)
                assert found.top == ((token + behind, base + behind),)
                assert ring.logprob(at, index, 0).top == ()
    assert len(ring.rows(1, 1)) == 1
