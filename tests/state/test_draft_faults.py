"""Planted faults of drafting: each turns a check red that is green without it.

Faults that a fresh run would share, such as a wrong input of a depth, are caught by numbers that
come from elsewhere: the specification's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.checkpoints import write_appendix_a
from support.draft_rig import DRAFT_KV, DraftRigs, Request, Round, feed_prompt, start_from_snapshot
from support.faults import Arguments, Call, Plant, before, given
from support.rig import Tensors, Traces
from support.stepper import Stepper, convert, recorded
from torch import Tensor

from inkling_engine.artifacts.spec import Bucket, EngineSpec
from inkling_engine.compile import steps
from inkling_engine.compile.driver import Machine
from inkling_engine.compile.models.inkling import drafts
from inkling_engine.compile.models.inkling.block import Blocks
from inkling_engine.compile.models.inkling.calls import Calls
from inkling_engine.kernels import table
from inkling_engine.kernels.draft_metadata import DraftMeta
from inkling_engine.kernels.step_metadata import StepMeta

from .conftest import SMALL

DRAFTS, NEW, GRID = 3, 24, 16
IDS = [(7 * i * i + 3 * i + 1) % 150 for i in range(40)]
DEPTH_0 = (0.060048, 0.009646, 0.066778, -0.010941)
DEPTH_1 = (-0.027681, -0.004448, 0.022608, -0.002058)
COMMIT, METADATA = (steps, "commit"), (steps, "draft_metadata")


class World(NamedTuple):
    """What a check needs."""

    rigs: DraftRigs
    traces: Traces
    appendix: Machine


def rounds(world: World) -> None:
    """Rounds with many and few right guesses."""
    rig = world.rigs(DRAFTS, fresh={})
    request = Request(world.traces(11, at=4, new=NEW), slot=2)
    feed_prompt(rig, request, random.Random(0))
    for right in (DRAFTS, 0, 1, DRAFTS, 2, 0):
        rig.verify(Round(request, right))


def snapshot(world: World) -> None:
    """A round that crosses the grid, one that does not get there, and what starts from them."""
    for right in (DRAFTS, 0):
        rig = world.rigs(DRAFTS, fresh={})
        request = Request(world.traces(GRID - 2, at=2, new=NEW), slot=1)
        feed_prompt(rig, request, random.Random(0))
        request.snapshots = (kept := 1 + rig.model.spec.max_running,)
        rig.verify(Round(request, right))
        while request.length < GRID:
            rig.verify(Round(request, 0))
        assert int(rig.rig.pools["snapshot_lengths"][kept]) == GRID
        start_from_snapshot(rig, request, kept, GRID, world.traces.model)


def numbers(world: World) -> None:
    """The specification's draft logits, of a local and of a full depth."""
    stepper = Stepper(Machine(world.appendix.spec, world.appendix.weights), native=True)
    with recorded("head") as calls:
        stepper.feed(IDS)
    assert (stepper.sampled, stepper.drafts) == (113, [97, 7])
    for call, expected in zip(calls["head"][1:], (DEPTH_0, DEPTH_1), strict=True):
        assert torch.allclose(call.result[0, :4], torch.tensor(expected), rtol=0, atol=1e-5)


CHECKS = (rounds, snapshot, numbers)


def meta_with(**changes: Callable[[DraftMeta], Tensor]) -> Plant:
    """A draft phase whose metadata differs."""

    def change(call: Call, a: Arguments) -> Any:
        meta = DraftMeta(*call(a))
        return meta._replace(**{name: value(meta) for name, value in changes.items()})

    return before(change, METADATA)


def one_more(call: Call, a: Arguments) -> None:
    """A round keeps one token more than it accepted."""
    call(a)
    a["request_state"][a["slots"].long(), table.LENGTH] += 1


def all_verified(call: Call, a: Arguments) -> None:
    """Everything that was verified counts."""
    call(a)
    end = a["lengths"] + a["starts"].diff()
    a["request_state"][a["slots"].long(), table.LENGTH] = end.to(torch.int32)


def unreached_boundary(call: Call, a: Arguments) -> None:
    """A boundary that only rejected drafts reached is taken off the list."""
    call(a)
    for slot, captured in zip(a["slots"].tolist(), a["destination_slots"].tolist(), strict=True):
        if captured[0]:
            a["snapshot_slots"][slot] = 0


def recorded_early(call: Call, a: Arguments) -> Any:
    """The snapshot of a boundary is taken one token before it."""
    meta = StepMeta(*call(a))
    return meta._replace(destination_offsets=(meta.destination_offsets - 1).clamp(min=0))


def next_token(call: Call, a: Arguments) -> None:
    """Drafts are compared with the token after the one that they guess."""
    call(a | {"tokens": a["tokens"].roll(-1)})


def late_stash(call: Call, a: Arguments) -> None:
    """The stash holds the rows one position off."""
    call(a)
    slots = a["slots"].unique().long()
    a["draft_hidden"][slots] = a["draft_hidden"][slots].roll(1, 1)


def late_tokens(call: Call, a: Arguments) -> None:
    """The recent tokens are one position off."""
    call(a)
    slots = a["slots"].unique().long()
    a["recent_tokens"][slots] = a["recent_tokens"][slots].roll(1, 1)


