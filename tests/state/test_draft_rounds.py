"""Rounds of verifying and drafting: the target's state is plain decoding's and the draft depths' is
that of a fresh run, after every accepted count at every place."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
from support.draft_rig import DraftRig, Request, Round
from support.rig import Model, Traces
from support.stepper import convert

from .conftest import SMALL, random_ids

NEW = 24
DEPTHS = (1, 2, 3)


@pytest.fixture(scope="module")
def models(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """(drafting model, the same with chunks of any length) by number of drafts."""

    @cache
    def make(drafts: int) -> tuple[Model, Model]:
        made = []
        for buckets in ("8x8,16x8", "8x8,16x8,32x8,64x8"):
            scratch = tmp_path_factory.mktemp(f"drafts-{drafts}")
            options = SMALL | {"extend_buckets": buckets, "spec_depth": drafts}
            machine = convert(small_checkpoint, scratch, **options)
            made.append(Model(machine.spec, machine.weights))
        return made[0], made[1]

    return make


@pytest.mark.parametrize("drafts", DEPTHS)
def test_every_accepted_count_at_every_place(models, small_traces: Traces, drafts: int) -> None:
    """Each count after each other count, from a prompt of each length up to two pages."""
    order = random.Random(drafts)
    rig = DraftRig(*models(drafts))
    for prompt in (1, 2, 3, 4, 8):
        request = Request(small_traces(prompt, at=prompt, new=NEW), slot=1 + prompt % 3)
        while left := prompt - request.length:
            rig.extend({0: (request, order.randint(1, left))})
        while request.length + 1 + drafts < prompt + NEW:
            rig.verify([Round(request, order.randint(0, drafts))])
        assert len(request.accepted) > 1
