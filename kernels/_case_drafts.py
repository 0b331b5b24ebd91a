"""Rounds of drafting for the cases of the draft ops.

Whatever a live row must not read is garbage, NaN where it is a float: slot 0, stashes and recent
tokens of positions that a row does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inkling_engine.kernels import table
from inkling_engine.kernels._cases import Case, normal
from inkling_engine.kernels.draft_metadata.reference import DraftMeta, draft_metadata

LINES, SLOTS, DESTINATIONS = 8, 14, 2
PAGE_SIZE, WIDTH, RING, VOCAB = 4, 12, 5, 50
GARBAGE = 0x5A5A5A5A


@dataclass(frozen=True)
class DraftRow:
    """A row after its step: of `count` tokens behind `length`, `kept` count (0: all).

    `snapshots` are (offset from `length`, destination slot); slot 0 is inert.
    """

    slot: int
    length: int = 0
    count: int = 1
    kept: int = 0
    source: int = 0
    sampled: bool = True
    finish: int = table.Finish.NONE
    limit: int = 99
    snapshots: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Round:
    """Rows of a verify step or, `most` being 0, of an extend step in a bucket of `tokens`."""

    rows: tuple[DraftRow, ...]
    tokens: int
    drafts: int
    most: int

    @property
    def live(self) -> list[DraftRow]:
        """The rows that are not inert."""
        return [row for row in self.rows if row.slot]

    @property
    def state(self) -> Tensor:
        """request_state [lines, 8]."""
        state = torch.full((LINES, table.STATE_WIDTH), GARBAGE, dtype=torch.int32)
        for row in self.live:
            state[row.slot, table.LENGTH] = row.length + (row.kept or row.count)
            state[row.slot, table.LAST_TOKEN] = 7 * row.slot % VOCAB
            state[row.slot, table.FINISH] = row.finish
            state[row.slot, table.GENERATED] = 4
        return state

    @property
    def recent_tokens(self) -> Tensor:
        """[slots, K]: the last K - 1 tokens before each row, position 0 excepted."""
        recent = torch.full((SLOTS, self.drafts), GARBAGE, dtype=torch.int32)
        for row in self.live:
            for position in range(max(0, row.length - self.drafts) + 1, row.length):
                token = (31 * row.slot + 7 * position) % VOCAB
                recent[row.source or row.slot, position % self.drafts] = token
        return recent

    def draft_hidden(self, width: int, dtype: torch.dtype) -> Tensor:
        """The stash [slots, K, width]: the last K rows before each row."""
        stash = torch.full((SLOTS, self.drafts, width), torch.nan, dtype=dtype)
        for row in self.live:
            for position in range(max(0, row.length - self.drafts), row.length):
                value = normal(width, dtype=dtype, seed=1000 * row.slot + position)
                stash[row.source or row.slot, position % self.drafts] = value
        return stash

    @property
    def arguments(self) -> tuple[Tensor | int, ...]:
        """Those of `draft_metadata`."""
        generator = torch.Generator().manual_seed(1)

        def pages(width: int) -> Tensor:
            return torch.randint(1, 40, (LINES, width), generator=generator, dtype=torch.int32)

        counts = [row.count if row.slot else 0 for row in self.rows]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        step = torch.randint(VOCAB, (self.tokens,), generator=generator, dtype=torch.int32)
        destinations = torch.zeros(2, len(self.rows), DESTINATIONS, dtype=torch.int32)
        for r, row in enumerate(self.rows):
            for j, (offset, slot) in enumerate(row.snapshots):
                destinations[0, r, j], destinations[1, r, j] = slot, offset
        sampled = torch.tensor([int(row.sampled and row.slot > 0) for row in self.rows])
        emits = sampled.int()
        if self.most:
            live = sampled.repeat_interleave(torch.tensor(counts))
            emits = torch.cat([live, live.new_zeros(self.tokens - len(live))]).int()
        return (
            *(self.state, pages(WIDTH), pages(RING), self.recent_tokens),
            step,
            *(self._column("slot"), self._column("source"), starts, self._column("length")),
            *(destinations[0], destinations[1], emits, PAGE_SIZE, self.drafts, self.most),
        )

    def _column(self, name: str) -> Tensor:
        """One entry a row: zeros for inert ones, the own slot as source 0."""
        values = [getattr(row, name) if row.slot else 0 for row in self.rows]
        if name == "source":
            values = [value or row.slot for value, row in zip(values, self.rows, strict=True)]
        return torch.tensor(values, dtype=torch.int32)

    @property
    def meta(self) -> DraftMeta:
        """What `draft_metadata` says of the round."""
        return draft_metadata(*self.arguments)  # type: ignore[arg-type]


ROUNDS = {
    "verify": Round(
        (
            DraftRow(3, length=17, count=4, kept=2, snapshots=((2, 9),)),
            DraftRow(1, length=2, count=4, kept=4),
            DraftRow(0),
            DraftRow(2, length=9, count=3, kept=1, snapshots=((2, 10), (0, 0))),
            DraftRow(5, length=40, count=1, source=12),
            DraftRow(4, length=3, count=2, finish=table.Finish.STOP, snapshots=((1, 8),)),
            DraftRow(6, length=21, count=4, kept=3, limit=2),
        ),
        tokens=28,
        drafts=3,
        most=4,
    ),
    "verify-one": Round((DraftRow(2, length=30, count=9, kept=5),), tokens=9, drafts=8, most=9),
    "extend": Round(
        (
            DraftRow(3, length=0, count=13, snapshots=((5, 9), (10, 10))),
            DraftRow(1, length=25, count=1, limit=0),
            DraftRow(2, length=20, count=5, source=11, sampled=False, snapshots=((0, 0), (4, 8))),
            DraftRow(0),
            DraftRow(4, length=1, count=2, sampled=False),
            DraftRow(6, length=0, count=1),
        ),
        tokens=24,
        drafts=4,
        most=0,
    ),
    "one-draft": Round(
        (DraftRow(4, length=6, count=3), DraftRow(5, length=1), DraftRow(0)), 8, 1, most=0
    ),
    "inert": Round((DraftRow(0), DraftRow(0)), tokens=8, drafts=2, most=0),
}


def copying_cases(
    arguments: Callable[[Round, int, torch.dtype], tuple[Any, ...]],
) -> list[Case]:
    """Every round, a usual and an odd width, for an op that computes nothing: results are equal."""
    return [
        Case(
            f"{name}-{width}-{str(dtype).removeprefix('torch.')}",
            arguments(spec, width, dtype),
            tolerance=0,
        )
        for name, spec in ROUNDS.items()
        for width, dtype in ((64, torch.bfloat16), (37, torch.float32))
    ]
