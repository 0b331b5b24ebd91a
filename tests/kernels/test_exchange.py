"""Ranks that exchange: threads of one process, each with its own block, at speeds of their own.

An op's call lets other threads run, native or reference. Every rank's results are compared, to the bit,
with what one rank would compute from the parts of all, summed in rank order and rounded once.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from inkling_engine.kernels import _exchange
from inkling_engine.kernels._case_rows import Row, Step
from inkling_engine.kernels._cases import Ranks, normal
from inkling_engine.kernels._exchange import ABSENT_LOGIT, ERROR, LIMIT, exchange_words
from inkling_engine.kernels._op import Op
from inkling_engine.kernels.boundary import boundary
from inkling_engine.kernels.draft_input import draft_input
from inkling_engine.kernels.embed_norm import embed_norm
from inkling_engine.kernels.gather_logits import gather_logits
from inkling_engine.kernels.rmsnorm.reference import rmsnorm

pytestmark = pytest.mark.usefixtures("native_library")

TOKENS, WIDTH, VOCAB, COLUMNS = 4, 1024, 12, 500
CALLS = 4
STEP = Step((Row(1, 9, 2), Row(2, 1, 2)), bucket_tokens=TOKENS)
UNSURE = torch.ones(TOKENS, dtype=torch.int32)
NATIVE = pytest.mark.parametrize("native", [True, False], ids=["native", "reference"])
Worker = Callable[[int], None]


@dataclass
class Group:
    """Blocks of `world` ranks in this process; those in `absent` are not there."""

    world: int
    native: bool
    absent: frozenset[int] = frozenset()
    limit_ms: int = 0
    blocks: list[Tensor] = field(init=False)
    counters: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        words = exchange_words(4 * TOKENS * WIDTH)
        self.blocks = [torch.zeros(words, dtype=torch.int64) for _ in range(self.world)]
        for block in self.blocks:
            block[LIMIT] = self.limit_ms
        self.counters = [torch.tensor([7, 0, 0, 0]) for _ in range(self.world)]

    def ranks(self, rank: int) -> tuple[Tensor, ...]:
        """peers, exchange, step_counter, rank of one rank."""
        peers = torch.zeros(8, dtype=torch.int64)
        for other in set(range(self.world)) - self.absent:
            peers[other] = self.blocks[other].data_ptr()
        number = torch.tensor([rank, 0, 0, 0], dtype=torch.int32)
        return peers, self.blocks[rank], self.counters[rank], number

    def call(self, op: Op, *arguments: object) -> Tensor:
        """The op's first result, native or reference."""
        found = op(*arguments) if self.native else op.reference(*arguments)
        first: Tensor = found[0] if isinstance(found, tuple) else found
        return first

    def run(self, work: Worker) -> None:
        """`work` of every rank that is there at once; the first failure is raised."""
        failures: list[Exception] = []

        def guarded(rank: int) -> None:
            try:
                work(rank)
            except (AssertionError, RuntimeError) as failure:
                failures.append(failure)
                self.blocks[rank][ERROR] = 1 + rank

        there = sorted(set(range(self.world)) - self.absent)
        threads = [threading.Thread(target=guarded, args=(rank,)) for rank in there]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "a rank hangs"
        if failures:
            raise failures[0]


def part(rank: int, step: int, dtype: torch.dtype) -> Tensor:
    """A rank's part [T, H] of a sub-layer's output. Those of ranks 1 and 2 cancel, so the order of a
    sum shows, and so does every rounding."""
    if rank in (1, 2):
        return normal(TOKENS, WIDTH, dtype=dtype, scale=1e6 * (3 - 2 * rank), seed=100 * step)
    return normal(TOKENS, WIDTH, dtype=dtype, seed=100 * step + rank)


def ordered_sum(parts: list[Tensor]) -> Tensor:
    """fp32, in the order given, rounded once."""
    total = torch.zeros(parts[0].shape)
    for one in parts:
        total = total + one.float()
    return total.to(parts[0].dtype)


def boundary_of(
    group: Group, x: Tensor, ranks: tuple[Tensor, ...], call: int, world: int
) -> Tensor:
    """The normed rows [T, H]; nothing but x differs between calls."""
    width, dtype = x.shape[1], x.dtype
    return group.call(
        boundary, x, torch.zeros_like(x), normal(width, 4, scale=0.5), torch.ones(width, dtype=dtype),
        STEP.rings(1, 3, width, dtype), STEP.token_rows, STEP.slots, STEP.sources, STEP.starts,
        STEP.lengths, *STEP.destinations, *ranks, 0, call, CALLS, 1e-6, world,
    )  # fmt: skip


