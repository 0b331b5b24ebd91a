"""The draft depths against transformers' own and the specification's numbers.

After every step the logits of all depths at the frontier must be those of a computation over the
whole sequence without a cache, whatever was drafted, accepted and rejected on the way there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.checkpoints import tiny_config, write_appendix_a, write_random
from support.draft_oracle import DraftOracle
from support.oracle import TINY, Oracle
from support.prompts import python_prompts
from support.stepper import Call, Stepper, convert, recorded

from inkling_engine.compile.driver import Machine

TOLERANCE = 1e-4
DEPTHS = 4  # of the tiny model
NO_TOKEN = 2039  # of its vocabulary, in none of the texts
IDS = [(7 * i * i + 3 * i + 1) % 150 for i in range(40)]
APPENDIX = {  # depth 0, then depth 1 without log scaling
    True: ((0.060048, 0.009646, 0.066778, -0.010941), (-0.027681, -0.004448, 0.022608, -0.002058)),
    False: ((0.060265, 0.008236, 0.066036, -0.009654), (-0.028260, -0.004253, 0.022187, -0.001792)),
}
Oracles = dict[bool, DraftOracle]


@pytest.fixture(scope="module", params=["references", "native"])
def native(request: pytest.FixtureRequest) -> bool:
    """Whether the native kernels run, or the references."""
    if request.param == "native":
        request.getfixturevalue("native_library")
    return bool(request.param == "native")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """The trained model with all four depths, chunks up to 256."""
    scratch = tmp_path_factory.mktemp("tiny")
    sizes: dict[str, Any] = {"page_size": 64, "snapshot_grid": 128, "extend_buckets": "256x3"}
    return convert(TINY, scratch, spec_depth=DEPTHS, **sizes)


@pytest.fixture(scope="module")
def oracles() -> Oracles:
    """The trained model's depths, by whether they see normed embeddings."""
    return {norm: DraftOracle(Oracle(TINY), embed_norm=norm) for norm in (False, True)}


def drafting(machine: Machine, drafts: int, *, embed_norm: bool, native: bool) -> Stepper:
    """A fresh sequence that drafts so many tokens a round."""
    spec = msgspec.structs.replace(machine.spec, spec_depth=drafts, draft_embed_norm=embed_norm)
    return Stepper(Machine(spec, machine.weights), native=native)


def require_same(
    stepper: Stepper, calls: Sequence[Call], oracle: DraftOracle, tokens: Sequence[int]
) -> None:
    """Draft logits (what the head gave after the target's) and drafts are the oracle's at the
    frontier of `tokens`."""
    found = torch.stack([call.result[0] for call in calls[1:]])
    expected = oracle.logits(tokens)[: len(found), : found.shape[1]]
    assert torch.allclose(found, expected, rtol=0, atol=TOLERANCE), (found - expected).abs().max()
    assert stepper.drafts == expected.argmax(-1).tolist()


@pytest.mark.parametrize("embed_norm", [True, False])
@pytest.mark.parametrize("length", [1, 2, 3, 40, 140])
def test_drafts_after_a_prompt_and_after_rejections(
    tiny: Machine, oracles: Oracles, native: bool, length: int, embed_norm: bool
) -> None:
    """The prompt comes in two chunks, then rounds follow with none to all of the guesses right."""
    oracle, order = oracles[embed_norm], random.Random(length)
    tokens = list(python_prompts((length,))[0])
    truth = list(oracle.main.greedy(tokens, 20).tokens)
    stepper = drafting(tiny, DEPTHS, embed_norm=embed_norm, native=native)
    if cut := length // 3:
        stepper.feed(tokens[:cut])
    with recorded("head") as calls:
        stepper.feed(tokens[cut:])
    tokens.append(truth.pop(0))
    require_same(stepper, calls["head"], oracle, tokens)
    for right in order.sample(range(DEPTHS + 1), 3):
        wrong = [(token + 1) % 2000 for token in truth[right:DEPTHS]]
        with recorded("head") as calls:
            found = stepper.verify([*truth[:right], *wrong])
        assert found == truth[: right + 1]
        tokens, truth = tokens + found, truth[right + 1 :]
        require_same(stepper, calls["head"], oracle, tokens)