def swapped(call: Call, a: Arguments) -> Tensor:
    """The embedding's half comes first."""
    z: Tensor = call(a)
    return z.roll(z.shape[1] // 2, 1)


def stale_rows(patch: pytest.MonkeyPatch) -> None:
    """Rows behind the frontier keep the KV of what was drafted there."""
    right = steps.draft_phase

    def wrong(
        spec: EngineSpec, bucket: Bucket, weights: Tensors, pools: Tensors, meta: StepMeta,
        hidden: Tensor, calls: Calls,
    ) -> None:  # fmt: skip
        old = {name: pools[name].clone() for name in DRAFT_KV}
        right(spec, bucket, weights, pools, meta, hidden, calls)
        for slot, length in zip(meta.slots.tolist(), meta.lengths.tolist(), strict=True):
            for q in range(max(spec.spec_depth, length), length + spec.spec_depth if length else 0):
                for name, kept in old.items():
                    line = pools["full_table" if "full" in name else "window_table"][slot]
                    page, at = int(line[q // spec.page_size % len(line)]), q % spec.page_size
                    pools[name][:, page, :, :, at] = kept[:, page, :, :, at]

    patch.setattr(steps, "draft_phase", wrong)


def scaled(patch: pytest.MonkeyPatch) -> None:
    """Full depths have the target's log scaling."""

    def blocks(*arguments: Any) -> Blocks:
        made = Blocks(*arguments)
        return replace(made, log_floor=made.shape.log_floor)

    patch.setattr(drafts, "Blocks", blocks)


@dataclass(frozen=True)
class Fault:
    """A rule of drafting, and how it is broken."""

    rule: str
    plant: Plant
    check: Callable[[World], None]


def stash_before(a: Arguments) -> Tensor:
    """Rows of the stash, one position off."""
    rows, tokens, depth = a["hidden_rows"], len(a["hidden"]), a["draft_hidden"].shape[1]
    return torch.where(rows < tokens, rows, tokens + (rows - tokens + 1) % depth)


def own_slot(a: Arguments) -> Tensor:
    """Sources of which none is a snapshot: the request that starts from one has slot 2."""
    sources: Tensor = a["sources"]
    return sources.where(sources <= SMALL["max_running"], 2)


INPUT = (drafts, "draft_input")
FAULTS = [
    Fault("a round keeps what it accepted and its root", before(one_more, COMMIT), rounds),
    Fault("rejected drafts do not count", before(all_verified, COMMIT), rounds),
    Fault("a draft guesses the next token", before(next_token, COMMIT), rounds),
    Fault("rows behind the frontier run again", stale_rows, rounds),
    Fault(
        "a row's hidden state is its own",
        before(given(hidden_rows=stash_before), (steps, "draft_gather")),
        rounds,
    ),
    Fault("the stash is by position", before(late_stash, (steps, "draft_commit")), rounds),
    Fault("recent tokens are by position", before(late_tokens, (steps, "draft_commit")), rounds),
    Fault(
        "the first keys are not there",
        before(
            given(first=lambda a: 0),
            (drafts, "attention_extend"),
            (drafts, "attention_verify"),
        ),
        numbers,
    ),
    Fault(
        "a query sees up to its own key",
        meta_with(kv_lengths=lambda m: m.kv_lengths - 1),
        numbers,
    ),
    Fault("windows end at the row", meta_with(lengths=lambda m: m.lengths + 1), rounds),
    Fault(
        "a snapshot's windows end K rows before it",
        meta_with(destination_offsets=lambda m: (m.destination_offsets - 1).clamp(min=0)),
        snapshot,
    ),
    Fault(
        "a snapshot has the stash",
        before(
            given(destination_slots=lambda a: torch.zeros_like(a["destination_slots"])),
            (steps, "draft_commit"),
        ),
        snapshot,
    ),
    Fault(
        "a hit starts from the snapshot's stash",
        before(given(sources=own_slot), (steps, "draft_gather")),
        snapshot,
    ),
    Fault(
        "a hit starts from the snapshot's tokens",
        before(given(sources=own_slot), METADATA),
        snapshot,
    ),
    Fault("a boundary waits until it is reached", before(unreached_boundary, COMMIT), snapshot),
    Fault(
        "a snapshot lands at the boundary",
        before(recorded_early, (steps, "step_metadata")),
        snapshot,
    ),
    Fault("hidden states come first", before(swapped, INPUT), numbers),
    Fault(
        "embeddings are normed",
        before(given(backbone_norm=lambda a: False), INPUT),
        numbers,
    ),
    Fault("depth d reads token p + 1 + d", before(given(depth=lambda a: 0), INPUT), numbers),
    Fault(
        "a depth reads the draft before it",
        before(given(ids=lambda a: a["ids"].clone()), (steps, "draft_sample")),
        numbers,
    ),
    Fault(
        "drafts come from the frontier",
        meta_with(frontier_rows=lambda m: m.frontier_rows - m.emits),
        numbers,
    ),
    Fault("log scaling is off", scaled, numbers),
    Fault(
        "logits are divided by mup",
        before(given(scale=lambda a: 1.0), (drafts, "head")),
        numbers,
    ),
]


@pytest.fixture(scope="module")
def world(
    draft_rigs: DraftRigs,
    small_traces: Traces,
    tmp_path_factory: pytest.TempPathFactory,
) -> World:
    """The random model's rigs and traces, and the specification's model."""
    scratch: Path = tmp_path_factory.mktemp("appendix")
    machine = convert(write_appendix_a(scratch / "appendix-a"), scratch, spec_depth=2)
    return World(draft_rigs, small_traces, machine)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_without_a_fault_the_checks_hold(world: World, check: Callable[[World], None]) -> None:
    for trace_of in ((11, 4), (GRID - 2, 2)):
        world.traces(trace_of[0], at=trace_of[1], new=NEW)
    check(world)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.rule)
def test_a_planted_fault_is_red(
    world: World, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    for length, at in ((11, 4), (GRID - 2, 2)):  # traces are of the sound step
        world.traces(length, at=at, new=NEW)
    fault.plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):  # the latter from checks of the kernels
        fault.check(world)
