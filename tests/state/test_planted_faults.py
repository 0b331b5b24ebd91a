"""Every invariant of state, scheduling and sampling has a planted fault that a test turns red on.

Each fault is planted for the length of one test, which runs as it stands, with traces recorded
under the fault; two are planted in a copy of the C++ sources, in a process of its own. The list is
that of `docs/architecture.md`.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from oracle.test_appendix_a import IDS, Run
from support import faults
from support.checkpoints import write_appendix_a
from support.engines import open_engine
from support.faults import ATTENTION, CONVOLVING, METADATA, PROLOGUE, SAMPLE, Plant, before, given
from support.rig import Model, Traces, native_step
from support.stepper import Stepper, convert, recorded

from inkling_engine.compile import steps
from inkling_engine.compile.models.inkling import block, model, names
from inkling_engine.kernels import native, table
from inkling_engine.runtime.capacity import Stock
from inkling_engine.runtime.holdings import Holdings
from inkling_engine.runtime.prefix import Snapshot
from inkling_engine.runtime.requests import Sequence

pytestmark = pytest.mark.usefixtures("native_library")

ROOT = Path(__file__).parent.parent.parent
APPENDIX = "oracle/test_appendix_a.py::test_logits_are_the_golden_ones"
CHUNKS = "state/test_chunking.py::test_a_few_chunks_across_window_extent_and_log_floor"
SHORT = "state/test_chunking.py::test_prompts_shorter_than_the_window_in_a_larger_bucket"
REUSED = "state/test_chunking.py::test_a_slot_shows_nothing_of_its_earlier_requests"
POISON = "state/test_poison.py::test_everything_that_is_not_live_may_hold_anything"
PADDED = "state/test_poison.py::test_padded_tokens_reach_no_live_row_and_no_expert"
INERT = "state/test_poison.py::test_inert_rows_leave_every_slot_and_page_alone"
ENDED = "state/test_poison.py::test_a_finished_request_changes_nothing_more"
BEHIND = "state/test_poison.py::test_pages_behind_the_window_may_hold_anything"
FIRST = "state/test_poison.py::test_the_very_first_requests_see_no_reserved_memory"
EXACT = "state/test_mutation.py::test_the_eager_step_writes_the_same"
PACKED = "state/test_snapshots.py::test_each_request_has_a_grid_of_its_own"
ANYWHERE = "state/test_snapshots.py::test_boundaries_anywhere_in_a_chunk"
DECODED = "state/test_snapshots.py::test_decoding_crosses_the_grid"
ONE_SHOT = "state/test_snapshots.py::test_destinations_are_one_shot"
RESUMED = "state/test_snapshots.py::test_a_request_goes_on_from_a_snapshot"
STALE = "state/test_snapshots.py::test_a_replayed_buffer_applies_nothing_twice"
HITS = "state/test_prefix_hits.py::test_a_hit_at_every_grid_boundary"
PREEMPTED = "state/test_prefix_hits.py::test_preemption_leaves_no_trace"
OUTLIVES = "runtime/test_serving.py::test_a_snapshot_that_requests_start_from_outlives_others"
SAMPLING = "state/test_sampling_engine.py::"
PARAMETERS: dict[str, Any] = {
    "size": "ring",
    "value": math.nan,
    "start": 6,
    "kind": "decode",
    "length": 16,
    "chunk": 5,
    "name": "frequency",
    "full": 13,
}


class Fault(NamedTuple):
    """An invariant, what breaks it, how, and the test that must turn red."""

    invariant: str
    fault: str
    plant: Plant
    caught_by: str


def halves(patch: pytest.MonkeyPatch) -> None:
    """Interleaved gate and up rows are read as two halves."""
    read = {"even": (0, 1), "odd": (1, 2)}

    def wrong(rows: names.Rows, width: int) -> tuple[int, int, int]:
        first, last = read[rows]
        return first * width, last * width, 1

    patch.setattr(names, "gate_up_rows", wrong)


def slot_0_is_free(patch: pytest.MonkeyPatch) -> None:
    """The inert number is handed out."""
    right = Stock.__init__

    def wrong(self: Stock, size: int, first: int = 1) -> None:
        right(self, size, first)
        self.free.append(0)

    patch.setattr(Stock, "__init__", wrong)


def frees_early(patch: pytest.MonkeyPatch) -> None:
    """A window page returns one page of tokens too early."""
    right = Holdings.__init__

    def wrong(self: Holdings, *arguments: Any, **options: Any) -> None:
        right(self, *arguments, **options)
        self._past -= self._page

    patch.setattr(Holdings, "__init__", wrong)


def forgets_a_window_page(patch: pytest.MonkeyPatch) -> None:
    """The oldest page that window layers see from a hit's end is not mapped."""
    right = Holdings.enter

    def wrong(self: Holdings, sequence: Sequence, hit: Snapshot | None) -> None:
        right(self, sequence, hit)
        for at, (kind, slot, index, _) in enumerate(sequence.backlog):
            if kind == table.WINDOW_TABLE:
                sequence.backlog[at] = kind, slot, index, 0
                break

    patch.setattr(Holdings, "enter", wrong)


