"""Slots and pages as numbers: free, live, or pinned by the prefix cache.

A page may have several holders: running sequences that share a prefix, and the cache. It is free
when the last of them lets go, live while a sequence holds it, and pinned while the cache alone
does; pinned pages can be had by eviction. All counts are kept as things change.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Account:
    """Of one kind of resource: `free` + `live` + `pinned` must be `total`."""

    free: int
    live: int
    pinned: int
    total: int


class Stock:
    """Numbers of slots or pages and who holds them."""

    __slots__ = ("_kept", "_live", "free", "pinned", "total")

    def __init__(self, size: int, first: int = 1) -> None:
        """Numbers `first` to `size` - 1, all free; 0 is the inert one."""
        self.total = max(size - first, 0)
        self.free = list(range(size - 1, first - 1, -1))
        self.pinned = 0
        self._live, self._kept = [0] * size, [0] * size

    @property
    def available(self) -> int:
        """How many can be had, the cache's by eviction."""
        return len(self.free) + self.pinned

    def take(self) -> int:
        """Hand out a free one to a sequence."""
        number = self.free.pop()
        self._live[number] = 1
        return number

    def share(self, number: int) -> None:
        """One more sequence holds what is held already."""
        assert self._live[number] or self._kept[number], "a free one cannot be shared"
        self.pinned -= not self._live[number]
        self._live[number] += 1

    def give(self, number: int) -> None:
        """A sequence lets go."""
        assert number > 0 and self._live[number] > 0, "it was not held"
        self._live[number] -= 1
        if not self._live[number]:
            if self._kept[number]:
                self.pinned += 1
            else:
                self.free.append(number)

    def keep(self, number: int) -> None:
        """The cache holds what a sequence holds."""
        assert number > 0 and self._live[number] > 0, "only what is live can be kept"
        self._kept[number] += 1

    def drop(self, number: int) -> None:
        """The cache lets go."""
        assert self._kept[number] > 0, "it was not kept"
        self._kept[number] -= 1
        if not (self._kept[number] or self._live[number]):
            self.pinned -= 1
            self.free.append(number)

    def is_pinned(self, number: int) -> bool:
        """Whether the cache alone holds it."""
        return not self._live[number]

    def account(self, live: int) -> Account:
        """The balance, `live` counted by whoever holds them."""
        return Account(len(self.free), live, self.pinned, self.total)
