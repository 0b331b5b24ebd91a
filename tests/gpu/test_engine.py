"""The tiny model's fp32 engine on a GPU: built, verified, captured, replayed.

`compile-engine` proves its programs against the eager step and runs the golden continuations
through replayed graphs; here the same engine is asked what only a GPU can answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.compiler import compile_engine

from inkling_engine.runtime import Engine, SamplingParams
from inkling_engine.runtime.capture import CapturedGraphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
PROMPTS = [[(7 * i + 13 * n) % 2000 + 3 for i in range(n)] for n in (1, 3, 64, 65, 130, 300)]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Built with two decode and two extend programs, opened once."""
    folder = tmp_path_factory.mktemp("cuda") / "engine"
    command = "--model inkling-tiny --device cuda --dtype fp32 --decode-buckets 1,8"
    command += " --extend-buckets 64,256 --jobs 4 --quiet"
    done = compile_engine(*command.split(), "--out", folder, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    with Engine.load(folder) as opened:
        yield opened


def graphs(engine: Engine) -> CapturedGraphs:
    """The engine's captured programs."""
    runner = engine._runner
    assert isinstance(runner, CapturedGraphs)
    return runner


def test_a_request_does_not_depend_on_its_neighbours(engine: Engine) -> None:
    together = engine.generate(PROMPTS, GREEDY)
    for prompt, completion in zip(PROMPTS, together, strict=True):
        (alone,) = engine.generate(prompt, GREEDY)
        assert alone.choices[0].token_ids == completion.choices[0].token_ids


def test_what_nobody_may_read_may_hold_nan(engine: Engine) -> None:
    before = engine.generate(PROMPTS, GREEDY)
    for slot in range(engine.spec.pools.slots):
        engine.pool.poison_slot(slot)
    for table, pages in (("full", engine.spec.pools.full_pages), ("window", 16)):
        for page in range(pages):
            engine.pool.poison_page("full" if table == "full" else "window", page)
    assert [c.choices for c in engine.generate(PROMPTS, GREEDY)] == [c.choices for c in before]


def test_inputs_stay_where_they_were_captured(engine: Engine) -> None:
    engine.generate(PROMPTS, GREEDY)
    graphs(engine).check_addresses()


def test_a_replay_allocates_nothing(engine: Engine) -> None:
    engine.generate(PROMPTS[:1], GREEDY)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    engine.generate(PROMPTS[:1], GREEDY)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
