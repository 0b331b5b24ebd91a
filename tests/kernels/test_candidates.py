"""Ranks that sample from candidates: the tokens of whole logits, whatever the rows ask for.

Threads of one process are the ranks (`test_exchange.py`). What is compared with is `sample` over the
logits of all, in the same implementation: tokens and top ids are equal, logprobs but for a sum's order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.test_exchange import NATIVE, Group, lagging
from torch import Tensor

from inkling_engine.kernels import table
from inkling_engine.kernels._cases import normal
from inkling_engine.kernels._exchange import HEADER
from inkling_engine.kernels.candidates import candidates
from inkling_engine.kernels.draft_candidates import draft_candidates
from inkling_engine.kernels.draft_sample import draft_sample
from inkling_engine.kernels.gather_logits import gather_logits
from inkling_engine.kernels.resample import resample
from inkling_engine.kernels.sample import sample
from inkling_engine.kernels.sample.cases import (
    BIAS_IDS,
    STOP_IDS,
    TOP,
    Request,
    counts,
    table_lines,
)

pytestmark = pytest.mark.usefixtures("native_library")

CLOSE = 1e-5
CALLS = 9


class Sampled(NamedTuple):
    """Results of a step, and which samples the candidates did not prove."""

    tokens: Tensor
    logprobs: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor
    unsure: Tensor


@dataclass(frozen=True)
class Rows:
    """Samples of a step: `logits` [S, V], a request each; ranks have `columns` ids each."""

    logits: Tensor
    requests: list[Request]
    columns: int
    budget: int

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """token_counts and the request table."""
        rows, vocab = self.logits.shape
        return counts(1 + rows, vocab), *table_lines(self.requests)

    @property
    def step(self) -> tuple[Tensor, ...]:
        """tokens, token_rows, slots, starts, lengths, sample_rows."""
        own = torch.arange(len(self.requests), dtype=torch.int32)
        starts = torch.arange(len(own) + 1, dtype=torch.int32)
        return own, own, own + 1, starts, own * 17, own

    @property
    def emits(self) -> Tensor:
        return torch.ones(len(self.requests), dtype=torch.int32)

    def part(self, rank: int) -> Tensor:
        """A rank's columns; what is no real id is NaN."""
        padded = torch.full((len(self.logits), (rank + 1) * self.columns), torch.nan)
        real = self.logits[:, : padded.shape[1]]
        padded[:, : real.shape[1]] = real
        return padded[:, rank * self.columns :].contiguous()

    def whole(self, native: bool) -> tuple[Tensor, ...]:
        """What one rank gives that has all logits."""
        op = sample if native else sample.reference
        sizes = STOP_IDS, BIAS_IDS, TOP, 0
        results: tuple[Tensor, ...] = op(self.logits, *self.tables, *self.step, self.emits, *sizes)
        return results

    def run(self, group: Group, rank: int) -> Sampled:
        """What `rank` gives, as in a step."""
        own, ranks, numbers = self.part(rank), group.ranks(rank), (CALLS, group.world)
        vocab, sizes = self.logits.shape[1], (STOP_IDS, BIAS_IDS, TOP, 0)
        ops = [candidates, gather_logits, resample]
        choose, gather, again = ops if group.native else [op.reference for op in ops]
        step = *self.tables, *self.step
        found = Sampled(
            *choose(own, *step, self.emits, *sizes, *ranks, self.budget, 3, *numbers, vocab)
        )
        logits = gather(own, found.unsure, *ranks, 4, *numbers, vocab)
        again(logits, *step, found.unsure, *sizes, *found[:4])
        group.counters[rank][0] += 1
        return found


def sampled(rows: Rows, world: int, native: bool = True) -> tuple[Sampled, Group]:
    """The results of all ranks, which are the same bits."""
    group = Group(world, native)
    found: dict[int, Sampled] = {}

    def work(rank: int) -> None:
        lagging(rank, 0)
        found[rank] = rows.run(group, rank)

    group.run(work)
    for other in found.values():
        for one, same in zip(other, found[0], strict=True):
            assert torch.equal(one.view(torch.int32), same.view(torch.int32))
    return found[0], group


