"""Rows, pages and pools of a step for the cases of ops that keep state.

Whatever a live row must not read is NaN: slot 0, page 0, pages and slots that no row names, and
what rings hold of positions that no row sees.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inkling_engine.kernels._cases import normal


@dataclass(frozen=True)
class Row:
    """One row: `length` tokens of state, `count` new ones; slot 0 is inert.

    `source` 0 means the own slot; `snapshots` are (offset, destination slot).
    """

    slot: int
    length: int = 0
    count: int = 1
    source: int = 0
    snapshots: tuple[tuple[int, int], ...] = ()


INERT = Row(slot=0, count=0)
DESTINATIONS = 3


@dataclass(frozen=True)
class Step:
    """What `step_metadata` would say of `rows` in a bucket of `bucket_tokens` tokens.

    The page table has `lines` slots (0: as many as the rows need) of `table_width` entries; which
    pages are a slot's depends on nothing else, so steps of the same size share a pool.
    """

    rows: tuple[Row, ...]
    bucket_tokens: int
    page_size: int = 64
    table_width: int = 6
    lines: int = 0
    ring: int = 3

    @property
    def counts(self) -> list[int]:
        """New tokens of each row."""
        return [row.count for row in self.rows]

    @property
    def slots(self) -> Tensor:
        """[R] i32."""
        return _int32([row.slot for row in self.rows])

    @property
    def sources(self) -> Tensor:
        """[R] i32."""
        return _int32([row.source or row.slot for row in self.rows])

    @property
    def starts(self) -> Tensor:
        """[R + 1] i32."""
        return torch.tensor([0, *self.counts]).cumsum(0).int()

    @property
    def lengths(self) -> Tensor:
        """[R] i32."""
        return _int32([row.length for row in self.rows])

    @property
    def destinations(self) -> tuple[Tensor, Tensor]:
        """Slots and offsets, [R, 3] i32 each."""
        lines = torch.zeros(2, len(self.rows), DESTINATIONS, dtype=torch.int32)
        for row, spec in enumerate(self.rows):
            for j, (offset, slot) in enumerate(spec.snapshots):
                lines[:, row, j] = _int32([slot, offset])
        return lines[0], lines[1]

    @property
    def positions(self) -> Tensor:
        """[T] i32, zeros beyond the live tokens."""
        ranges = [torch.arange(row.length, row.length + row.count) for row in self.rows]
        return self._padded(torch.cat(ranges)).int()

    @property
    def token_rows(self) -> Tensor:
        """[T] i32, zeros beyond the live tokens."""
        rows = torch.arange(len(self.rows)).repeat_interleave(torch.tensor(self.counts))
        return self._padded(rows).int()

    @property
    def table_lines(self) -> int:
        """Slots of the page table, slot 0 included."""
        return self.lines or 1 + max(row.slot for row in self.rows)

    @property
    def pages(self) -> int:
        """Physical pages, page 0 included."""
        return 1 + self.table_width * (self.table_lines - 1)

    @property
    def page_table(self) -> Tensor:
        """[lines, table_width] i32: shuffled pages for what each row holds or gets, else 0."""
        shuffled = 1 + torch.randperm(self.pages - 1, generator=torch.Generator().manual_seed(1))
        owned = torch.cat([shuffled.new_zeros(self.table_width), shuffled])
        table = owned.view(self.table_lines, self.table_width).int()
        used = torch.zeros(self.table_lines, dtype=torch.int32)
        for row in self.rows:
            needed = -(-(row.length + row.count) // self.page_size)
            used[row.slot] = max(int(used[row.slot]), needed)
        return table * (torch.arange(self.table_width) < used[:, None])

    @property
    def locations(self) -> Tensor:
        """[T] i64: page * page_size + offset, zeros beyond the live tokens."""
        positions = self.positions.long()
        slots = self.slots[self.token_rows.long()].long()
        pages = self.page_table[slots, (positions // self.page_size) % self.table_width].long()
        live = torch.arange(self.bucket_tokens) < self.starts[-1]
        return (pages * self.page_size + positions % self.page_size) * live

    def rings(self, layers: int, slots: int, width: int, dtype: torch.dtype) -> Tensor:
        """Conv rings [layers, slots, `ring`, width]: only what a row resumes from, else NaN."""
        pool = torch.full((layers, slots, self.ring, width), torch.nan, dtype=dtype)
        for row in self.rows:
            source = row.source or row.slot
            values = normal(layers, 3, width, dtype=dtype, seed=source)
            for i in range(max(0, 3 - row.length), 3):
                pool[:, source, (row.length - 3 + i) % self.ring] = values[:, i]
        return pool

    def kv(self, layers: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Tensor:
        """KV pool [layers, pages, 2, kv_heads, page_size, dim]: NaN where no row has a position."""
        pool = torch.full((layers, self.pages, 2, kv_heads, self.page_size, dim), torch.nan)
        table = self.page_table.tolist()
        for row in self.rows:
            held = self.table_width * self.page_size
            for position in range(max(0, row.length + row.count - held), row.length + row.count):
                page = table[row.slot][position // self.page_size % self.table_width]
                value = normal(layers, 2, kv_heads, dim, seed=1000 * row.slot + position)
                pool[:, page, :, :, position % self.page_size] = value
        return pool.to(dtype)

    def _padded(self, values: Tensor) -> Tensor:
        return torch.cat([values, values.new_zeros(self.bucket_tokens - len(values))])


def _int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


VERIFIED = Step(
    rows=(Row(1, 9, 5), Row(3, 1, 3), INERT, Row(2, 300, 1), Row(4, 0, 4), Row(5, 12, 5)),
    bucket_tokens=25,
    ring=7,
)
"""A verify step of four drafts: ragged rows over rings longer than a window."""
