"""Rounds of verifying and drafting: the target's state is plain decoding's and the draft depths' is
that of a fresh run, to the bit, after every accepted count at every place."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import tiny_config, write_random
from support.draft_rig import DraftRig, Request, Round
from support.rig import Model, Traces, record, reference_step
from support.stepper import convert

from .conftest import SMALL, random_ids

NEW = 24
DEPTHS = (1, 2, 3)
CHUNKS = ("8x8,16x8", "8x8,16x8,32x8,64x8")  # through a ring of window pages, and of any length
Rigs = Callable[..., DraftRig]


@pytest.fixture(scope="module")
def rigs(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Rigs:
    """A rig that makes so many drafts a round; fresh runs are shared."""

    @cache
    def models(drafts: int, dtype: str) -> tuple[Model, Model, dict[Any, Any]]:
        scratch = tmp_path_factory.mktemp(f"drafts-{drafts}-{dtype}")
        made = []
        for buckets in CHUNKS:
            options = SMALL | {"extend_buckets": buckets, "spec_depth": drafts}
            machine = convert(small_checkpoint, scratch, dtype, **options)
            made.append(Model(machine.spec, machine.weights))
        return made[0], made[1], {}

    def make(drafts: int, dtype: str = "fp32", **given: Any) -> DraftRig:
        model, whole, fresh = models(drafts, dtype)
        return DraftRig(model, whole, **{"fresh": fresh} | given)

    return make


def prompt_of(rig: DraftRig, request: Request, order: random.Random) -> None:
    """Feed the prompt in chunks of any size."""
    while left := request.trace.prompt - request.length:
        rig.extend((request, order.randint(1, min(left, 16))))


def rounds_of(rig: DraftRig, request: Request, order: random.Random) -> None:
    """Rounds with any number of right guesses, as far as the trace says what is right."""
    while request.length + 1 + rig.drafts < len(request.trace.tokens):
        rig.verify(Round(request, order.randint(0, rig.drafts)))


@pytest.mark.parametrize("drafts", DEPTHS)
def test_every_accepted_count_at_every_place(rigs: Rigs, small_traces: Traces, drafts: int) -> None:
    """From prompts on both sides of pages, grid and the depths' own reach, each count after each
    other one, over garbage and shuffled pages."""
    order, rig = random.Random(drafts), rigs(drafts, pages=5)
    followed = set()
    for prompt in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17):
        request = Request(small_traces(prompt, at=prompt, new=NEW), slot=1 + prompt % 8)
        prompt_of(rig, request, order)
        rounds_of(rig, request, order)
        followed |= set(zip(request.accepted, request.accepted[1:], strict=False))
    assert len(followed) == (1 + drafts) ** 2


def test_rounds_in_bf16(rigs: Rigs, rounded_traces: Traces) -> None:
    order, rig = random.Random(0), rigs(3, "bf16")
    for prompt in (2, 13):
        request = Request(rounded_traces(prompt, new=NEW), slot=2)
        prompt_of(rig, request, order)
        rounds_of(rig, request, order)


def test_rounds_of_the_references(rigs: Rigs, small_traces: Traces) -> None:
    """They round otherwise than the native kernels that the traces are of."""
    order, rig = random.Random(0), rigs(2, run=reference_step, fresh={}, tolerance=1e-4)
    request = Request(small_traces(6, new=12), slot=2)
    prompt_of(rig, request, order)
    rounds_of(rig, request, order)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_engines_own_guesses(rigs: Rigs, small_traces: Traces, temperature: float) -> None:
    """Draws are plain decoding's whatever was guessed."""
    rig, order = rigs(3), random.Random(1)
    request = Request(small_traces(9, at=40, new=NEW, temperature=temperature), slot=1)
    prompt_of(rig, request, order)
    while request.length + 4 < len(request.trace.tokens):
        rig.verify(Round(request))


@pytest.mark.parametrize("seed", range(3))
def test_mixed_batches(rigs: Rigs, small_traces: Traces, seed: int) -> None:
    """Prompts, rows that ride along with one token, rounds, rows that do not draft, idle requests."""
    order, rig = random.Random(seed), rigs(1 + seed, pages=seed)
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


@pytest.mark.parametrize("drafts", DEPTHS)
@pytest.mark.parametrize("before", range(1, 5))
def test_a_snapshot_taken_inside_an_accepted_run(
    rigs: Rigs, small_traces: Traces, drafts: int, before: int
) -> None:
    """A round that begins `before` tokens before the grid leaves the snapshot at the grid, if it
    gets there; a request that starts from it goes on like one that did not."""
    rig, boundary = rigs(drafts), 16
    first, end = rig.model.spec.max_running + 1, boundary - before
    for right in range(drafts + 1):
        giving = Request(small_traces(end, at=2, new=NEW), slot=1)
        prompt_of(rig, giving, random.Random(right))
        giving.snapshots = (first,)
        rig.verify(Round(giving, right))
        while giving.length < boundary:
            rig.verify(Round(giving, 0))
        assert int(rig.rig.pools["snapshot_lengths"][first]) == boundary
        start_from_snapshot(rig, giving, first, boundary, small_traces.model)


@pytest.mark.parametrize("drafts", DEPTHS)
def test_snapshots_taken_by_a_chunk(rigs: Rigs, small_traces: Traces, drafts: int) -> None:
    rig = rigs(drafts)
    first = rig.model.spec.max_running + 1
    giving = Request(small_traces(27, at=5, new=NEW), slot=1)
    rig.extend((giving, 11))
    giving.snapshots = (first, first + 1)
    rig.extend((giving, 16))
    for slot, boundary in ((first, 16), (first + 1, 24)):
        assert int(rig.rig.pools["snapshot_lengths"][slot]) == boundary
        start_from_snapshot(rig, giving, slot, boundary, small_traces.model)


def start_from_snapshot(
    rig: DraftRig, giving: Request, snapshot: int, boundary: int, plain: Model
) -> None:
    """A request with the same beginning, then other tokens, takes the snapshot and drafts."""
    prompt = [*giving.trace.tokens[:boundary], 7, 9, 11]
    taking = Request(record(plain, prompt, 12), slot=2, length=boundary, source=snapshot)
    rig.rig.share(2, 1, boundary)
    rig.extend((taking, 1), spare=16)  # a bucket with lines for the shared pages
    prompt_of(rig, taking, random.Random(boundary))
    rounds_of(rig, taking, random.Random(boundary))
    rig.check(giving)


def test_many_depths_of_both_kinds(tmp_path: Path, native_library: Path) -> None:
    """The published models' depths: full ones between local ones, drafts beyond a page and a window."""
    config = tiny_config()
    local = [0, 2, 4, 5, 6, 7]
    config["mtp_config"] = {"num_nextn_predict_layers": 8, "local_layer_ids": local}
    folder, made = write_random(tmp_path / "eight", config, seed=2), []
    sizes = SMALL | {"snapshot_grid": 12, "extend_buckets": CHUNKS[1]}
    for drafts in (0, 8):
        machine = convert(folder, tmp_path, **sizes, spec_depth=drafts)
        made.append(Model(machine.spec, machine.weights))
    traces, order = Traces(made[0], random_ids()), random.Random(0)
    for prompt in (1, 14):
        rig = DraftRig(made[1], made[1], pages=2)
        request = Request(traces(prompt, new=30), slot=2)
        prompt_of(rig, request, order)
        rounds_of(rig, request, order)
