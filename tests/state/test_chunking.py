"""A request's tokens, logits, conv windows and KV are the same bits however it is scheduled.

Requests are fed in random chunks, rows, orders, buckets, neighbours and physical pages; after
each step every one of them is compared with its trace, which was recorded alone, token by token.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.programs import Programs
from support.rig import Flow, Model, Rig, Trace, Traces
from support.schedules import Batch, fit, run_to_the_end

from inkling_engine.artifacts.spec import Bucket
from inkling_engine.kernels._conv import window

pytestmark = pytest.mark.usefixtures("native_library")

KINDS = ((1, 0), (2, 1), (3, 0), (4, 1), (7, 0), (8, 1), (9, 0), (13, 1), (17, 0), (22, 0), (40, 1))


def some_traces(traces: Traces, count: int, choose: random.Random) -> list[Trace]:
    """`count` small traces of different prompt lengths, greedy and sampled, 10 tokens after each."""
    kinds = choose.sample(KINDS, count)
    return [traces(n, at=7 * n, new=10, temperature=float(heat)) for n, heat in kinds]


@pytest.mark.parametrize("size", ["small", "ring"])
@settings(max_examples=25)
@given(
    choose=st.randoms(use_true_random=False),
    count=st.integers(1, 8),
    pages=st.integers(0, 9),
    own=st.booleans(),
)
def test_any_schedule_gives_each_request_its_own_bits(
    size: str,
    small: Model,
    ring: Model,
    small_traces: Traces,
    choose: random.Random,
    count: int,
    pages: int,
    own: bool,
) -> None:
    rig = Rig(small if size == "small" else ring, pages=pages)
    slots = choose.sample(range(1, 9), count)
    flows = list(map(Flow, some_traces(small_traces, count, choose), slots))
    run_to_the_end(rig, flows, choose, own=own)


@pytest.mark.parametrize("seed", range(4))
def test_lengths_beyond_window_extent_and_log_floor(
    trained: Model, trained_traces: Traces, seed: int
) -> None:
    choose = random.Random(seed)
    flows = [Flow(trained_traces(530, new=6), 3), Flow(trained_traces(262, at=400, new=6), 7)]
    run_to_the_end(Rig(trained, pages=seed), flows, choose, own=seed % 2 == 0)


@pytest.mark.parametrize("seed", range(3))
def test_bf16_state_is_the_same_bits_too(rounded: Model, rounded_traces: Traces, seed: int) -> None:
    choose = random.Random(seed)
    flows = list(map(Flow, some_traces(rounded_traces, 4, choose), choose.sample(range(1, 9), 4)))
    run_to_the_end(Rig(rounded, pages=seed), flows, choose, own=seed % 2 == 0)


@pytest.mark.parametrize("seed", range(4))
def test_compiled_programs_give_the_same_bits(
    programs: Programs, trained_traces: Traces, seed: int
) -> None:
    flows = [Flow(trained_traces(530, new=6), 8), Flow(trained_traces(262, at=400, new=6), 1)]
    flows += [Flow(trained_traces(n, at=n, new=6, temperature=1.0), 1 + n) for n in (1, 2, 3, 4)]
    rig = Rig(programs.model, programs, pages=seed)
    run_to_the_end(rig, flows, random.Random(seed), own=True)


def test_a_few_chunks_across_window_extent_and_log_floor(ring: Model, small_traces: Traces) -> None:
    """40 tokens in chunks of 5, 1, 2 and 16 beside a decoding neighbour, then 10 of their own."""
    flow, other = Flow(small_traces(40, at=280, new=10), 3), Flow(small_traces(7, at=49, new=10), 6)
    rig, bucket = Rig(ring, pages=1), Bucket(kind="extend", rows=4, tokens=24)
    rig.advance(bucket, [(other, 7)])
    for count in (5, 1, 2, 16, 16):
        rig.advance(bucket, [(other, 1), None, (flow, count)])
    while not flow.done:
        rig.advance(Bucket(kind="decode", rows=2, tokens=2), [(flow, 1)])


@pytest.mark.parametrize("total", [7, 8, 9, 15, 16, 17, 31, 32, 33])
def test_packs_around_the_size_of_a_bucket(small: Model, small_traces: Traces, total: int) -> None:
    trace = small_traces(40, at=280, new=10)
    for cuts in ([], [1], [total - 1], [total // 2], [1, 2], [total // 3, total // 2, total - 2]):
        batch: Batch = [
            (Flow(trace, 8 - row), end - start)
            for row, (start, end) in enumerate(pairwise([0, *cuts, total]))
        ]
        for bucket in fit(small.spec, batch)[:2]:
            fresh: Batch = [(Flow(pair[0].trace, pair[0].slot), pair[1]) for pair in batch if pair]
            Rig(small).advance(bucket, fresh)


def test_prompts_shorter_than_the_window_in_a_larger_bucket(
    small: Model, small_traces: Traces
) -> None:
    """The window is that of the last live tokens, whatever pads the bucket; older inputs are 0."""
    channels = small.spec.shape.hidden
    for length in (1, 2, 3, 4, 5, 7):
        rig, flow = Rig(small), Flow(small_traces(40, at=280, new=10), 5)
        rig.advance(Bucket(kind="extend", rows=8, tokens=8), [(flow, length)])
        kept = window(rig.pools["conv_attn"][0, 5], length).abs().sum(-1) / channels
        assert (kept > 0).tolist() == [length > 2, length > 1, True]
        rig.advance(Bucket(kind="decode", rows=1, tokens=1), [(flow, 1)])


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_every_live_count_in_every_decode_bucket(
    small: Model, small_traces: Traces, rows: int
) -> None:
    bucket = Bucket(kind="decode", rows=rows, tokens=rows)
    for live in range(1, rows + 1):
        rig = Rig(small, pages=live)
        flows = [
            Flow(small_traces(n, at=7 * n, new=10), 8 - i) for i, (n, _) in enumerate(KINDS[:live])
        ]
        for flow in flows:
            rig.advance(Bucket(kind="extend", rows=1, tokens=16), [(flow, flow.left)])
        for step in range(3):
            rig.advance(bucket, [(flow, 1) for flow in flows[step % live :] + flows[: step % live]])


def test_a_slot_shows_nothing_of_its_earlier_requests(small: Model, small_traces: Traces) -> None:
    trace, rig = small_traces(40, at=280, new=10), Rig(small)
    orders = [*range(1, 41), *range(40, 0, -1), *random.Random(5).sample(range(1, 41), 40)]
    for length in orders:
        rig.advance(Bucket(kind="extend", rows=1, tokens=length), [(Flow(trace, 1), length)])
