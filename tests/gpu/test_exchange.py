"""Ranks that exchange on GPUs: captured steps of all exchanging ops, replayed thousands of times.

One process drives a stream a rank, on as many GPUs as there are; on one GPU the ranks' kernels run beside
each other, so they must be small. Parts change from step to step, ranks are delayed at random, steps
of several sizes alternate. A graph compares its results with what one rank alone computes from the sum of
all parts, and counts what differs: sums to the bit (rings hold them), hidden and normed rows, which another
kernel computes, but for their last bit. These must be the same bits on all ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from support.launches import assert_close
from torch import Tensor

from inkling_engine.kernels import _exchange
from inkling_engine.kernels._case_rows import INERT, Row, Step
from inkling_engine.kernels._cases import Ranks
from inkling_engine.kernels._exchange import (
    CONTROL,
    ERROR,
    HEADER,
    LIMIT,
    PHASES,
    exchange_words,
)
from inkling_engine.kernels.boundary import boundary
from inkling_engine.kernels.draft_input import draft_input
from inkling_engine.kernels.embed_norm import embed_norm
from inkling_engine.kernels.gather_logits import gather_logits
from inkling_engine.runtime.overlap import overlap_launches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
REPLAYS = 3000
KINDS, CALLS, WIDTH, VOCAB, COLUMNS = 4, 5, 1024, 40, 3000
BOUNDARIES = (1, 2, 4, 5)  # hidden and normed rows among a step's results
ROUNDING = {torch.bfloat16: 2.0**-7, torch.float32: 2.0**-20}
BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
STEPS = {
    "decode": Step(tuple(Row(1 + i, 9 + i) for i in range(8)), bucket_tokens=8),
    "holes": Step((Row(1, 9), INERT, Row(3, 1), INERT, Row(2, 30)), bucket_tokens=5),
    "uneven": Step(
        (Row(1, 3, 3, snapshots=((2, 5),)), INERT, INERT, Row(2, 1, 2), INERT, INERT),
        bucket_tokens=6,
    ),
    "many": Step((Row(1, 3, 4), INERT, Row(2, 1, 1), INERT, INERT, INERT), bucket_tokens=6),
    "one": Step((Row(1, 9),), bucket_tokens=1),
    "extend": Step((Row(1, 3, 17), Row(4, 8, 2, source=9)), bucket_tokens=24),
    "large": Step((Row(1, 3, 90),), bucket_tokens=96),
}  # fmt: skip


def device(rank: int) -> torch.device:
    """Where a rank is."""
    return torch.device("cuda", rank % torch.cuda.device_count())


def settle() -> None:
    """Wait for all GPUs."""
    for number in range(torch.cuda.device_count()):
        torch.cuda.synchronize(number)


@dataclass
class Group:
    """Exchange blocks of `world` ranks, which do not know one another before `connect`."""

    world: int
    part_bytes: int
    tensors: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        words = exchange_words(self.part_bytes, self.world)
        for rank in range(self.world):
            block = torch.zeros(words, dtype=torch.int64, device=device(rank))
            peers, counter = (torch.zeros(n, dtype=torch.int64).to(block.device) for n in (8, 4))
            number = torch.tensor([rank, 0, 0, 0], dtype=torch.int32, device=block.device)
            self.tensors.append((peers, block, counter, number))
        for _, one, _, _ in self.tensors:  # GPUs get access to each other by torch's first copy
            for _, other, _, _ in self.tensors:
                one[:1].copy_(other[:1])

    def connect(self, limit_ms: int) -> None:
        """Let the ranks know one another, from a clean state on."""
        settle()
        addresses = [block.data_ptr() for _, block, _, _ in self.tensors]
        for _, block, _, _ in self.tensors:
            for _, other, _, _ in self.tensors:
                block[:1].copy_(other[:1])  # turns on peer access
        for peers, block, counter, _ in self.tensors:
            peers[: self.world] = torch.tensor(addresses)
            block.zero_()
            counter.zero_()
            block[LIMIT] = limit_ms
        settle()

    def errors(self) -> list[int]:
        """The ranks' error words."""
        return [int(block[ERROR]) for _, block, _, _ in self.tensors]


