"""A verify step against plain decoding: the same tokens, logprobs, counts, state and snapshots.

Drafts agree with what plain decoding draws for a prefix of any length; what follows them is wrong.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rounds import TOP, VOCAB, Batch, Draw, history, plain

from inkling_engine.kernels import table
from inkling_engine.kernels._op import use_references

pytestmark = pytest.mark.usefixtures("native_library")

FLOATS = st.tuples(
    st.sampled_from([0.0, 0.6, 1.3]),  # temperature, then top-p, min-p and the penalties
    st.sampled_from([1.0, 0.7]),
    st.sampled_from([0.0, 0.15]),
    st.sampled_from([0.0, 0.8]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([1.0, 1.6]),
)
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


def check(batch: Batch, wanted, slot: int) -> None:  # type: ignore[no-untyped-def]
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


@pytest.mark.parametrize("native", [False, True], ids=["reference", "native"])
def test_a_verify_step_is_so_many_plain_steps(native: bool) -> None:
    @settings(max_examples=150, deadline=None)
    @given(st.lists(DRAWS, min_size=1, max_size=3), st.integers(1, 8), st.integers(9, 12))
    def run(draws: list[Draw], drafts: int, grid: int) -> None:
        if native:
            verify(draws, drafts, grid)
        else:
            with use_references():
                verify(draws, drafts, grid)

    run()
