"""Slots and pages as numbers: free, promised, handed out.

A running sequence is promised all that it can ever need, and takes it piece by piece; so `take`
never fails, and whoever runs never waits for memory.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Account:
    """Of one kind of resource: `free` + `live` must be `total`; `reserved` are free but promised."""

    free: int
    live: int
    reserved: int
    total: int


class Stock:
    """Free numbers 1..size-1 of slots or pages, some of them promised to running sequences."""

    __slots__ = ("free", "reserved", "total")

    def __init__(self, size: int) -> None:
        """Numbers below `size`, of which 0 is the inert one."""
        self.total = max(size - 1, 0)
        self.free = list(range(self.total, 0, -1))
        self.reserved = 0

    @property
    def available(self) -> int:
        """How many are free and not promised."""
        return len(self.free) - self.reserved

    def reserve(self, count: int) -> None:
        """Promise `count`; negative takes a promise back."""
        self.reserved += count
        assert 0 <= self.reserved <= len(self.free), "more is promised than there is"

    def take(self) -> int:
        """Hand out a promised one."""
        self.reserve(-1)
        return self.free.pop()

    def give(self, number: int) -> None:
        """Take one back."""
        assert 0 < number <= self.total, "the inert number is never handed out"
        self.free.append(number)

    def account(self, live: int) -> Account:
        """The balance, `live` counted by whoever holds them."""
        return Account(len(self.free), live, self.reserved, self.total)