class Program:
    """All exchanging ops in a row, as a rank of `group` runs them, and what they must give."""

    def __init__(self, group: Group, dtype: torch.dtype) -> None:
        """Weights whose vocabulary is cut over the ranks."""
        self.group, self.dtype = group, dtype
        self.table = normal(group.world * VOCAB, WIDTH, dtype=dtype)
        self.norm = 1 + normal(WIDTH, dtype=dtype, scale=0.1)

    def tokens(self, step: int) -> Tensor:
        """[T] i32, of all ranks."""
        order = torch.Generator().manual_seed(step)
        size = (TOKENS,)
        return torch.randint(len(self.table), size, generator=order, dtype=torch.int32)

    def logits(self, rank: int, step: int) -> Tensor:
        """[T, COLUMNS] f32."""
        return normal(TOKENS, COLUMNS, seed=100 * step + rank)

    def given(self, step: int) -> list[int]:
        """The ranks that give something."""
        return [rank for rank in range(self.group.world) if rank not in self.group.absent]

    def run(self, rank: int, step: int) -> list[Tensor]:
        """Results of one step on one rank."""
        group, ranks = self.group, self.group.ranks(rank)
        table = self.table[rank * VOCAB : (rank + 1) * VOCAB]
        tokens, world = self.tokens(step), group.world
        hidden = group.call(embed_norm, tokens, table, self.norm, *ranks, 0, CALLS, 1e-6, world)
        normed = boundary_of(group, part(rank, step, self.dtype), ranks, 1, world)
        numbers = 2, CALLS, world, world * COLUMNS - 3
        logits, unsure = self.logits(rank, step), UNSURE * (step % 3 != 1)
        whole = group.call(gather_logits, logits, unsure, *ranks, *numbers)
        whole = whole if unsure.any() else torch.zeros_like(whole)
        group.counters[rank][0] += 1  # as the commit does
        rows = torch.zeros(TOKENS, dtype=torch.int32), torch.tensor([0, TOKENS], dtype=torch.int32)
        drafted = group.call(
            draft_input, hidden, tokens, table, self.norm, self.norm, self.norm, *rows, *ranks,
            0, 0, 3 - CALLS, CALLS, 1e-6, world, True,
        )  # fmt: skip
        return [hidden, normed, whole, drafted[:, WIDTH:]]

    def wanted(self, step: int) -> list[Tensor]:
        """What every rank must have."""
        there = self.given(step)
        tokens = self.tokens(step).long()
        lost = torch.tensor([int(token) // VOCAB not in there for token in tokens])
        rows = self.table[tokens].where(~lost[:, None], 0)
        x = ordered_sum([part(rank, step, self.dtype) for rank in there])
        columns = [
            self.logits(rank, step)
            if rank in there
            else torch.full((TOKENS, COLUMNS), ABSENT_LOGIT)
            for rank in range(self.group.world)
        ]
        hidden = self._norm(rows)
        alone = boundary_of(self.group, x, Ranks().tensors, 0, 1)
        whole = torch.cat(columns, 1)[:, :-3]
        if step % 3 == 1:  # every sample is sure
            whole = torch.zeros_like(whole)
        return [hidden, alone, whole, self._norm(hidden)]

    def _norm(self, x: Tensor) -> Tensor:
        if not self.group.native:
            return rmsnorm(x, self.norm, 1e-6)
        normed: Tensor = torch.ops.inkling.rmsnorm.default(x, self.norm, 1e-6)
        return normed


def lagging(rank: int, step: int) -> None:
    """Each rank has its own speed, and now and then stands still."""
    order = random.Random(1000 * step + rank)
    time.sleep(order.choice([0.0, 0.0, 0.0001, 0.0005, 0.002 * rank]))


def check(group: Group, steps: int, dtype: torch.dtype) -> None:
    """Run `steps` at ragged speeds; every rank has what it must, to the bit."""
    program = Program(group, dtype)
    wanted = [program.wanted(step) for step in range(steps)]

    def work(rank: int) -> None:
        for step in range(steps):
            lagging(rank, step)
            for one, other in zip(program.run(rank, step), wanted[step], strict=True):
                assert torch.equal(one, other), f"rank {rank}, step {step}"

    group.run(work)
    assert not any(int(block[ERROR]) for block in group.blocks)


@NATIVE
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_ranks_of_any_speed_have_the_same_bits(
    native: bool, world: int, dtype: torch.dtype
) -> None:
    check(Group(world, native), 150 if native else 25, dtype)


def test_nobody_writes_what_a_slow_rank_still_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank stands still between a flag that has come and the data behind it."""
    arrived = _exchange._arrived

    def slow(block: int, peer: int, rank: int, sequence: int, deadline: float) -> bool:
        there = arrived(block, peer, rank, sequence, deadline)
        if block == group.blocks[-1].data_ptr():
            time.sleep(0.003)
        return there

    group = Group(3, native=False)
    monkeypatch.setattr(_exchange, "_arrived", slow)
    check(group, 12, torch.float32)


def test_a_flag_comes_behind_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is slow to write its part keeps the others waiting."""
    move = ctypes.memmove

    def slow(to: int, source: int, size: int) -> None:
        begin = group.blocks[0].data_ptr()
        if begin <= to < begin + group.blocks[0].nbytes:
            time.sleep(0.003)
        move(to, source, size)

    group = Group(2, native=False)
    monkeypatch.setattr(ctypes, "memmove", slow)
    check(group, 12, torch.float32)


def test_the_order_of_the_sum_shows() -> None:
    """Else the tests above could not tell it."""
    for dtype in (torch.float32, torch.bfloat16):
        parts = [part(rank, 0, dtype) for rank in range(3)]
        assert not torch.equal(ordered_sum(parts), ordered_sum(parts[::-1]))


@NATIVE
@pytest.mark.parametrize("absent", [{1}, {0, 3}, {0, 1, 3}], ids=str)
def test_an_absent_rank_gives_nothing_and_is_not_waited_for(native: bool, absent: set[int]) -> None:
    check(Group(4, native, frozenset(absent)), 10, torch.float32)


@NATIVE
def test_a_rank_that_never_comes_is_noted_and_waited_for_once(native: bool) -> None:
    """The others then have what came, in this call and the next ones."""
    group = Group(3, native, limit_ms=300)
    spent: dict[int, float] = {}
    found: dict[int, Tensor] = {}

    def work(rank: int) -> None:
        if rank == 1:
            return
        begin = time.monotonic()
        for call in range(CALLS):
            found[rank] = boundary_of(
                group, part(rank, 0, torch.float32), group.ranks(rank), call, 3
            )
        spent[rank] = time.monotonic() - begin

    group.run(work)
    assert [int(block[ERROR]) for block in group.blocks] == [2, 0, 2]
    assert all(0.3 <= seconds < 2 for seconds in spent.values())
