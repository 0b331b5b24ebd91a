"""Scripted steps without a scheduler: fills a bucket's row inputs for chosen slots and tokens.

The twin gate and the golden recording drive the step with it. Pages are mapped one to one: every
slot owns a fixed range of both page pools, so nothing has to be allocated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor

from inkling_engine.artifacts.spec import Bucket, EngineSpec
from inkling_engine.compile.export import Inputs
from inkling_engine.compile.pools import pool_entries
from inkling_engine.compile.steps import step
from inkling_engine.kernels import table
from inkling_engine.kernels._op import use_references
from inkling_engine.kernels.state import allocate, allocate_rows

FAVOUR: Final = 1e3  # logit bias of a favourite, more than any logit


class Guesses(NamedTuple):
    """Drafts to plant for a row before a verify step (none: those that the engine made), and how many
    of a row's drafts will be accepted."""

    tokens: Sequence[int]
    right: int


@dataclass(frozen=True)
class Chunk:
    """One row of a scripted step: `tokens` fed to `slot`; none means its last sampled token, in a
    verify step (where `guesses` is given) with the drafts after it.

    What counts at admission: `favourite`, a token that is certain to be drawn, and `accept`, one more
    than the number of drafts accepted whatever they are (both 0: off).
    """

    slot: int
    start: int
    tokens: Sequence[int] = ()
    admit: bool = False
    sample: bool = True
    temperature: float = 0.0
    snapshots: Sequence[int] = field(default=())
    guesses: Guesses | None = None
    favourite: int = 0
    accept: int = 0

    @property
    def count(self) -> int:
        """Tokens that the row processes, without drafts."""
        return len(self.tokens) or 1


class Machine:
    """Pools and row inputs of one bucket set, and the eager step over them."""

    def __init__(
        self, spec: EngineSpec, weights: Mapping[str, Tensor], device: str = "cpu"
    ) -> None:
        self.spec, self.weights = spec, weights
        self.device = device
        self.pools = {entry.name: allocate(entry, device) for entry in pool_entries(spec)}

    def guess(self, chunks: Sequence[Chunk]) -> None:
        """Plant the drafts that `chunks` state."""
        for chunk in chunks:
            if chunk.guesses and chunk.guesses.tokens:
                planted = torch.tensor(chunk.guesses.tokens, dtype=torch.int32)
                self.pools["draft_tokens"][chunk.slot, : len(planted)] = planted.to(self.device)
                self.pools["request_state"][chunk.slot, table.DRAFTS] = len(planted)

    def rows(self, inputs: Inputs, chunks: Sequence[Chunk]) -> dict[str, Tensor]:
        """Fresh row inputs that describe `chunks`."""
        buffer, rows = allocate_rows(inputs.rows, inputs.row_bytes)
        fill_rows(self.spec, rows, chunks)
        if self.device == "cpu":
            return rows
        copy, there = allocate_rows(inputs.rows, inputs.row_bytes, self.device)
        copy.copy_(buffer)
        return there

    def eager(self, bucket: Bucket, rows: Mapping[str, Tensor]) -> Tensor:
        """The reference step: logits [rows, real vocabulary] float32."""
        with use_references():
            return self.native(bucket, rows)

    def native(self, bucket: Bucket, rows: Mapping[str, Tensor]) -> Tensor:
        """The same step over the ops' own implementations."""
        with torch.no_grad():
            return step(self.spec, bucket, self.weights, self.pools, rows)

    def results(self, rows: int) -> tuple[Tensor, Tensor]:
        """Integer and float result lines of the last step's first `rows` rows."""
        line = (int(self.pools["step_counter"][0]) - 1) % self.spec.pools.results
        ints, floats = self.pools["results_int"], self.pools["results_float"]
        return ints[line, :rows], floats[line, :rows]


def fill_rows(spec: EngineSpec, rows: Mapping[str, Tensor], chunks: Sequence[Chunk]) -> None:
    """Write `chunks` into zeroed row inputs; greedy unless a chunk has a temperature."""
    fits = all(chunk.count <= spec.longest_chunk for chunk in chunks)
    assert fits, "a chunk overruns the window ring"
    tokens = [token for chunk in chunks for token in (chunk.tokens or (0,))]
    rows["token_ids"][: len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    updates = [update for chunk in chunks for update in _page_updates(spec, chunk)]
    rows["page_updates"][: len(updates)] = torch.tensor(updates, dtype=torch.int32)
    for i, chunk in enumerate(chunks):
        rows["row_slots"][i] = chunk.slot
        rows["row_counts"][i] = chunk.count
        sampled = table.SAMPLE if chunk.sample else 0
        rows["row_flags"][i] = sampled | (0 if chunk.tokens else table.FROM_TABLE)
        rows["snapshot_updates"][i, 0] = chunk.slot
        for j, slot in enumerate(chunk.snapshots):
            rows["snapshot_updates"][i, 1 + j] = slot
        if chunk.admit:
            _fill_admission(spec, rows["admit_ints"][i], rows["admit_floats"][i], chunk)


def _fill_admission(spec: EngineSpec, ints: Tensor, floats: Tensor, chunk: Chunk) -> None:
    ints[table.ADMIT_SLOT], ints[table.ADMIT_LENGTH] = chunk.slot, chunk.start
    line = ints[table.ADMIT_HEADER :]
    line[table.PROMPT_LENGTH], line[table.MAX_TOKENS] = spec.max_context, 2 * spec.max_context
    line[table.SEED_LOW] = chunk.slot
    line[table.TOP_LOGPROBS] = spec.limits.top_logprobs
    line[table.DRAFT_LIMIT] = spec.spec_depth
    line[table.FORCE_ACCEPT] = 1 + 17 * (chunk.accept - 1) if chunk.accept else 0
    ids = line[table.INT_HEADER :]
    ids[: spec.limits.stop_ids] = table.INERT_TOKEN
    if chunk.favourite:
        ids[spec.limits.stop_ids], floats[table.FLOAT_HEADER] = chunk.favourite, FAVOUR
    floats[table.TEMPERATURE] = chunk.temperature
    floats[table.TOP_P] = floats[table.REPETITION] = 1


def _page_updates(spec: EngineSpec, chunk: Chunk) -> list[tuple[int, int, int, int]]:
    width, ring = spec.pools.table_width, spec.pools.window_ring
    ahead = spec.spec_depth * (1 if chunk.guesses is None else 2)  # draft KV, and the drafts' own
    end = chunk.start + chunk.count + ahead
    first, last = chunk.start // spec.page_size, min((end - 1) // spec.page_size, width - 1)
    updates = []
    for page in range(first, last + 1):
        entry = page % ring
        full, window = 1 + (chunk.slot - 1) * width + page, 1 + (chunk.slot - 1) * ring + entry
        updates.append((table.FULL_TABLE, chunk.slot, page, full))
        updates.append((table.WINDOW_TABLE, chunk.slot, entry, window))
    return updates
