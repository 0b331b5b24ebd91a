"""Rounds of verifying and drafting: the target's state is plain decoding's and the draft depths' is
that of a fresh run, to the bit, after every accepted count at every place."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.checkpoints import tiny_config, write_random
from support.draft_rig import (
    DraftRig,
    DraftRigs,
    Request,
    Round,
    feed_prompt,
    run_rounds,
    start_from_snapshot,
)
from support.programs import Programs
from support.rig import Model, Traces, reference_step
from support.stepper import convert

from .conftest import DRAFT_CHUNKS, SMALL, random_ids

NEW = 24
DEPTHS = (1, 2, 3)


@pytest.mark.parametrize("drafts", DEPTHS)
def test_every_accepted_count_at_every_place(
    draft_rigs: DraftRigs, small_traces: Traces, drafts: int
) -> None:
    """From prompts on both sides of pages, grid and the depths' own reach, each count after each
    other one, over garbage and shuffled pages."""
    order, rig = random.Random(drafts), draft_rigs(drafts, pages=5)
    followed = set()
    for prompt in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17):
        request = Request(small_traces(prompt, at=prompt, new=NEW), slot=1 + prompt % 8)
        feed_prompt(rig, request, order)
        run_rounds(rig, request, order)
        followed |= set(zip(request.accepted, request.accepted[1:], strict=False))
    assert len(followed) == (1 + drafts) ** 2


def test_rounds_in_bf16(draft_rigs: DraftRigs, rounded_traces: Traces) -> None:
    order, rig = random.Random(0), draft_rigs(3, "bf16")
    for prompt in (2, 13):
        request = Request(rounded_traces(prompt, new=NEW), slot=2)
        feed_prompt(rig, request, order)
        run_rounds(rig, request, order)


def test_rounds_of_the_references(draft_rigs: DraftRigs, small_traces: Traces) -> None:
    """They round otherwise than the native kernels that the traces are of."""
    order, rig = random.Random(0), draft_rigs(2, run=reference_step, fresh={}, tolerance=1e-4)
    request = Request(small_traces(6, new=12), slot=2)
    feed_prompt(rig, request, order)
    run_rounds(rig, request, order)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_engines_own_guesses(
    draft_rigs: DraftRigs, small_traces: Traces, temperature: float
) -> None:
    """Draws are plain decoding's whatever was guessed."""
    rig, order = draft_rigs(3), random.Random(1)
    request = Request(small_traces(9, at=40, new=NEW, temperature=temperature), slot=1)
    feed_prompt(rig, request, order)
    while request.length + 4 < len(request.trace.tokens):
        rig.verify(Round(request))


@pytest.mark.parametrize("seed", range(3))
def test_mixed_batches(draft_rigs: DraftRigs, small_traces: Traces, seed: int) -> None:
    """Prompts, rows that ride along with one token, rounds, rows that do not draft, idle requests."""
    order, rig = random.Random(seed), draft_rigs(1 + seed, pages=seed)
    heat = (0.0, 0.8)
    live = [
        Request(
            small_traces(1 + 5 * i, at=3 * i, new=NEW, temperature=heat[i % 2]),
            slot=8 - i,
            drafting=i != 3,
        )
        for i in range(6)
    ]
    for _ in range(30):
        going = [r for r in live if r.length + 2 + rig.drafts < len(r.trace.tokens)]
        chosen = order.sample(going, order.randint(1, len(going))) if going else []
        prompts = [r for r in chosen if r.length < r.trace.prompt]
        if prompts:
            counts = {r.slot: order.randint(1, min(4, r.trace.prompt - r.length)) for r in prompts}
            rig.extend(*[(r, counts.get(r.slot, 0)) for r in chosen])
        elif chosen:
            rounds = [Round(r, order.choice([None, *range(1 + rig.drafts)])) for r in chosen]
            rig.verify(*rounds, spare=order.randint(0, 2))
    assert all(request.accepted for request in live)
    assert not any(live[3].accepted)


@pytest.mark.parametrize("last", range(1, 6))
@pytest.mark.parametrize("swapped", [False, True])
def test_a_last_chunk_as_long_as_a_round(
    draft_rigs: DraftRigs, small_traces: Traces, last: int, swapped: bool
) -> None:
    """Of K + 1 tokens among others, beside a request that drafts already, in both orders."""
    rig = draft_rigs(3)
    drafting = Request(small_traces(6, new=NEW), slot=1)
    coming = Request(small_traces(8 + last, at=9, new=NEW), slot=2)
    rig.extend((drafting, 6), (coming, 8))
    rig.verify(Round(drafting, 2))
    batch = [(drafting, 0), (coming, last)]
    rig.extend(*(reversed(batch) if swapped else batch))
    rig.verify(Round(drafting, 1), Round(coming, 3))
    rig.verify(Round(coming, 0), Round(drafting, 3))


