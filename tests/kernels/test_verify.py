"""A verify step against plain decoding: the same tokens, logprobs, counts, state and snapshots.

Drafts agree with what plain decoding draws for a prefix of any length; what follows them is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.rounds import TOP, VOCAB, Batch, Draw, Plain, altered, history, plain
from torch import Tensor

from inkling_engine.kernels import table
from inkling_engine.kernels._op import use_references
from inkling_engine.kernels.commit import reference as commit_reference
from inkling_engine.kernels.sample import reference as sample_reference
from inkling_engine.kernels.sample import sample
from inkling_engine.kernels.step_metadata import reference as metadata_reference

pytestmark = pytest.mark.usefixtures("native_library")

FLOATS = st.tuples(
    st.sampled_from([0.0, 0.6, 1.3]),  # temperature, then top-p, min-p and the penalties
    st.sampled_from([1.0, 0.7]),
    st.sampled_from([0.0, 0.15]),
    st.sampled_from([0.0, 0.8]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([1.0, 1.6]),
)
GRIDS = st.integers(9, 12)
SEARCH = (Phase.explicit, Phase.generate)
DRAWS = st.builds(
    Draw,
    length=st.integers(0, 18),
    generated=st.integers(0, 3),
    max_tokens=st.sampled_from([4, 5, 6, 8, 1000]),
    min_tokens=st.integers(0, 6),
    top_k=st.sampled_from([0, 3]),
    floats=FLOATS,
    stops=st.lists(st.integers(0, VOCAB - 1), max_size=2).map(tuple),
    bias=st.lists(st.tuples(st.integers(0, VOCAB - 1), st.just(1.5)), max_size=2).map(tuple),
    top=st.integers(0, TOP),
    seed=st.integers(0, 10**6),
    broken=st.one_of(st.just(-1), st.integers(0, 24)),
    agree=st.integers(0, 8),
    valid=st.integers(0, 8),
)


def verify(draws: list[Draw], drafts: int, grid: int) -> None:
    """Verify drafts of which the first `agree` are right, and compare with plain decoding."""
    wanted = plain(draws, drafts, grid, 1 + drafts)
    batch = Batch(draws, drafts, grid)
    for slot, draw in enumerate(draws, start=1):
        drawn = [emitted[0] for emitted in wanted.emitted[slot - 1]]
        guesses = (drawn + [0] * drafts)[:drafts]
        guesses[draw.agree :] = [(token + 1) % VOCAB for token in guesses[draw.agree :]]
        batch.set_drafts(slot, guesses)
    for name in ("full_table", "window_table"):
        batch.tables[name].copy_(wanted.tables[0][name])
    batch.step(drafts, [history(draw) for draw in draws])
    for slot in range(1, 1 + len(draws)):
        check(batch, wanted, slot)
    assert batch.result(0).header == [0] * table.RESULT_HEADER


def check(batch: Batch, wanted: Plain, slot: int) -> None:
    """Hold `slot` after a verify step to the plain steps that emit as much."""
    draw, result, emitted = batch.draws[slot - 1], batch.result(slot), wanted.emitted[slot - 1]
    valid = max(0, min(batch.drafts, draw.valid, draw.max_tokens - draw.generated - 1))
    count = min(1 + min(draw.agree, valid), len(emitted))
    assert [result.emitted(i) for i in range(count)] == emitted[:count]
    for rest in (result.tokens, result.logprobs, result.top, result.top_logprobs):
        assert not rest[count:].any()
    after = wanted.tables[count]
    state = after["request_state"][slot]
    finish, length = state[table.FINISH].item(), state[table.LENGTH].item()
    assert result.header == [slot, count, finish, length, valid]
    for name in ("request_state", "token_counts", "snapshot_slots"):
        assert torch.equal(batch.tables[name][slot], after[name][slot]), name
    own = slice(8 + 3 * slot, 11 + 3 * slot)
    found, snapshots = batch.tables["snapshot_lengths"][own], after["snapshot_lengths"][own]
    assert torch.equal(found, snapshots)


def examples(count: int) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Run a test on so many batches, drafts and grids."""

    def decorate(test: Callable[..., None]) -> Callable[[], None]:
        given_ = given(st.lists(DRAWS, min_size=1, max_size=3), st.integers(1, 8), GRIDS)
        found: Callable[[], None] = settings(
            max_examples=count,
            deadline=None,
            database=None,
            derandomize=True,
            phases=SEARCH,
            report_multiple_bugs=False,
        )(given_(test))
        return found

    return decorate


@pytest.mark.parametrize("mode", [use_references, nullcontext], ids=["reference", "native"])
def test_a_verify_step_is_so_many_plain_steps(mode: Callable[[], nullcontext[None]]) -> None:
    @settings(max_examples=150, deadline=None)
    @given(st.lists(DRAWS, min_size=1, max_size=3), st.integers(1, 8), GRIDS)
    def run(draws: list[Draw], drafts: int, grid: int) -> None:
        with mode():
            verify(draws, drafts, grid)

    run()


