"""Draft phases: what they gather, place, guess and keep is told by the committed tokens alone.

The drafter is the target, so every guess must be what the target then draws.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drafting import DraftBatch
from support.rounds import FIRST_SNAPSHOT, VOCAB, WAITING, Draw, Fed, altered, history, plain
from torch import Tensor

from inkling_engine.kernels import table
from inkling_engine.kernels._draft_rows import behind
from inkling_engine.kernels._op import Op, use_references
from inkling_engine.kernels.draft_commit import draft_commit
from inkling_engine.kernels.draft_gather import draft_gather
from inkling_engine.kernels.draft_metadata import draft_metadata, reference
from inkling_engine.kernels.draft_sample import draft_sample

pytestmark = pytest.mark.usefixtures("native_library")

BOTH = pytest.mark.parametrize("mode", [use_references, nullcontext], ids=["reference", "native"])
DRAWS = st.builds(
    Draw,
    length=st.integers(0, 12),
    max_tokens=st.sampled_from([4, 9, 1000]),
    min_tokens=st.integers(0, 12),
    floats=st.tuples(
        st.sampled_from([0.0, 0.7]),
        st.just(1.0),
        st.just(0.0),
        st.sampled_from([0.0, 0.9]),
        st.sampled_from([0.0, 0.6]),
        st.sampled_from([1.0, 1.7]),
    ),
    stops=st.lists(st.integers(0, VOCAB - 1), max_size=2).map(tuple),
    bias=st.lists(st.tuples(st.integers(0, VOCAB - 1), st.just(1.5)), max_size=2).map(tuple),
    seed=st.integers(0, 10**6),
    valid=st.just(0),
)
ROUNDS = st.lists(st.integers(0, 8), min_size=1, max_size=5)


def spoil(batch: DraftBatch, agree: int) -> None:
    """Leave the first `agree` drafts of every slot, and make the others wrong."""
    drafts: Tensor = batch.tables["draft_tokens"]
    drafts[:, agree:] = (drafts[:, agree:] + 1) % VOCAB


def run_rounds(draws: list[Draw], drafts: int, agree: list[int]) -> None:
    """Rounds in which so many drafts are left right; each accepts exactly those."""
    wanted = plain(draws, drafts, 9, 1 + (1 + drafts) * len(agree))
    batch, left = DraftBatch(draws, drafts, 9), [list(tokens) for tokens in wanted.emitted]
    valid = 0
    for right in agree:
        batch.round()
        for slot, draw in enumerate(draws, start=1):
            result = batch.result(slot)
            count = result.header[table.RESULT_COUNT]
            assert [result.emitted(i)[0] for i in range(count)] == [
                left[slot - 1].pop(0)[0] for _ in range(count)
            ]
            state = batch.tables["request_state"][slot].tolist()
            going = count and not state[table.FINISH]
            room = draw.max_tokens - state[table.GENERATED] + count - 1
            assert not going or count == 1 + min(valid, drafts, room)
        spoil(batch, right)
        valid = right


@BOTH
def test_every_right_guess_is_accepted(mode: Callable[[], nullcontext[None]]) -> None:
    @settings(max_examples=60, deadline=None)
    @given(st.lists(DRAWS, min_size=1, max_size=3), st.integers(1, 8), ROUNDS)
    def run(draws: list[Draw], drafts: int, agree: list[int]) -> None:
        with mode():
            run_rounds(draws, drafts, agree)

    run()


def run_chunks(draw: Draw, drafts: int, chunks: list[int]) -> None:
    """A prompt in chunks, and another request that goes on behind its last snapshot."""
    grid, prompt = 9, history(Draw(length=sum(chunks) - 1, seed=draw.seed))
    batch = DraftBatch([draw, draw], drafts, grid)
    batch.known, batch.read = [[], []], [{}, {}]
    snapshots = FIRST_SNAPSHOT + WAITING
    batch.tables["snapshot_slots"][1, :] = batch.tables["snapshot_slots"].new_tensor(
        [snapshots + j for j in range(WAITING)]
    )
    at = 0
    for chunk in chunks:
        last = at + chunk == len(prompt)
        fed = Fed({1: prompt[at : at + chunk]}, {}, frozenset({1} if last else ()))
        batch.round(verify=False, fed=fed)
        at += chunk
    if hit := min((len(prompt) - 1) // grid, WAITING):
        source, boundary = snapshots + hit - 1, hit * grid
        batch.check_memory(source, prompt[:boundary])
        batch.tables["request_state"][2, table.LENGTH] = boundary
        batch.known[1] = prompt[:boundary]
        rows = batch.read[0].items()
        batch.read[1] = {at: token for at, token in rows if at[1] < boundary - drafts}
        fed = Fed({2: prompt[boundary:]}, {2: source}, frozenset({2}))
        batch.round(verify=False, fed=fed)
        assert batch.known[0] == batch.known[1]
        drafts_of = batch.tables["draft_tokens"]
        assert drafts_of[1].tolist() == drafts_of[2].tolist()


@BOTH
def test_chunks_and_prefix_hits_draft_as_one_run(mode: Callable[[], nullcontext[None]]) -> None:
    @settings(max_examples=60, deadline=None)
    @given(DRAWS, st.integers(1, 8), st.lists(st.integers(1, 14), min_size=1, max_size=3))
    def run(draw: Draw, drafts: int, chunks: list[int]) -> None:
        fresh = Draw(0, 0, seed=draw.seed, floats=(draw.floats[0], 1.0, 0.0, 0.0, 0.0, 1.0))
        with mode():
            run_chunks(fresh, drafts, chunks)

    run()


def stale_rows(call: Callable[..., Any], a: dict[str, Any]) -> Any:
    """Rows behind the frontier are not run again."""
    return call(a | {"lengths": a["lengths"] + a["drafts"] * (a["slots"] > 0).int()})


def fewer_again(verify: int, extend: int) -> Callable[[Callable[..., Any], dict[str, Any]], Any]:
    """So many rows fewer are run again."""

    def stale_row(call: Callable[..., Any], a: dict[str, Any]) -> Any:
        again = lambda drafts, most: behind(drafts, most) - (verify if most else extend)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "behind", again)
            return call(a)

    return stale_row


def restless_rows(call: Callable[..., Any], a: dict[str, Any]) -> Any:
    """Rows that have ended draft on."""
    state = a["request_state"].clone()
    state[:, table.FINISH] = 0
    return call(a | {"request_state": state})


def late_hidden(call: Callable[..., Any], a: dict[str, Any]) -> Any:
    """The stash keeps the row before."""
    return call(a | {"hidden": a["hidden"].roll(1, 0)})


def early_noise(call: Callable[..., Any], a: dict[str, Any]) -> Any:
    """A guess is drawn with the noise of the position before."""
    return call(a | {"lengths": a["lengths"] - 1})


def no_scatter(call: Callable[..., Any], a: dict[str, Any]) -> Any:
    """Snapshots keep no stash."""
    return call(a | {"destination_slots": torch.zeros_like(a["destination_slots"])})


def own_stash(call: Callable[..., Any], a: dict[str, Any]) -> Any:
    """A row that starts from a snapshot reads its own slot."""
    sources = a["sources"].clone()
    sources[sources >= FIRST_SNAPSHOT] = 2
    return call(a | {"sources": sources})


FAULTS = [
    (draft_metadata, stale_rows),
    (draft_metadata, fewer_again(1, 0)),
    (draft_metadata, fewer_again(0, 1)),
    (draft_metadata, restless_rows),
    (draft_metadata, own_stash),
    (draft_gather, own_stash),
    (draft_sample, early_noise),
    (draft_commit, late_hidden),
    (draft_commit, no_scatter),
]


@pytest.mark.parametrize(
    ("op", "fault"), FAULTS, ids=lambda part: getattr(part, "__name__", "") or part.name
)
def test_planted_faults_are_seen(op: Op, fault: Callable[..., Any]) -> None:
    warm = (0.7, 1.0, 0.0, 0.5, 0.0, 1.0)
    draws = [Draw(7, seed=3, valid=0, floats=warm), Draw(2, seed=5, valid=0, max_tokens=5)]
    prompt = Draw(0, 0, seed=8, floats=warm)
    with use_references():
        run_rounds(draws, 3, [3, 1, 2, 3])
        run_chunks(prompt, 3, [5, 13, 4])
        with altered(op, fault), pytest.raises((AssertionError, IndexError, RuntimeError)):
            run_rounds(draws, 3, [3, 1, 2, 3])
            run_chunks(prompt, 3, [5, 13, 4])
