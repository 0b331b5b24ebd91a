"""Scripted schedules of a real model: one prompt's state is the same bits however it was cut, beside
whom it ran and where it lies, with everything that nobody holds poisoned."""

from __future__ import annotations

import random

import pytest
from support.engines import Exported, open_engine
from support.rig import Model

from inkling_engine.runtime import debug
from inkling_engine.runtime.sampling import SamplingParams
from inkling_engine.runtime.script import Row, Script

pytestmark = pytest.mark.usefixtures("native_library")
CUTS = [(16, 16, 8), (3, 13, 1, 9, 14), (1, 15, 16, 8), (16, 1, 1, 1, 16, 5)]


def test_a_state_does_not_depend_on_the_cut(served: Model, exported: Exported) -> None:
    choose, vocab = random.Random(5), served.spec.shape.real_vocab
    prompt, other = (choose.choices(range(vocab), k=n) for n in (40, 60))
    engine, _ = open_engine(served, exported)
    debug.poison_releases(engine)
    snapshots = range(1 + engine.spec.max_running, engine.spec.pools.slots)
    assert snapshots and engine.pool.tensors["conv_mlp"][:, snapshots].isnan().all()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    noise = engine.submit(other, SamplingParams(max_tokens=3, seed=3, ignore_eos=True))
    found = []
    with Script(engine) as script:
        script.step((noise, 9))
        for cut in CUTS:
            request = engine.submit(prompt, params)
            (sequence,) = request.sequences
            for count in cut:
                rows: list[Row] = [(request, count)]
                if count == 1:
                    rows.insert(0, (noise, 2))
                script.step(*rows)
            states = [debug.digest(engine, sequence)]
            for _ in range(9):
                script.step((request, 1))
                states.append(debug.digest(engine, sequence))
            found.append((states, list(sequence.tokens)))
    assert len(set(found[0][0])) == 10
    assert all(one == found[0] for one in found)
    while engine.scheduler.unfinished():
        engine.step()
    debug.check(engine)