class Program:
    """One step of all exchanging ops for one rank, in KINDS variants by the step counter."""

    def __init__(self, group: Group, name: str, rank: int, dtype: torch.dtype) -> None:
        self.ranks, self.rank, self.step, self.dtype = group.tensors[rank], rank, STEPS[name], dtype
        self.at, self.world = device(rank), group.world
        torch.manual_seed(7)
        step, tokens = self.step, self.step.bucket_tokens
        self.x = self._parts(tokens, WIDTH, dtype)
        self.logits = self._parts(len(step.rows), COLUMNS, torch.float32)
        self.residual = self._normal(tokens, WIDTH, dtype=dtype)
        self.taps = self._normal(WIDTH, 4)
        self.gain = 1 + self._normal(WIDTH, dtype=dtype) / 8
        self.table = self._normal(self.world * VOCAB, WIDTH, dtype=dtype)
        self.ids = torch.randint(self.world * VOCAB, (KINDS, tokens), dtype=torch.int32).to(self.at)
        self.rings = step.rings(1, 12, WIDTH, dtype).nan_to_num().to(self.at)
        rows = step.token_rows, step.slots, step.sources, step.starts, step.lengths
        self.rows = [one.to(self.at) for one in (*rows, *step.destinations)]
        self.wrong, self.digest = torch.zeros(2, 1, dtype=torch.int64, device=self.at)
        with torch.cuda.device(self.at):  # Triton launches on the current one
            self.wanted = [self.alone(kind) for kind in range(KINDS)]

    def _normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape).to(dtype).to(self.at)

    def _parts(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Every kind's part of every rank [KINDS, world, rows, width], with zeros of both signs."""
        parts = self._normal(KINDS, self.world, rows, width, dtype=dtype)
        parts[:, :, 0, ::3] = 0.0
        parts[:, 0, :, 1::5] = -0.0
        return parts

    def boundary(self, x: Tensor, ranks: tuple[Tensor, ...], call: int, world: int) -> list[Tensor]:
        """Hidden and normed rows and rings of a boundary of `x`."""
        pool = self.rings.clone()
        hidden, normed = boundary.launch(
            x, self.residual, self.taps, self.gain, pool, *self.rows, *ranks, 0, call, CALLS, 1e-6,
            world,
        )  # fmt: skip
        return [hidden, normed, pool]

    def _embed(self, ids: Tensor, table: Tensor, ranks: tuple[Tensor, ...], world: int) -> Tensor:
        found: Tensor = embed_norm.launch(ids, table, self.gain, *ranks, 0, CALLS, 1e-6, world)
        return found

    def _draft(
        self, hidden: Tensor, ids: Tensor, table: Tensor, ranks: tuple[Tensor, ...], world: int
    ) -> Tensor:
        norms = self.gain, self.gain, self.gain
        found: Tensor = draft_input.launch(
            hidden, ids, table, *norms, self.rows[0], self.rows[3], *ranks, 0, 0, 4, CALLS, 1e-6,
            world, True,
        )  # fmt: skip
        return found

    def alone(self, kind: int) -> list[Tensor]:
        """What one rank computes that has all parts."""
        none = tuple(tensor.to(self.at) for tensor in Ranks().tensors)
        total = torch.zeros_like(self.x[kind, 0], dtype=torch.float32)
        for part in self.x[kind]:
            total += part.float()
        x, ids = total.to(self.dtype), self.ids[kind]
        found = [self._embed(ids, self.table, none, 1), *self.boundary(x, none, 0, 1)]
        found += self.boundary(x.flip(0).contiguous(), none, 0, 1)
        whole = self.logits[kind].transpose(0, 1).flatten(1)[:, : self.world * COLUMNS - 3]
        return [*found, whole.contiguous(), self._draft(self.residual, ids, self.table, none, 1)]

    def run(self, delays: random.Random) -> None:
        """The step, with pauses, and its comparison; the counter grows at its end."""
        kind = self.ranks[2][0] % KINDS
        chosen = kind.view(1)
        x = self.x[:, self.rank].index_select(0, chosen)[0]
        logits = self.logits[:, self.rank].index_select(0, chosen)[0]
        ids = self.ids.index_select(0, chosen)[0]
        table = self.table[self.rank * VOCAB : (self.rank + 1) * VOCAB]
        found = [self._embed(ids, table, self.ranks, self.world)]
        pause(delays)
        found += self.boundary(x, self.ranks, 1, self.world)
        found += self.boundary(x.flip(0).contiguous(), self.ranks, 2, self.world)
        pause(delays)
        vocab = self.world * COLUMNS - 3
        unsure = torch.ones(len(logits), dtype=torch.int32, device=self.at)
        found.append(gather_logits.launch(logits, unsure, *self.ranks, 3, CALLS, self.world, vocab))
        found.append(self._draft(self.residual, ids, table, self.ranks, self.world))
        for i, (one, every) in enumerate(zip(found, zip(*self.wanted, strict=True), strict=True)):
            wanted = torch.stack(every).index_select(0, chosen)[0]
            slack = ROUNDING[self.dtype] * wanted.abs().clamp_min(1) if i in BOUNDARIES else 0.0
            self.wrong += ((one - wanted).abs() > slack).sum()
            self.digest.mul_(31).add_(one.view(BITS[one.dtype]).sum())
        self.ranks[2][:1] += 1

    def capture(self, stream: torch.cuda.Stream, delays: random.Random) -> torch.cuda.CUDAGraph:
        """A graph of the step."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, stream=stream):
            self.run(delays)
        overlap_launches(graph.raw_cuda_graph())
        graph.instantiate()
        return graph


def pause(delays: random.Random) -> None:
    """Let the stream stand still for up to some ten microseconds, or not."""
    if cycles := delays.choice([0, 0, 5_000, 40_000]):
        torch.cuda._sleep(cycles)


@pytest.fixture
def streams(world: int) -> Iterator[list[torch.cuda.Stream]]:
    """One a rank."""
    yield [torch.cuda.Stream(device(rank)) for rank in range(world)]
    settle()


def on_every_rank(streams: list[torch.cuda.Stream], work: Callable[[int], None]) -> None:
    """Call `work` with each rank, its device and its stream the current ones."""
    for rank, stream in enumerate(streams):
        with torch.cuda.device(device(rank)), torch.cuda.stream(stream):
            work(rank)


def replay(
    graphs: dict[tuple[int, int], torch.cuda.CUDAGraph], i: int, delay: int, late: int, rank: int
) -> None:
    """Replay step `i` of a rank, that of rank `late` after `delay` cycles."""
    if delay and rank == late:
        torch.cuda._sleep(delay)
    graphs[i, rank].replay()


def warm_up(programs: list[Program], rank: int) -> None:
    """Run a step while the peers are absent: what a first call loads may not be waited for."""
    programs[rank].run(random.Random(0))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("pushed", [True, False], ids=["pushed", "pulled"])
def test_replays_are_right_to_the_bit(
    world: int,
    dtype: torch.dtype,
    pushed: bool,
    streams: list[torch.cuda.Stream],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A limit of a second would be passed by any rank that hangs."""
    # a slot holds all steps but the large one's, or nothing
    slot = 24 * WIDTH * dtype.itemsize // _exchange.WORD
    monkeypatch.setattr(_exchange, "MOST_PUSHED", slot if pushed else 0)
    group = Group(world, max(96 * WIDTH, 8 * COLUMNS) * 4)
    programs = [[Program(group, name, rank, dtype) for rank in range(world)] for name in STEPS]
    graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
    for i, ranks in enumerate(programs):
        on_every_rank(streams, partial(warm_up, ranks))
        for rank, program in enumerate(ranks):
            with torch.cuda.device(device(rank)):
                graphs[i, rank] = program.capture(streams[rank], random.Random(10 * i + rank))
            program.wrong.zero_()
            program.digest.zero_()
    group.connect(limit_ms=1000)
    order = random.Random(1)
    for count in range(REPLAYS):
        i, late = order.randrange(len(programs)), order.randrange(2 * world)
        delay = order.choice([1_000, 30_000, 100_000])
        on_every_rank(streams, partial(replay, graphs, i, delay if late < world else 0, late))
        if count % 100 == 99:
            settle()
    settle()
    assert group.errors() == [0] * world
    assert [int(one.wrong) for ranks in programs for one in ranks] == [0] * world * len(programs)
    assert all(len({int(one.digest) for one in ranks}) == 1 for ranks in programs)
    assert all(int(tensors[2][0]) == REPLAYS for tensors in group.tensors)
    if pushed:  # every slot is clean again
        for _, block, _, _ in group.tensors:
            half = _exchange.half_words(len(block), world)
            assert not block[HEADER + 2 * half :].any()


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize("pushed", [True, False], ids=["pushed", "pulled"])
def test_a_rank_that_never_comes_is_noted(
    world: int, pushed: bool, streams: list[torch.cuda.Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the limit; what did not come counts as absent, and the next calls do not wait."""
    if not pushed:
        monkeypatch.setattr(_exchange, "MOST_PUSHED", 0)
    group = Group(world, 24 * WIDTH * 4)
    program = Program(group, "decode", 0, torch.float32)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    x, none = program.x[0, 0], tuple(tensor.cuda() for tensor in Ranks().tensors)
    settle()
    with torch.cuda.stream(streams[0]):
        program.run(random.Random(0))  # compiles
        wanted = program.boundary(x, none, 0, 1)
        group.connect(limit_ms=200)
        begin.record()
        first = program.boundary(x, group.tensors[0], 1, world)
        end.record()
        second = program.boundary(x, group.tensors[0], 2, world)
    settle()
    assert group.errors()[0] == 2
    assert 190 < begin.elapsed_time(end) < 2000
    for found in (first, second):
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other.cpu(), 1e-6)
    assert int(group.tensors[0][1][CONTROL]) == (0 if pushed else PHASES * (2 + 1))