def evicts_live_pages(patch: pytest.MonkeyPatch) -> None:
    """What the cache lets go of is free, whoever else holds it."""
    right = Stock.drop

    def wrong(self: Stock, number: int) -> None:
        held = not self.is_pinned(number)
        right(self, number)
        if held:
            self.free.append(number)

    patch.setattr(Stock, "drop", wrong)


BOUNDARY = (block, "boundary")
FAULTS = [
    Fault(
        "a conv window is the last three inputs",
        "it ends one input early",
        before(faults.lagging_window, BOUNDARY),
        CHUNKS,
    ),
    Fault(
        "windows end with the last live token",
        "the bucket's last tokens are kept",
        before(faults.window_of_the_bucket, BOUNDARY),
        SHORT,
    ),
    Fault(
        "the last tap is the current token",
        "tap order reversed",
        before(given(conv_weight=lambda a: a["conv_weight"].flip(1)), BOUNDARY),
        APPENDIX,
    ),
    Fault(
        "attention and MLP convs have an inner residual",
        "it is left out",
        before(given(conv_weight=faults.without_residual), BOUNDARY),
        APPENDIX,
    ),
    Fault(
        "a window is masked at length 0",
        "the slot's old window is read",
        before(given(lengths=lambda a: a["lengths"].clamp(min=1)), *CONVOLVING),
        POISON,
    ),
    Fault(
        "a row starts from its source",
        "it starts from its own slot",
        before(given(sources=lambda a: a["slots"]), *CONVOLVING),
        RESUMED,
    ),
    Fault(
        "inert rows write nothing",
        "they write through slot -1",
        before(faults.minus_one, BOUNDARY),
        INERT,
    ),
    Fault(
        "slot 0 never enters arithmetic",
        "it is multiplied by a mask of 0",
        before(faults.reads_slot_0, BOUNDARY),
        POISON,
    ),
    Fault(
        "page 0 never enters arithmetic",
        "it is multiplied by a mask of 0",
        before(faults.reads_page_0, *ATTENTION),
        POISON,
    ),
    Fault(
        "padded tokens write no KV",
        "they write to page 0",
        before(faults.writes_padded_kv, *PROLOGUE),
        EXACT,
    ),
    Fault(
        "padded tokens reach no expert",
        "they are routed with the last row's",
        before(given(starts=faults.all_tokens_live), (block, "router"), (block, "experts")),
        PADDED,
    ),
    Fault(
        "a window layer sees exactly its window",
        "one key more",
        before(given(window=lambda a: a["window"] + bool(a["window"])), *ATTENTION),
        APPENDIX,
    ),
    Fault(
        "beyond the extent there is no bias",
        "the last distance's bias goes on",
        before(given(rel_proj=faults.clamped_bank), *ATTENTION),
        APPENDIX,
    ),
    Fault(
        "tau is that of the absolute position",
        "positions count from the chunk's start",
        before(given(positions=faults.from_the_chunk), *PROLOGUE),
        REUSED,
    ),
    Fault(
        "the router's bias chooses and does not weigh",
        "it is in the weights",
        before(faults.biased_weights, (block, "router")),
        APPENDIX,
    ),
    Fault(
        "gate and up rows are interleaved on disk",
        "they are read as halves",
        halves,
        APPENDIX,
    ),
    Fault(
        "sums do not depend on the batch",
        "more than 4 rows are summed in another order",
        before(faults.size_dependent, (block, "linear")),
        CHUNKS,
    ),
    Fault(
        "admission lines are one-shot",
        "their slot is not cleared",
        before(faults.keeping("admit_ints", table.ADMIT_SLOT), *METADATA),
        STALE,
    ),
    Fault(
        "page lines are one-shot",
        "their slot is not cleared",
        before(faults.keeping("page_updates", 1), *METADATA),
        STALE,
    ),
    Fault(
        "snapshot lines are one-shot",
        "their slot is not cleared",
        before(faults.keeping("snapshot_updates", 0), *METADATA),
        STALE,
    ),
    Fault(
        "a destination serves one boundary",
        "it stays on the list",
        before(faults.keeping_destinations, *METADATA),
        ONE_SHOT,
    ),
    Fault(
        "a snapshot is taken at its boundary",
        "one token before it",
        before(faults.early_offsets, *METADATA),
        ANYWHERE,
    ),
    Fault(
        "each row has a grid of its own",
        "one grid lies over the packed tokens",
        before(faults.flat_grid, *METADATA),
        PACKED,
    ),
    Fault(
        "the snapshot scatter is in every program",
        "decode steps have none",
        before(faults.no_scatter_in_decode, *METADATA),
        DECODED,
    ),
    Fault(
        "a finished request is inert",
        "its rows go on",
        before(given(request_state=faults.unfinished), *METADATA),
        ENDED,
    ),
    Fault(
        "admission clears a slot's counts",
        "the last request's stay",
        before(faults.keeping_counts, *METADATA),
        EXACT,
    ),
    Fault(
        "result lines of inert rows are zeros",
        "they keep what they held",
        before(faults.stale_results, (steps, "commit")),
        INERT,
    ),
    Fault(
        "a draw depends on seed, position and token",
        "and on the row",
        before(given(lengths=faults.shifted_by_row), *SAMPLE),
        SAMPLING + "test_a_seed_alone_decides_the_draws",
    ),
    Fault(
        "penalties count a request's own tokens",
        "all requests' tokens are counted",
        before(given(token_counts=faults.everyones_counts), *SAMPLE),
        SAMPLING + "test_penalties_are_those_of_a_plain_recomputation",
    ),
    Fault(
        "stops are masked until min_tokens",
        "they are not",
        before(given(request_ints=faults.no_minimum), *SAMPLE),
        SAMPLING + "test_stops_and_budgets",
    ),
    Fault(
        "logprobs are of the raw distribution",
        "of the tempered one",
        before(faults.processed_logprobs, *SAMPLE),
        SAMPLING + "test_logprobs_are_those_of_the_raw_logits",
    ),
    Fault(
        "non-finite logits end their request",
        "they become finite, and token 0 is taken",
        before(given(logits=lambda a: a["logits"].nan_to_num()), *SAMPLE),
        SAMPLING + "test_non_finite_logits_end_their_own_request_alone",
    ),
    Fault(
        "only the real vocabulary is sampled",
        "the head is cut at the wrong end",
        before(given(weight=lambda a: a["weight"].roll(9, 0)), (model, "head")),
        SAMPLING + "test_ids_beyond_the_real_vocabulary_are_never_emitted",
    ),
    Fault("slot 0 and page 0 are never handed out", "they are free", slot_0_is_free, FIRST),
    Fault(
        "a window page returns when no later token sees it",
        "a page of tokens too early",
        frees_early,
        BEHIND,
    ),
    Fault(
        "chunks scatter snapshots of the boundaries in them",
        "extend steps skip the scatter",
        before(faults.no_scatter_in_extend, *METADATA),
        HITS,
    ),
    Fault(
        "a snapshot is only read by those who start from it",
        "it is used in place",
        before(faults.snapshot_in_place, BOUNDARY),
        HITS,
    ),
    Fault(
        "a snapshot is written by one scatter",
        "a stale destination row is sent again",
        before(faults.keeping("snapshot_updates", 0), *METADATA),
        HITS,
    ),
    Fault(
        "a hit maps all that window layers see from its end",
        "the oldest page is left out",
        forgets_a_window_page,
        HITS,
    ),
    Fault(
        "eviction takes nothing that a request holds",
        "what the cache lets go of is free",
        evicts_live_pages,
        OUTLIVES,
    ),
    Fault(
        "a preempted request goes on counting",
        "its admission says that nothing was generated",
        before(given(admit_ints=faults.forgotten_tokens), *METADATA),
        PREEMPTED,
    ),
]
NATIVE = [
    (
        "all paths of a product add in one order",
        "in C++: the path of ten rows and more adds lanes as they come",
        "native/gemm.h",
        {
            "to + LANE_ORDER[k % LANES + i] *": "to + (k % LANES + i) *",
            "x.data + LANE_ORDER[index]": "x.data + index",
        },
    ),
    (
        "a conv window is the last three inputs",
        "in C++: it ends one input early",
        "native/conv.h",
        {"end = WINDOW + rows_.tokens(row)": "end = WINDOW + rows_.tokens(row) - 1"},
    ),
]


