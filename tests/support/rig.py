"""Scripted steps of many requests over memory full of garbage, and what each of them must see.

A `Trace` is one request alone, token by token: after each token its logits, its result line, its
conv windows, and the keys and values that it wrote. A `Rig` steps requests together, in any
chunks, rows, buckets and pages, and holds each one to its trace, bit by bit. What runs a step is
exchangeable: native kernels, references, or an engine's programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from inkling_engine.artifacts.spec import Bucket, EngineSpec
from inkling_engine.compile.driver import Chunk, Machine
from inkling_engine.compile.export import program_inputs
from inkling_engine.compile.steps import step
from inkling_engine.kernels import table
from inkling_engine.kernels._conv import window
from inkling_engine.kernels._op import use_references

Tensors = Mapping[str, Tensor]
StepCode = Callable[[EngineSpec, Bucket, Tensors, Tensors, Tensors], Tensor]
WINDOWS = ("conv_kv_full", "conv_kv_window", "conv_attn", "conv_mlp")
STEADY = (
    "step_counter",
    "rank",
    "peers",
    "exchange",
)  # never garbage: the step reads them as they are
GARBAGE, SEED = 0x7F7F7F7F, 7


class Model:
    """What a machine is made from."""

    def __init__(self, spec: EngineSpec, weights: Tensors) -> None:
        """Keep both."""
        self.spec, self.weights = spec, weights


class Result(NamedTuple):
    """One step: logits [R, V], result lines [R, 4 + top] and [R, 1 + top], the row inputs after it."""

    logits: Tensor
    ints: Tensor
    floats: Tensor
    rows: dict[str, Tensor]


def native_step(
    spec: EngineSpec, bucket: Bucket, weights: Tensors, pools: Tensors, rows: Tensors
) -> Tensor:
    """The eager step with native kernels."""
    with torch.no_grad():
        return step(spec, bucket, weights, pools, rows)


def reference_step(
    spec: EngineSpec, bucket: Bucket, weights: Tensors, pools: Tensors, rows: Tensors
) -> Tensor:
    """The eager step with the ops' references."""
    with use_references(), torch.no_grad():
        return step(spec, bucket, weights, pools, rows)


@dataclass(frozen=True)
class Trace:
    """One request alone: `tokens` are the prompt and what followed; entry i of the rest is after
    tokens[i]: logits [V], token and top tokens, logprobs, conv windows [channels], k and v."""

    prompt: int
    tokens: list[int]
    temperature: float
    logits: list[Tensor]
    ints: list[Tensor]
    floats: list[Tensor]
    windows: list[Tensor]
    kv_full: Tensor
    kv_window: Tensor


@dataclass
class Flow:
    """A request on its way: it has `length` of its trace's tokens behind it. `source` is the
    snapshot slot that its next chunk starts from, `snapshots` the destinations given with it."""

    trace: Trace
    slot: int
    length: int = 0
    source: int = 0
    snapshots: Sequence[int] = ()
    admitted: bool = False

    @property
    def left(self) -> int:
        """Prompt tokens still to come."""
        return max(0, self.trace.prompt - self.length)

    @property
    def done(self) -> bool:
        """Whether every token of the trace is processed."""
        return self.length == len(self.trace.tokens)

    def take(self, count: int) -> Chunk:
        """The next `count` prompt tokens, or the token sampled last; they are then done."""
        tokens: Sequence[int] = ()
        if self.left:
            assert count <= self.left, "a chunk ends with the prompt"
            tokens = self.trace.tokens[self.length : self.length + count]
        start, self.length = self.length, self.length + (len(tokens) or 1)
        admit, self.admitted = not self.admitted, True
        given, self.snapshots = self.snapshots, ()
        heat = self.trace.temperature
        return Chunk(self.slot, start, tokens, admit, temperature=heat, snapshots=given)


INERT = Chunk(slot=0, start=0, tokens=(1,))


