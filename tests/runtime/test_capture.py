"""Capture and replay without a GPU: torch's graphs, streams and events are stand-ins that record.

A captured call runs when its graph is replayed, as on a device. What only a device can show is in
`tests/gpu`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from support.fake_spec import build_manifest, build_spec
from torch import Tensor

from inkling_engine.artifacts.manifest import Manifest
from inkling_engine.runtime import capture
from inkling_engine.runtime.capture import CapturedGraphs

LINES = 5
RINGS = ("pools.results_int", "pools.results_float", "pools.step_counter")


class Graph:
    """A graph of the calls made between its capture's begin and end."""

    open: ClassVar[Graph | None] = None
    captured: ClassVar[list[Graph]] = []

    def __init__(self, *, keep_graph: bool) -> None:
        assert keep_graph, "its edges are changed before it is instantiated"
        self.ready = self.overlapped = False
        self.calls: list[Callable[[], None]] = []
        self.pool: object = None

    def capture_begin(self, pool: object) -> None:
        assert Graph.open is None, "one capture at a time"
        Graph.open, self.pool = self, pool

    def capture_end(self) -> None:
        assert Graph.open is self
        Graph.open = None
        Graph.captured.append(self)

    def raw_cuda_graph(self) -> Graph:
        return self

    def instantiate(self) -> None:
        assert self.overlapped, "edges change before"
        self.ready = True

    def replay(self) -> None:
        assert self.ready
        for call in self.calls:
            call()


class Program:
    """A step that writes its number and name into its line of both rings."""

    def __init__(self, number: int) -> None:
        self.number, self.runs, self.fails = number, 0, False

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """Run, or be captured."""
        if self.fails:
            raise RuntimeError("not permitted while capturing")
        if Graph.open:
            Graph.open.calls.append(lambda: self.step(*inputs))
        else:
            self.step(*inputs)
        return []

    def step(self, ints: Tensor, floats: Tensor, counter: Tensor) -> None:
        """What the device does."""
        self.runs += 1
        line = int(counter) % LINES
        ints[line], floats[line] = int(counter), self.number
        counter += 1


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    class Quiet:
        def __init__(self, *_: object) -> None:
            self.waits = 0

        def synchronize(self) -> None:
            self.waits += 1

        def record(self) -> None:
            pass

        def query(self) -> bool:
            self.waits += 1
            return self.waits > 2

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", Quiet)
    monkeypatch.setattr(torch.cuda, "Event", Quiet)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(capture, "pinned", torch.zeros_like)
    monkeypatch.setattr(capture, "overlap_launches", lambda g: setattr(g, "overlapped", True))
    Graph.captured, Graph.open = [], None
    capture.step_stream.cache_clear()
    yield
    capture.step_stream.cache_clear()


def _manifest() -> Manifest:
    whole = build_manifest(build_spec())
    programs = [msgspec.structs.replace(program, inputs=RINGS) for program in whole.programs]
    return msgspec.structs.replace(whole, programs=tuple(programs))


def _open(steps: int) -> tuple[CapturedGraphs, dict[str, Any], list[Tensor]]:
    manifest = _manifest()
    tensors = [torch.zeros(LINES, 2), torch.zeros(LINES, 2), torch.zeros(1, dtype=torch.int32)]
    programs: dict[str, Any] = {p.name: Program(at) for at, p in enumerate(manifest.programs)}
    inputs = {program.name: tensors for program in manifest.programs}
    return CapturedGraphs(manifest, programs, inputs, steps), programs, tensors


def test_all_are_warmed_up_and_captured_largest_first_in_one_pool() -> None:
    graphs, programs, (_, _, counter) = _open(3)
    assert int(counter) == 0, "warm-ups do not count"
    assert all(program.runs == capture.WARM_UPS for program in programs.values())
    lengths = [len(graph.calls) for graph in Graph.captured]
    assert lengths == [1, 1, 1, 3, 1, 3, 1, 3], "two extends, then decodes with both lengths"
    assert {graph.pool for graph in Graph.captured} == {"pool"}
    assert list(graphs.timings) == ["warm up", "capture"]
    names = [name for name, steps in graphs.outputs if steps == 1]
    sizes = {p.name: p.bucket.tokens for p in _manifest().programs}
    assert [sizes[name] for name in names] == sorted(sizes.values(), reverse=True)


def test_a_replay_fetches_its_own_lines_around_the_ring() -> None:
    graphs, programs, _ = _open(3)
    ints, floats = graphs.mirrors
    names, step = list(programs), 0
    for name, steps in [(names[0], 1), (names[1], 3), (names[4], 1), (names[0], 3), (names[2], 3)]:
        ints.fill_(-1)
        graphs.replay(name, steps)()
        fetched = {line: int(ints[line, 0]) for line in range(LINES) if ints[line, 0] >= 0}
        assert fetched == {number % LINES: number for number in range(step, step + steps)}
        assert {float(floats[line, 1]) for line in fetched} == {programs[name].number}
        step += steps


class Watchman:
    """The seat of a rank of several."""

    def __init__(self, rank: int) -> None:
        self.rank, self.calls = rank, list[str]()

    def mark(self) -> None:
        self.calls.append("mark")

    def watch(self) -> None:
        self.calls.append("watch")


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_of_several_is_watched_while_a_replay_is_waited_for(rank: int) -> None:
    graphs, programs, _ = _open(1)
    seat: Any = Watchman(rank)
    graphs.seat = seat
    ended = graphs.replay(list(programs)[-1], 1)
    assert seat.calls == ["mark"]
    ended()
    assert seat.calls == ["mark", "watch", "watch"]
    ints, floats = graphs.mirrors
    assert bool(ints.any() or floats.any()) == (rank == 0), "rank 0 alone reads results"


def test_two_replays_may_be_under_way() -> None:
    graphs, programs, _ = _open(1)
    name = next(iter(programs))
    one, two = graphs._ended
    waits: list[Any] = [graphs.replay(name, 1), graphs.replay(name, 1)]
    waits[0]()
    waits += [graphs.replay(name, 1)]
    assert (one.waits, two.waits) == (1, 0)  # type: ignore[attr-defined]
    waits[1]()
    waits[2]()
    assert (one.waits, two.waits) == (2, 1)  # type: ignore[attr-defined]


def test_a_program_that_cannot_be_captured_leaves_no_capture_open() -> None:
    graphs, programs, _ = _open(1)
    name, program = next(iter(programs.items()))
    program.fails = True
    with pytest.raises(RuntimeError, match="not permitted"):
        graphs._capture(name, 1, "pool")
    assert Graph.open is None


def test_a_buffer_is_sent_on_the_stream_and_waited_for() -> None:
    host, device = torch.arange(8), torch.zeros(8, dtype=torch.int64)
    upload = capture.Upload(host, device)
    upload.send()
    assert torch.equal(host, device)
    upload.wait()
    assert upload._sent.waits == 1  # type: ignore[attr-defined]