class World:
    """What tests take as fixtures, by name; made when asked for, so with whatever is planted."""

    def __init__(self, models: dict[str, Model], appendix: Path, scratch: Path) -> None:
        """Nothing is made yet."""
        self._models, self._appendix, self._scratch = models, appendix, scratch
        self._makers: dict[str, Callable[[], object]] = {
            "small_traces": self._traces,
            "engine": lambda: open_engine(models["served"], native_step)[0],
            "exported": lambda: native_step,
            "run": self._golden_run,
        }

    def run(self, node: str) -> None:
        """Run the test `node`."""
        file, _, name = node.partition("::")
        test = getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), name)
        test(**{name: self._value(name) for name in inspect.signature(test).parameters})

    def _value(self, name: str) -> object:
        if name in self._makers:
            return self._makers[name]()
        return PARAMETERS[name] if name in PARAMETERS else self._models[name]

    def _traces(self) -> Traces:
        return Traces(self._models["small"], random.Random(3).choices(range(151), k=400))

    def _golden_run(self) -> Run:
        stepper = Stepper(convert(self._appendix, self._scratch), native=True)
        with recorded("boundary", "router", "head") as calls:
            stepper.feed(IDS)
        logits = stepper.logits(calls["head"][0].arguments[0][: len(IDS)])
        return Run(logits, calls["boundary"], calls["router"], stepper)