def require_whole(found: Sampled, rows: Rows, native: bool = True) -> None:
    """The results are those of whole logits."""
    tokens, logprobs, top_tokens, top_logprobs = rows.whole(native)
    assert found.tokens.tolist() == tokens.tolist()
    assert torch.equal(found.top_tokens, top_tokens)
    for one, other in ((found.logprobs, logprobs), (found.top_logprobs, top_logprobs)):
        torch.testing.assert_close(one, other, atol=CLOSE, rtol=0, equal_nan=True)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Everything that a request may ask for, filters of every strength."""
    seed = st.integers(-(2**31), 2**31 - 1)
    return Request(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1.7, 4.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 3, 8, 9, 40])),
        top_p=draw(st.sampled_from([1.0, 1.0, 1e-6, 0.25, 0.5, 0.9, 0.999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.01, 0.2, 1.0])),
        repetition=draw(st.sampled_from([1.0, 1.4])),
        presence=draw(st.sampled_from([0.0, 0.8])),
        frequency=draw(st.sampled_from([0.0, 0.4])),
        seed=(draw(seed), draw(seed)),
        min_tokens=draw(st.sampled_from([0, 9])),
        stops=(draw(st.integers(0, 39)), draw(st.integers(0, 39))),
        bias=((draw(st.integers(0, 39)), draw(st.sampled_from([0.0, 6.0, -6.0]))),),
        top=draw(st.integers(0, TOP)),
    )


@st.composite
def steps(draw: st.DrawFn) -> tuple[Rows, int]:
    """Samples over 2 to 5 ranks, the last of which may have fewer ids, or none; many logits tie."""
    world, columns = draw(st.integers(2, 5)), draw(st.integers(5, 60))
    least = max(40, (world - 2) * columns)
    vocab = draw(st.integers(min(least, world * columns), world * columns))
    columns = max(columns, -(-vocab // world), -(-40 // world))
    vocab = max(vocab, 40)
    asked = draw(st.lists(requests(), min_size=1, max_size=5))
    logits = normal(len(asked), vocab, scale=draw(st.sampled_from([0.1, 1.0, 3.0, 9.0])))
    if draw(st.booleans()):
        logits = (logits * 2).round() / 2
    if draw(st.integers(0, 9)) == 0:
        logits[0, draw(st.integers(0, vocab - 1))] = draw(st.sampled_from([torch.nan, -torch.inf]))
    return Rows(logits, asked, columns, draw(st.sampled_from([1, 2, 4, 16, 64]))), world


@settings(max_examples=300, deadline=None)
@given(steps())
def test_tokens_are_those_of_whole_logits(drawn: tuple[Rows, int]) -> None:
    rows, world = drawn
    require_whole(sampled(rows, world)[0], rows)


@settings(max_examples=40, deadline=None)
@given(steps())
def test_the_reference_too(drawn: tuple[Rows, int]) -> None:
    rows, world = drawn
    require_whole(sampled(rows, world, native=False)[0], rows, native=False)


PEAKED = torch.arange(200.0).flip(0)[None] / 4  # each id weighs exp(-1/4) of the one before it
TIED = torch.zeros(1, 200)


@NATIVE
@pytest.mark.parametrize(
    ("request_", "logits", "proven"),
    [
        (Request(), TIED, True),
        (Request(temperature=1.0), TIED, True),
        (Request(temperature=1.0, top_k=8), TIED, True),
        (Request(temperature=1.0, top_k=9), TIED, False),
        (Request(temperature=1.0, top_k=8), PEAKED, True),
        (Request(temperature=1.0, top_k=9), PEAKED, False),
        (Request(temperature=1.0, top_p=0.8), PEAKED, True),  # 7 ids
        (Request(temperature=1.0, top_p=0.9), PEAKED, False),  # 10 ids
        (Request(temperature=1.0, top_p=0.9, top_k=8), PEAKED, True),
        (Request(temperature=1.0, min_p=0.19), PEAKED, True),  # 7 ids
        (Request(temperature=1.0, min_p=0.1), PEAKED, False),
        (Request(temperature=1.0, top_p=0.5, min_p=0.1), PEAKED, False),  # of an unknown mass
        (Request(temperature=1.0, top_p=0.5), TIED[:, :8], False),  # cut right at an id
        (Request(temperature=1.0, top_p=0.6), TIED[:, :8], True),
    ],
)
def test_what_the_budget_proves(
    native: bool, request_: Request, logits: Tensor, proven: bool
) -> None:
    """8 ids of each of two ranks, of which the first has the best ones."""
    rows = Rows(logits, [replace(request_, top=0)], max(TOP, -(-logits.shape[1] // 2)), 8)
    found, group = sampled(rows, 2, native)
    assert found.unsure.tolist() == [not proven]
    assert group.counters[0].tolist() == group.counters[1].tolist()
    counted = [8, 0, 0, 0] if proven else [8, 1, 1, 8]
    assert group.counters[0].tolist() == counted
    require_whole(found, rows, native)


@NATIVE
def test_a_sample_does_not_depend_on_its_neighbours(native: bool) -> None:
    """One that is proven keeps its bits beside one that is not."""
    logits = normal(3, 120, scale=2)
    asked = [Request(), Request(temperature=1.0, top_k=5), Request(temperature=2.0, top_k=70)]
    whole = sampled(Rows(logits, asked, 60, 8), 2, native)[0]
    some = sampled(Rows(logits[:2], asked[:2], 60, 8), 2, native)[0]
    assert whole.unsure.tolist() == [0, 0, 1]
    for one, other in zip(whole, some, strict=True):
        assert torch.equal(one[:2], other)


@NATIVE
def test_ties_over_ranks_go_to_the_lowest_ids(native: bool) -> None:
    """The same best logit on every rank, drawn from the first two of them."""
    logits = normal(1, 90).clamp(max=1).repeat(60, 1)
    logits[:, [70, 40, 12, 41]] = 2.0
    greedy = sampled(Rows(logits[:1], [Request()], 30, 4), 3, native)[0]
    assert greedy.tokens.tolist() == [12] and greedy.top_tokens[0, :4].tolist() == [12, 40, 41, 70]
    pair = Rows(logits, [Request(temperature=1.0, top_k=2)] * 60, 30, 4)
    found = sampled(pair, 3, native)[0]
    assert set(found.tokens.tolist()) == {12, 40} and not found.unsure.any()


@NATIVE
def test_nothing_is_gathered_for_samples_that_are_sure(native: bool) -> None:
    """Nor read: neither the ranks' halves of the gather's number nor the results change."""
    rows = Rows(normal(4, 300), [Request(), Request(1.0), Request(1.0, top_k=4), Request()], 75, 8)
    found, group = sampled(rows, 4, native)
    half = (len(group.blocks[0]) - HEADER) // 2
    even = [HEADER, HEADER + half][(7 * CALLS + 4 + 1) % 2]
    assert not any(block[even : even + half].any() for block in group.blocks)
    assert not any(counter[table.WHOLE_STEPS :].any() for counter in group.counters)
    require_whole(found, rows, native)


@NATIVE
@pytest.mark.parametrize("vocab", [100, 61, 30])
def test_guesses_of_all_ranks_are_those_of_whole_logits(native: bool, vocab: int) -> None:
    """Draft vocabularies of all ranks, of two of them, of less than one."""
    world, columns, drafts = 4, min(vocab, 25), 3
    asked = [Request(), Request(1.0), Request(0.7, repetition=1.4), Request(presence=2.0)]
    logits = normal(4, vocab, scale=2).mul(2).round()
    rows = Rows(logits, [replace(r, seed=(n, n)) for n, r in enumerate(asked)], columns, 1)
    lines = counts(5, 100), *rows.tables[1:]
    at = rows.step[2], rows.step[3], rows.step[4], rows.emits
    group, found = Group(world, native), {}

    def outputs() -> tuple[Tensor, Tensor]:
        guesses = torch.arange(15, dtype=torch.int32).view(5, drafts)
        return guesses, torch.zeros(4 + 4 * drafts, dtype=torch.int32)

    def work(rank: int) -> None:
        written, op = outputs(), draft_candidates if native else draft_candidates.reference
        numbers = 2, drafts, STOP_IDS, BIAS_IDS, *group.ranks(rank), -1, CALLS, world, vocab
        op(rows.part(rank), *lines, *written, *at, *numbers)
        found[rank] = written

    group.run(work)
    wanted, op = outputs(), draft_sample if native else draft_sample.reference
    op(logits, *lines, *wanted, *at, 2, drafts, STOP_IDS, BIAS_IDS)
    for written in found.values():
        assert all(torch.equal(one, other) for one, other in zip(written, wanted, strict=True))
