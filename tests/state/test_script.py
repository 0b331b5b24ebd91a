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
    engine, _ = open_engine(served, exported, prefix_cache=False)
    debug.poison_releases(engine)
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


def test_a_hit_goes_on_as_a_cold_run(served: Model, exported: Exported) -> None:
    prompt = random.Random(6).choices(range(served.spec.shape.real_vocab), k=40)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    found = []
    for cache in (False, True):
        engine, _ = open_engine(served, exported, prefix_cache=cache)
        debug.poison_releases(engine)
        snapshots = range(1 + engine.spec.max_running, engine.spec.pools.slots)
        poisoned = engine.pool.tensors["conv_mlp"][:, snapshots].isnan()
        assert snapshots and bool(poisoned.all()) == cache, "without a cache they are nobody's"
        states: list[str] = []
        with Script(engine) as script:
            for part in (0, 1):
                request = engine.submit(prompt, params)
                hit = 32 if cache and part else 0
                for count in (16, 16, 8)[2 if hit else 0 :]:
                    script.step((request, count))
                assert request.sequences[0].cached == hit
                for _ in range(3):
                    states.append(debug.digest(engine, request.sequences[0]))
                    script.step((request, 1))
        found.append(states)
    assert found[0] == found[1] and found[0][:3] == found[0][3:]