@pytest.fixture
def world(small: Model, ring: Model, served: Model, tmp_path: Path) -> World:
    """The models and an empty folder."""
    models = {"small": small, "ring": ring, "served": served}
    return World(models, write_appendix_a(tmp_path / "appendix-a"), tmp_path)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.invariant}: {fault.fault}")
def test_a_planted_fault_is_caught(world: World, fault: Fault) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fault.plant(patch)
        with pytest.raises(AssertionError):
            world.run(fault.caught_by)


@pytest.mark.parametrize("node", sorted({fault.caught_by for fault in FAULTS}))
def test_what_catches_faults_is_content_with_sound_code(world: World, node: str) -> None:
    world.run(node)


@pytest.mark.parametrize(("file", "changes"), [fault[2:] for fault in NATIVE])
def test_a_fault_in_the_native_kernels_is_caught(
    file: str, changes: dict[str, str], tmp_path: Path
) -> None:
    """The sources are copied, changed, compiled in a hurry, and `CHUNKS` is run with them."""
    room = tmp_path / "kernels"
    shutil.copytree(native._ROOM, room)
    text = (room / file).read_text()
    for right, wrong in changes.items():
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    (room / file).write_text(text)
    node = str(ROOT / "tests" / CHUNKS)
    program = f"""
import pathlib, sys, pytest
from inkling_engine.kernels import native
native._ROOM = pathlib.Path({str(room)!r})
native.FLAGS = ("-O1", *(flag for flag in native.FLAGS if flag != "-O3"))
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", {node!r}]))
"""
    environment = os.environ | {"INKLING_ENGINE_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "AssertionError: slot" in done.stdout


def test_the_documents_list_these_faults() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    listed = [(fault.invariant, fault.fault, fault.caught_by) for fault in FAULTS]
    for invariant, fault, node in [*listed, *((*fault[:2], CHUNKS) for fault in NATIVE)]:
        assert f"| {invariant} | {fault} | `tests/{node}` |" in text, invariant