def test_a_first_round_that_rejects_everything(draft_rigs: DraftRigs, small_traces: Traces) -> None:
    """After a prompt of one token, alone and beside a request under way."""
    rig = draft_rigs(3)
    one, other = (Request(small_traces(1, at=i, new=NEW), slot=1 + i) for i in range(2))
    rig.extend((one, 1))
    rig.verify(Round(one, 0))
    rig.extend((other, 1), (one, 0))
    rig.verify(Round(one, 3), Round(other, 0))
    rig.verify(Round(other, 2), Round(one, 0))


@pytest.mark.parametrize("drafts", DEPTHS)
@pytest.mark.parametrize("before", range(1, 5))
def test_a_snapshot_taken_inside_an_accepted_run(
    draft_rigs: DraftRigs, small_traces: Traces, drafts: int, before: int
) -> None:
    """A round that begins `before` tokens before the grid leaves the snapshot at the grid, if it
    gets there; a request that starts from it goes on like one that did not."""
    rig, boundary = draft_rigs(drafts), 16
    first, end = rig.model.spec.max_running + 1, boundary - before
    for right in range(drafts + 1):
        giving = Request(small_traces(end, at=2, new=NEW), slot=1)
        feed_prompt(rig, giving, random.Random(right))
        giving.snapshots = (first,)
        rig.verify(Round(giving, right))
        while giving.length < boundary:
            rig.verify(Round(giving, 0))
        assert int(rig.rig.pools["snapshot_lengths"][first]) == boundary
        start_from_snapshot(rig, giving, first, boundary, small_traces.model)


@pytest.mark.parametrize("drafts", DEPTHS)
def test_snapshots_taken_by_a_chunk(
    draft_rigs: DraftRigs, small_traces: Traces, drafts: int
) -> None:
    rig = draft_rigs(drafts)
    first = rig.model.spec.max_running + 1
    giving = Request(small_traces(27, at=5, new=NEW), slot=1)
    rig.extend((giving, 11))
    giving.snapshots = (first, first + 1)
    rig.extend((giving, 16))
    for slot, boundary in ((first, 16), (first + 1, 24)):
        assert int(rig.rig.pools["snapshot_lengths"][slot]) == boundary
        start_from_snapshot(rig, giving, slot, boundary, small_traces.model)


def test_many_depths_of_both_kinds(tmp_path: Path, native_library: Path) -> None:
    """The published models' depths: full ones between local ones, drafts beyond a page and a window."""
    config = tiny_config()
    local = [0, 2, 4, 5, 6, 7]
    config["mtp_config"] = {"num_nextn_predict_layers": 8, "local_layer_ids": local}
    folder, made = write_random(tmp_path / "eight", config, seed=2), []
    sizes = SMALL | {"snapshot_grid": 12, "extend_buckets": DRAFT_CHUNKS[1]}
    for drafts in (0, 8):
        machine = convert(folder, tmp_path, **sizes, spec_depth=drafts)
        made.append(Model(machine.spec, machine.weights))
    traces, order = Traces(made[0], random_ids()), random.Random(0)
    for prompt in (1, 14):
        rig = DraftRig(made[1], made[1], pages=2)
        request = Request(traces(prompt, new=30), slot=2)
        feed_prompt(rig, request, order)
        run_rounds(rig, request, order)


def test_rounds_of_compiled_programs(drafting_engine: Path, trained_traces: Traces) -> None:
    """Prompts on both sides of the window of 128; rows beside each other, with idle ones."""
    programs, order = Programs(drafting_engine), random.Random(0)
    rig = DraftRig(programs.model, programs.model, programs, 4, buckets=[*programs.entries])
    live = [
        Request(trained_traces(length, at=30 * slot, new=NEW, temperature=heat), slot)
        for slot, (length, heat) in enumerate(((3, 0.0), (131, 0.7), (190, 0.0)), start=1)
    ]
    for request in live:
        rig.extend((request, request.trace.prompt))
    while going := [r for r in live if r.length + 1 + rig.drafts < len(r.trace.tokens)]:
        chosen = order.sample(going, order.randint(1, len(going)))
        rig.verify(*[Round(r, order.choice([None, *range(1 + rig.drafts)])) for r in chosen])
    assert all(len(set(request.accepted)) > 2 for request in live)