@dataclass
class Rig:
    """One machine whose pools start as garbage; `pages` shuffles the physical pages."""

    model: Model
    run: StepCode = native_step
    garbage: float | None = math.nan
    pages: int = 0
    machine: Machine = field(init=False)
    _shared: list[tuple[int, int, int, int]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.machine = Machine(self.model.spec, self.model.weights)
        sizes = self.model.spec.pools
        self._physical = {
            table.FULL_TABLE: _shuffled(sizes.full_pages, self.pages),
            table.WINDOW_TABLE: _shuffled(sizes.window_pages, self.pages),
        }
        if self.garbage is not None:
            for name, pool in self.pools.items():
                if name not in STEADY:
                    pool.fill_(self.garbage if pool.is_floating_point() else GARBAGE)
            for name in ("full_table", "window_table"):
                self.pools[name][1:] = 0  # unmapped

    @property
    def pools(self) -> dict[str, Tensor]:
        """The machine's pools by name."""
        return self.machine.pools

    def rows(
        self, bucket: Bucket, chunks: Sequence[Chunk], sources: Mapping[int, int] | None = None
    ) -> dict[str, Tensor]:
        """Row inputs for `chunks`; slots in `sources` start from the slot given there."""
        spec = self.model.spec
        rows = self.machine.rows(program_inputs(spec, bucket, ()), chunks)
        for line in rows["page_updates"]:
            line[3] = self._physical[int(line[0])][int(line[3])]
        for i, chunk in enumerate(chunks):
            rows["row_sources"][i] = (sources or {}).get(chunk.slot, 0)
            if not chunk.snapshots:
                rows["snapshot_updates"][i, 0] = 0
        rows["admit_ints"][:, table.ADMIT_HEADER + table.SEED_LOW] = SEED
        own = [line for line in rows["page_updates"].tolist() if line[1]]
        lines = torch.tensor([*self._shared, *own], dtype=torch.int32)  # own ones go last, and win
        rows["page_updates"].zero_()[: len(lines)] = lines.view(-1, 4)
        self._shared = []
        return rows

    def share(self, slot: int, other: int, length: int) -> None:
        """With the next row inputs, map `slot`'s first `length` tokens to the pages of `other`."""
        spec, lines = self.model.spec, []
        for page in range(length // spec.page_size):
            for number, kind in ((table.FULL_TABLE, "full"), (table.WINDOW_TABLE, "window")):
                entries = self.pools[f"{kind}_table"][other].tolist()
                entry = page % len(entries)
                lines.append((number, slot, entry, entries[entry]))
        self._shared = [*self._shared, *lines]

    def step(
        self, bucket: Bucket, chunks: Sequence[Chunk], sources: Mapping[int, int] | None = None
    ) -> Result:
        """Run `chunks` in `bucket`."""
        return self.replay(bucket, self.rows(bucket, chunks, sources))

    def replay(self, bucket: Bucket, rows: dict[str, Tensor]) -> Result:
        """Run row inputs as they are."""
        logits = self.run(self.model.spec, bucket, self.model.weights, self.pools, rows)
        ints, floats = self.machine.results(bucket.rows)
        return Result(logits.clone(), ints.clone(), floats.clone(), rows)

    def advance(self, bucket: Bucket, batch: Sequence[tuple[Flow, int] | None]) -> Result:
        """Run each flow's next tokens, None being an inert row, and hold all to their traces."""
        sources = {pair[0].slot: pair[0].source for pair in batch if pair}
        chunks = [pair[0].take(pair[1]) if pair else INERT for pair in batch]
        result = self.step(bucket, chunks, sources)
        for row, pair in enumerate(batch):
            if pair:
                pair[0].source = 0
                self.check(pair[0], result, row)
            else:
                assert not result.ints[row].any() and not result.logits[row].any()
        return result

    def check(self, flow: Flow, result: Result, row: int) -> None:
        """Assert that row `row` of a step, and the state that it left, are those of the trace."""
        at, trace, where = flow.length - 1, flow.trace, f"slot {flow.slot} at {flow.length}"
        ints = result.ints[row]
        assert (int(ints[0]), int(ints[3])) == (flow.slot, flow.length), where
        _require_same(result.logits[row], trace.logits[at], f"{where}: logits")
        assert torch.equal(_chosen(ints), trace.ints[at]), f"{where}: tokens"
        _require_same(result.floats[row], trace.floats[at], f"{where}: logprobs")
        self.check_state(flow)

    def check_state(self, flow: Flow) -> None:
        """Assert that a flow's conv windows and visible KV are those of its trace."""
        at, trace, where = flow.length - 1, flow.trace, f"slot {flow.slot} at {flow.length}"
        found = self.windows(flow.slot, flow.length)
        _require_same(found, trace.windows[at], f"{where}: conv windows")
        first = max(0, flow.length - self.model.spec.shape.local.window + 1)
        full, seen = self.kv(flow.slot, 0, flow.length), self.kv(flow.slot, first, flow.length)
        _require_same(full[0], trace.kv_full[: flow.length], f"{where}: full KV")
        _require_same(seen[1], trace.kv_window[first : flow.length], f"{where}: window KV")

    def windows(self, slot: int, length: int) -> Tensor:
        """All conv windows of a slot before position `length`, flat, in the pools' order."""
        rings = [self.pools[name][:, slot] for name in WINDOWS]
        return torch.cat([window(ring, length).flatten() for ring in rings])

    def kv(self, slot: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """k and v of positions [first, end) through the page tables, of full and window layers,
        [positions, layers, 2, kv heads, head dim] each."""
        page, positions = self.model.spec.page_size, torch.arange(first, end)
        found = []
        for kind in ("full", "window"):
            line = self.pools[f"{kind}_table"][slot]
            pages = line[positions // page % len(line)].long()
            found.append(self.pools[f"kv_{kind}"][:, pages, :, :, positions % page])
        return found[0], found[1]


def bits(tensor: Tensor) -> Tensor:
    """The same bytes as integers: NaN equals NaN, and 0 differs from -0."""
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def record(
    model: Model,
    prompt: Sequence[int],
    new: int = 0,
    *,
    run: StepCode = native_step,
    temperature: float = 0.0,
) -> Trace:
    """Run `prompt` and `new` tokens after it alone, one token a step in a bucket of one row."""
    rig, bucket = Rig(model, run, garbage=None), Bucket(kind="decode", rows=1, tokens=1)
    tokens, results, windows, kv = list(prompt), [], [], []
    for start in range(len(prompt) + new):
        fed = prompt[start : start + 1]
        chunk = Chunk(1, start, fed, admit=start == 0, temperature=temperature)
        results.append(rig.step(bucket, [chunk]))
        windows.append(rig.windows(1, start + 1))
        kv.append(rig.kv(1, start, start + 1))
        if len(prompt) <= start + 1 < len(prompt) + new:
            tokens.append(int(results[-1].ints[0, table.RESULT_HEADER]))
    kv_full, kv_window = (torch.cat(kind) for kind in zip(*kv, strict=True))
    return Trace(
        len(prompt),
        tokens,
        temperature,
        [result.logits[0] for result in results],
        [_chosen(result.ints[0]) for result in results],
        [result.floats[0] for result in results],
        windows,
        kv_full,
        kv_window,
    )


class Traces:
    """Traces of one model, each recorded once; prompts are cut from `ids` at any place."""

    def __init__(self, model: Model, ids: Sequence[int]) -> None:
        """Nothing is recorded yet."""
        self.model, self._ids = model, ids
        self._known: dict[tuple[int, int, int, float], Trace] = {}

    def __call__(self, length: int, at: int = 0, new: int = 0, temperature: float = 0.0) -> Trace:
        """The trace of the `length` ids from `at` on, and of `new` tokens that follow."""
        key = length, at, new, temperature
        if key not in self._known:
            prompt = self._ids[at : at + length]
            assert len(prompt) == length, "the text is too short"
            self._known[key] = record(self.model, prompt, new, temperature=temperature)
        return self._known[key]


def _require_same(found: Tensor, expected: Tensor, what: str) -> None:
    assert torch.equal(bits(found), bits(expected)), f"{what} differ"


def _chosen(line: Tensor) -> Tensor:
    """Token and top tokens of a result line."""
    return line[table.RESULT_HEADER :]


def _shuffled(pages: int, seed: int) -> list[int]:
    """Where each scripted page lies; page 0 stays."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(pages - 1, generator=generator) if seed else torch.arange(pages - 1)
    return [0, *(order + 1).tolist()]