@pytest.mark.parametrize("mode", [use_references, nullcontext], ids=["reference", "native"])
@pytest.mark.parametrize("agree", [0, 2, 4])
def test_acceptance_can_be_forced(agree: int, mode: Callable[[], nullcontext[None]]) -> None:
    """So many drafts are taken, right or not, by the parity of the round; at most the valid ones."""
    for counter in (6, 7):
        for low, high in ((0, 3), (4, 1), (2, 9), (15, 0)):
            draw = Draw(valid=4, force=1 + low + 16 * high, stops=())
            batch = Batch([draw], 4, 9)
            batch.tables["step_counter"][0] = counter
            drawn = [step[0] for step in plain([draw], 4, 9, 5).emitted[0]]
            guesses = drawn[:agree] + [(token + 1) % VOCAB for token in drawn[agree:4]]
            batch.set_drafts(1, guesses)
            with mode():
                batch.step(4, [history(draw)])
            count, result = min(4, high if counter % 2 else low), batch.result(1)
            assert result.header[:2] == [1, 1 + count]
            assert result.tokens[:count].tolist() == guesses[:count]
            if count <= agree:
                assert int(result.tokens[count]) == drawn[count]
            state = batch.tables["request_state"][1].tolist()
            assert state[table.LENGTH] == draw.length + 1 + count


def one_too_many(patch: pytest.MonkeyPatch) -> None:
    """The first draft that is wrong is accepted too."""
    right = commit_reference._run

    def wrong(guesses: Tensor, tokens: Tensor, forced: int, step: int) -> Tensor:
        accepted = min(len(right(guesses, tokens, forced, step)), len(guesses))
        return torch.cat([guesses[:accepted], tokens[accepted : accepted + 1]])

    patch.setattr(commit_reference, "_run", wrong)


def one_too_few(patch: pytest.MonkeyPatch) -> None:
    """The last draft that is right is not accepted."""
    right = commit_reference._run

    def wrong(guesses: Tensor, *rest: Any) -> Tensor:
        run = right(guesses, *rest)
        return run[: max(1, len(run) - 1)]

    patch.setattr(commit_reference, "_run", wrong)


def run_on(patch: pytest.MonkeyPatch) -> None:
    """What ends a request inside a run does not cut it."""

    def wrong(state: Tensor, counts: Tensor, ints: Tensor, run: Tensor, *rest: Any) -> int:
        for at in range(len(run)):
            right(state, counts, ints, run[at : at + 1], rest[0][at:], rest[1])
        return len(run)

    right = commit_reference._emit
    patch.setattr(commit_reference, "_emit", wrong)


def long_count(patch: pytest.MonkeyPatch) -> None:
    """One token too many counts as emitted."""
    right = commit_reference._emit

    def wrong(*arguments: Any) -> int:
        return right(*arguments) + 1

    patch.setattr(commit_reference, "_emit", wrong)


def early_snapshot(patch: pytest.MonkeyPatch) -> None:
    """A boundary counts as reached one token too early."""
    right: Callable[..., None] = commit_reference._pass

    def wrong(*arguments: Any) -> None:
        ahead = arguments[-1].clone()
        ahead[table.LENGTH] += 1
        right(*arguments[:-1], ahead)

    patch.setattr(commit_reference, "_pass", wrong)


def hasty_snapshot(patch: pytest.MonkeyPatch) -> None:
    """A verify step's boundaries are taken before it is known what is accepted."""
    right: Callable[..., None] = metadata_reference._cross_grid

    def wrong(*arguments: Any, taken: bool) -> None:
        right(*arguments, taken=True)

    patch.setattr(metadata_reference, "_cross_grid", wrong)


def uncounted(patch: pytest.MonkeyPatch) -> None:
    """Penalties do not know of the drafts before a token."""
    patch.setattr(sample_reference, "counted", lambda counts, ahead: counts)


def endless_drafts(patch: pytest.MonkeyPatch) -> None:
    """More drafts are verified than MAX_TOKENS leaves room for."""

    def wrong(pools: Any, slot: int, drafts: int) -> Tensor:
        state = pools.request_state[slot]
        count = min(drafts, int(state[table.DRAFTS]))
        return torch.cat([state[table.LAST_TOKEN][None], pools.draft_tokens[slot, :count]])

    patch.setattr(metadata_reference, "_known", wrong)


FAULTS = [
    one_too_many,
    one_too_few,
    run_on,
    long_count,
    early_snapshot,
    hasty_snapshot,
    uncounted,
    endless_drafts,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_faults_are_seen(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with use_references(), pytest.raises((AssertionError, IndexError)):
        examples(200)(verify)()


def test_drafts_that_are_not_generated_are_seen() -> None:
    """Neither penalties nor MIN_TOKENS know of the drafts before a token."""
    blind = altered(sample, lambda call, a: call(a | {"drafts": 0}))
    with use_references(), blind, pytest.raises(AssertionError):
        examples(200)(verify)()
