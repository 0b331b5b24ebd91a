"""What nobody may read may hold anything: NaN, 1e30 or garbage there changes no live bit.

Poisoned are slot 0, page 0 and line 0, free slots and pages, positions of live pages that are not
written yet, unmapped table entries, what a row buffer holds beside its live rows, and the
embedding that padded tokens get. Inert rows and finished requests change nothing but the result line.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import open_engine
from support.rig import GARBAGE, INERT, STEADY, Flow, Model, Result, Rig, StepCode, Traces, bits
from support.stepper import recorded
from torch import Tensor

from inkling_engine.artifacts.spec import Bucket
from inkling_engine.compile.driver import Chunk
from inkling_engine.kernels import table
from inkling_engine.runtime.engine import Engine
from inkling_engine.runtime.requests import Choice, Request
from inkling_engine.runtime.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("native_library")

VALUES = pytest.mark.parametrize("value", [math.nan, 1e30, -math.inf])
EXTEND = [Bucket(kind="extend", rows=rows, tokens=tokens) for rows, tokens in ((4, 8), (8, 40))]
LINES = ("request_state", "request_ints", "request_floats", "token_counts", "snapshot_slots")


def poison_dead(rig: Rig, flows: Sequence[Flow], value: float) -> None:
    """Poison all of the pools but what `flows` own: their slot, line, pages up to their length."""
    slots = {flow.slot for flow in flows if flow.admitted}
    for name, pool in rig.pools.items():
        if name.startswith("conv_"):
            dead = [slot for slot in range(pool.shape[1]) if slot not in slots]
            pool[:, dead] = value
        elif name in LINES:
            dead = [slot for slot in range(len(pool)) if slot not in slots]
            pool[dead] = value if pool.is_floating_point() else GARBAGE
        elif name.startswith("kv_"):
            poison_positions(rig, name.removeprefix("kv_"), flows, value)
    rig.pools["results_int"].fill_(GARBAGE)
    rig.pools["results_float"].fill_(value)


def poison_positions(rig: Rig, kind: str, flows: Sequence[Flow], value: float) -> None:
    """Poison every position of a KV pool that holds no token which a later one may see."""
    spec, pool, lines = rig.model.spec, rig.pools[f"kv_{kind}"], rig.pools[f"{kind}_table"]
    page, past = spec.page_size, spec.shape.local.window - 1
    live = torch.zeros(pool.shape[1], page, dtype=torch.bool)
    for flow in flows:
        first = max(0, flow.length - past) if kind == "window" else 0
        seen = torch.arange(first, flow.length)
        live[lines[flow.slot][seen // page % lines.shape[1]].long(), seen % page] = True
    pool.permute(1, 4, 0, 2, 3, 5)[~live] = value


def garbage_rows(rows: dict[str, Tensor], live: int, value: float) -> None:
    """Fill what the row inputs hold beside their `live` first rows and beside one-shot lines."""
    used = int(rows["row_counts"].sum())
    for name in ("row_sources", "row_flags"):
        rows[name][live:] = GARBAGE
    rows["token_ids"][used:] = GARBAGE
    free = rows["admit_ints"][:, table.ADMIT_SLOT] == 0
    rows["admit_ints"][free, 1:] = GARBAGE
    rows["admit_floats"][free] = value
    rows["snapshot_updates"][rows["snapshot_updates"][:, 0] == 0, 1:] = GARBAGE
    unused = rows["page_updates"][:, 1] == 0
    rows["page_updates"][unused] = torch.tensor([GARBAGE, 0, GARBAGE, GARBAGE], dtype=torch.int32)


class Poisoner(Rig):
    """A rig that poisons before every step all that its `flows` do not own."""

    def use(self, flows: Sequence[Flow], value: float) -> Poisoner:
        """Poison with `value` around `flows` from now on."""
        self.flows, self.value = flows, value
        return self

    def replay(self, bucket: Bucket, rows: dict[str, Tensor]) -> Result:
        """Poison pools and row inputs, then run."""
        poison_dead(self, self.behind(rows), self.value)
        live = int((rows["row_slots"] > 0).sum())
        if not rows["row_slots"][live:].any():
            garbage_rows(rows, live, self.value)
        return super().replay(bucket, rows)

    def behind(self, rows: dict[str, Tensor]) -> list[Flow]:
        """The flows as they were before the step that `rows` describe."""
        counts = dict(zip(rows["row_slots"].tolist(), rows["row_counts"].tolist(), strict=True))
        admitted = rows["admit_ints"][:, table.ADMIT_SLOT].tolist()
        return [
            Flow(flow.trace, flow.slot, flow.length - counts.get(flow.slot, 0), admitted=True)
            for flow in self.flows
            if flow.admitted and flow.slot not in admitted
        ]


@VALUES
@pytest.mark.parametrize("size", ["small", "ring"])
def test_everything_that_is_not_live_may_hold_anything(
    size: str, small: Model, ring: Model, small_traces: Traces, value: float
) -> None:
    """Batches of 3, 5, 6 and 7 rows in buckets of 4 and 8, prompts of 5 in 8 tokens, decodes."""
    choose = random.Random(2)
    flows = [Flow(small_traces(5, at=5 * n, new=8), 1 + n) for n in range(7)]
    rig = Poisoner(small if size == "small" else ring, pages=3).use(flows, value)
    rig.advance(EXTEND[0], [(flows[0], 5)])
    rig.advance(EXTEND[0], [(flow, 2) for flow in flows[1:4]])
    rig.advance(EXTEND[1], [(flow, flow.left) for flow in flows[1:]])
    for rows in (3, 5, 6, 7, 7, 7, 7, 7, 7):
        capacity = 4 if rows < 4 else 8
        bucket = Bucket(kind="decode", rows=capacity, tokens=capacity)
        batch = [flow for flow in choose.sample(flows, rows) if not flow.done]
        rig.advance(bucket, [(flow, 1) for flow in batch])


def test_a_step_poisons_what_this_module_says(small: Model, small_traces: Traces) -> None:
    """The poison is where live memory is, unless it is kept out: a flow left out is destroyed."""
    flow = Flow(small_traces(22, at=154, new=10), 4)
    rig = Poisoner(small).use([], math.nan)
    rig.advance(EXTEND[1], [(flow, 13)])
    with pytest.raises(AssertionError):
        rig.advance(EXTEND[1], [(flow, 9)])


@VALUES
def test_padded_tokens_reach_no_live_row_and_no_expert(
    small: Model, small_traces: Traces, value: float
) -> None:
    """Padded tokens are token 0, whose embedding is poisoned: 5 rows in a bucket of 8."""
    embed = small.weights["embed"].clone()
    embed[0] = value
    rig = Rig(Model(small.spec, {**small.weights, "embed": embed}))
    flows = [Flow(small_traces(9, at=9 * n, new=4), 1 + n) for n in range(5)]
    assert all(0 not in flow.trace.tokens for flow in flows)
    rig.advance(Bucket(kind="extend", rows=8, tokens=60), [(flow, 9) for flow in flows])
    decode = Bucket(kind="decode", rows=8, tokens=8)
    with recorded("router", "experts") as calls:
        rig.advance(decode, [(flow, 1) for flow in flows])
    for router, experts in zip(calls["router"], calls["experts"], strict=True):
        assert all(not result[5:].any() for result in router.result), "padded tokens are routed"
        assert not experts.result[5:].any(), "padded tokens reach experts"
    assert len(calls["router"]) == small.spec.shape.layers - small.spec.shape.dense_layers


def changed(rig: Rig, action: Callable[[], object]) -> set[str]:
    """Names of the pools that `action` changes."""
    before = {name: pool.clone() for name, pool in rig.pools.items()}
    action()
    return {
        name for name, pool in rig.pools.items() if not torch.equal(bits(pool), bits(before[name]))
    }


def in_progress(model: Model, traces: Traces) -> tuple[Rig, list[Flow]]:
    """A rig with three requests that have gone some way."""
    rig, flows = Rig(model), [Flow(traces(13, at=91, new=10), slot) for slot in (2, 5, 8)]
    rig.advance(EXTEND[1], [(flow, 7 + i) for i, flow in enumerate(flows)])
    return rig, flows


def test_a_step_without_live_rows_changes_only_the_result_line(
    small: Model, small_traces: Traces
) -> None:
    """Empty buffers, inert rows with tokens, and rows whose count is 0."""
    rig, _ = in_progress(small, small_traces)
    for bucket in (*small.spec.buckets, *EXTEND):
        empty = {name: rows.zero_() for name, rows in rig.rows(bucket, [INERT]).items()}
        counted = rig.rows(bucket, [INERT] * min(bucket.rows, bucket.tokens))
        uncounted = rig.rows(bucket, [Chunk(slot=5, start=7)])
        uncounted["row_counts"].zero_()
        uncounted["page_updates"].zero_()
        uncounted["snapshot_updates"].zero_()
        for rows in (empty, counted, uncounted):
            wanted = {"step_counter", "results_int", "results_float"}
            assert changed(rig, partial(rig.replay, bucket, rows)) == wanted
            line = int(rig.pools["step_counter"][0]) - 1
            assert not rig.pools["results_int"][line, : bucket.rows].any()
            assert not rig.pools["results_float"][line, : bucket.rows].any()


def test_inert_rows_leave_every_slot_and_page_alone(small: Model, small_traces: Traces) -> None:
    """Three live rows among five inert ones: a request in the last slot, outside the batch, stays."""
    rig, flows = in_progress(small, small_traces)
    parked = flows.pop()
    for count in (3, 1, 1):
        batch = [None, (flows[0], count), None, None, (flows[1], count), None]
        rig.advance(EXTEND[1], batch)
        rig.check_state(parked)
    snapshots = rig.pools["conv_attn"][:, 1 + small.spec.max_running :]
    assert snapshots.isnan().all() and rig.pools["conv_attn"][:, 0].isnan().all()
    assert rig.pools["kv_full"][:, 0].isnan().all() and rig.pools["kv_window"][:, 0].isnan().all()


def test_a_finished_request_changes_nothing_more(small: Model, small_traces: Traces) -> None:
    """Rows of a request that has ended are inert, however often a stale batch names it."""
    rig, flows = in_progress(small, small_traces)
    rig.pools["request_state"][5, table.FINISH] = table.Finish.STOP
    stale = Chunk(slot=5, start=flows[1].length, tokens=flows[1].trace.tokens[8:9])
    before = rig.pools["request_state"][5].clone(), rig.pools["token_counts"][5].clone()
    for _ in range(3):
        batch = [flows[0].take(1), stale, flows[2].take(1)]
        result = rig.step(Bucket(kind="decode", rows=4, tokens=4), batch)
        assert not result.ints[1].any() and not result.logits[1].any()
        for row in (0, 2):
            rig.check(flows[row], result, row)
    assert torch.equal(rig.pools["request_state"][5], before[0])
    assert torch.equal(rig.pools["token_counts"][5], before[1])
    rig.check_state(flows[1])


def poison_free(engine: Engine, value: float) -> None:
    """Fill everything that nobody holds, slot 0 and page 0 included."""
    scheduler = engine.scheduler
    for slot in (0, *scheduler.holdings.slots.free, *scheduler.holdings.prefix.slots.free):
        engine.pool.poison_slot(slot, value)
    for page in (0, *scheduler.holdings.full_pages.free):
        engine.pool.poison_page("full", page, value)
    for page in (0, *scheduler.holdings.window_pages.free):
        engine.pool.poison_page("window", page, value)


def ask(kind: int) -> tuple[list[int], SamplingParams]:
    """Request number `kind`: prompts of 1 to 30 tokens, greedy and sampled, 1 to 9 new tokens."""
    choose = random.Random(kind)
    prompt = choose.choices(range(151), k=choose.randint(1, 30))
    heat, tokens = float(kind % 2), choose.randint(1, 9)
    return prompt, SamplingParams(
        temperature=heat, seed=kind, max_tokens=tokens, logprobs=2, ignore_eos=True
    )


@settings(max_examples=15)
@given(
    events=st.lists(
        st.tuples(st.sampled_from(("submit", "submit", "step", "abort")), st.integers(0, 15)),
        min_size=1,
        max_size=30,
    ),
    value=st.sampled_from((math.nan, 1e30)),
)
def test_freed_slots_and_pages_may_hold_anything(
    served: Model, exported: StepCode, events: list[tuple[str, int]], value: float
) -> None:
    """Any traffic over poisoned memory gives what each request gives alone on clean memory."""
    engine, _ = open_engine(served, exported)
    requests: list[tuple[int, Request]] = []
    for event, number in events:
        if event == "submit":
            requests.append((number, engine.submit(*ask(number))))
        elif event == "abort" and requests:
            engine.abort(requests[number % len(requests)][1])
        else:
            poison_free(engine, value)
            engine.step()
    while engine.scheduler.unfinished():
        poison_free(engine, value)
        engine.step()
    engine.scheduler.check()
    for number, request in requests:
        found, wanted = request.completion().choices[0], alone(served, exported, number)
        if found.finish_reason == "abort":
            assert found.token_ids == wanted.token_ids[: len(found.token_ids)]
        else:
            assert found == wanted


_ALONE: dict[int, Choice] = {}


def alone(served: Model, exported: StepCode, number: int) -> Choice:
    """The choice of request `number` in an engine of its own."""
    if number not in _ALONE:
        engine, _ = open_engine(served, exported)
        _ALONE[number] = engine.generate(*ask(number))[0].choices[0]
    return _ALONE[number]


@VALUES
def test_pages_behind_the_window_may_hold_anything(
    served: Model, exported: StepCode, value: float
) -> None:
    """A long request returns window pages as it goes; what others write there it does not see."""
    prompt = random.Random(4).choices(range(151), k=30)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
    engine, _ = open_engine(served, exported, prefix_cache=False)
    wanted = engine.generate(prompt, params)[0].choices
    request = engine.submit(prompt, params)
    while not request.finished:
        poison_free(engine, value)
        engine.step()
    assert request.completion().choices == wanted


def test_the_very_first_requests_see_no_reserved_memory(served: Model, exported: StepCode) -> None:
    """Eight at once over a poisoned slot 0 are in slots 1 to 8; a ninth waits."""
    engine, _ = open_engine(served, exported)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    later = [engine.generate([number], params)[0].choices for number in range(9)]
    engine, _ = open_engine(served, exported)
    poison_free(engine, math.nan)
    requests = [engine.submit([number], params) for number in range(9)]
    engine.step()
    assert {s.slot for s in engine.scheduler.unfinished()} == set(range(9))
    assert [s.slot for s in engine.scheduler.waiting] == [0]
    assert engine.scheduler.accounting()["slots"].free == 0
    while not all(request.finished for request in requests):
        engine.step()
    assert [request.completion().choices for request in requests] == later


def test_idle_steps_touch_no_byte(served: Model, exported: StepCode) -> None:
    engine, _ = open_engine(served, exported)
    engine.generate(*ask(3))
    before = {name: pool.clone() for name, pool in engine.pool.tensors.items()}
    for _ in range(1000):
        assert engine.step() == []
    for name, pool in engine.pool.tensors.items():
        assert name in STEADY or torch.equal(bits(pool), bits(before[name]))
    assert torch.equal(engine.pool.tensors["step_counter"], before["step_counter"])