@pytest.mark.parametrize("drafts", range(1, DEPTHS + 1))
def test_rounds_are_those_of_transformers_own_loop(
    tiny: Machine, oracles: Oracles, native: bool, drafts: int
) -> None:
    """Its loop drafts with all depths; with fewer, ours are the first of each chain."""
    prompt = python_prompts((60,))[0]
    rounds = oracles[False].loop(prompt, 24)
    stepper = drafting(tiny, drafts, embed_norm=False, native=native)
    stepper.feed(prompt)
    tokens = [*prompt, stepper.sampled]
    assert len(rounds) > 4 and any(item.drafts[0] != rounds[0].drafts[0] for item in rounds)
    for item in rounds:
        if drafts == DEPTHS:
            assert tuple(tokens) == item.tokens
        while known := item.tokens[len(tokens) :]:  # shorter rounds than the oracle's
            guesses = known[: min(drafts, len(known) - 1)]
            tokens += stepper.verify(guesses or [NO_TOKEN])
        assert tuple(tokens) == item.tokens
        assert stepper.drafts == list(item.drafts[:drafts])
        if drafts == DEPTHS:
            tokens += stepper.verify()


@pytest.mark.parametrize("embed_norm", [True, False])
def test_the_specifications_numbers(native: bool, embed_norm: bool, tmp_path: Path) -> None:
    """A local and a full depth, positions beyond the floor of a log scaling that drafts do not have."""
    machine = convert(write_appendix_a(tmp_path / "appendix-a"), tmp_path, spec_depth=2)
    stepper = drafting(machine, 2, embed_norm=embed_norm, native=native)
    with recorded("head") as calls:
        stepper.feed(IDS)
    assert (stepper.sampled, stepper.drafts) == (113, [97, 7])
    for call, expected in zip(calls["head"][1:], APPENDIX[embed_norm], strict=True):
        assert torch.allclose(call.result[0, :4], torch.tensor(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("chain", [True, False])
def test_a_full_depth_after_local_ones(native: bool, chain: bool, tmp_path: Path) -> None:
    """Random weights with and without the chain's norm, far beyond the window of 8."""
    config = tiny_config()
    config["mtp_config"]["chain_hidden_post_norm"] = chain
    folder = write_random(tmp_path / "random", config, seed=5)
    oracle = DraftOracle(Oracle(folder), embed_norm=True)
    machine = convert(folder, tmp_path, spec_depth=3, extend_buckets="64x3")
    stepper = drafting(machine, 3, embed_norm=True, native=native)
    tokens, truth = IDS[:30], list(oracle.main.greedy(IDS[:30], 8).tokens)
    with recorded("head") as calls:
        stepper.feed(tokens)
    require_same(stepper, calls["head"], oracle, [*tokens, truth[0]])
    with recorded("head") as calls:
        assert stepper.verify([truth[1], truth[2], 0]) == truth[1:4]
    require_same(stepper, calls["head"], oracle, [*tokens, *truth[:4]])


def test_a_draft_vocabulary_is_the_first_ids(tiny: Machine, oracles: Oracles, native: bool) -> None:
    """Logits of the rest are not computed, and no draft is one of them."""
    prompt, limit = python_prompts((60,))[0], 300
    spec = msgspec.structs.replace(tiny.spec, draft_vocab=limit)
    stepper = Stepper(Machine(spec, tiny.weights), native=native)
    with recorded("head") as calls:
        stepper.feed(prompt)
    found = calls["head"][1].result[0]
    expected = oracles[True].logits([*prompt, stepper.sampled])[0]
    assert found.shape == (limit,) and int(expected.argmax()) >= limit
    assert torch.allclose(found, expected[:limit], rtol=0, atol=TOLERANCE)
    assert stepper.drafts[0] == int(found.argmax())
