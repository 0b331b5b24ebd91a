"""The prefix index alone, against a plain list of what is in it; and the holders of pages."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_spec import GRID, PAGE, build_spec

from inkling_engine.runtime.capacity import Stock
from inkling_engine.runtime.prefix import PrefixIndex, Snapshot

pytestmark = pytest.mark.null

SPEC = build_spec(snapshots=4)


class Cache:
    """An index, and a sequence that computes prompts one at a time and lets go of them at once."""

    def __init__(self) -> None:
        self.full, self.window = Stock(60), Stock(60)
        self.index = PrefixIndex(SPEC, self.full, self.window, enabled=True)
        self.known: dict[tuple[int, ...], Snapshot] = {}

    def add(self, tokens: list[int], *, gently: bool = False) -> None:
        """Compute `tokens`, and enter a snapshot of all of them."""
        if not (slot := self.index.take_slot(gently=gently)):
            return
        pages = [self._page(self.full, "full") for _ in range(len(tokens) // PAGE)]
        window = [self._page(self.window, "window") for _ in range(2)]
        snapshot = self.index.hold(slot, len(tokens), len(tokens) // PAGE - 2, window)
        self.index.insert(snapshot, tokens, pages)
        for page in pages:
            self.full.give(page)
        for page in window:
            self.window.give(page)
        if snapshot.slot:
            self.known[tuple(tokens)] = snapshot

    def _page(self, stock: Stock, kind: str) -> int:
        while not stock.free:
            assert self.index.evict("full" if kind == "full" else "window")
        return stock.take()

    def check(self) -> None:
        """Snapshots, their pages and slots are held once, and nothing else is."""
        self.known = {key: s for key, s in self.known.items() if s.slot}
        assert len(self.index) == len(self.known)
        slots = [s.slot for s in self.known.values()]
        assert sorted([*slots, *self.index.slots.free]) == list(range(5, 9))
        paths = {key[:end] for key in self.known for end in range(GRID, len(key) + 1, GRID)}
        full = {page for s in self.known.values() for page in self.index.pages(s)}
        assert len(full) == len(paths) * GRID // PAGE, "what is common is held once"
        assert sorted([*full, *self.full.free]) == list(range(1, 60))
        window = [page for s in self.known.values() for page in s.pages]
        assert sorted([*window, *self.window.free]) == list(range(1, 60))
        assert (self.full.pinned, self.window.pinned) == (len(full), len(window))

    def longest(self, tokens: list[int], limit: int) -> Snapshot | None:
        """The hit that the plain list gives."""
        ends = [n for n in range(1, min(limit, len(tokens)) + 1) if tuple(tokens[:n]) in self.known]
        return self.known[tuple(tokens[: max(ends)])] if ends else None


def _tokens(seed: int, length: int) -> list[int]:
    """Few different blocks, so that paths meet and part."""
    blocks = [[block] * GRID for block in range(2)]
    choose = random.Random(seed)
    return [token for _ in range(length) for token in choose.choice(blocks)]


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from("aagmpeud"), st.integers(0, 40), st.integers(1, 6))))
def test_any_history_keeps_the_balance(events: list[tuple[str, int, int]]) -> None:
    cache, pinned = Cache(), list[Snapshot]()
    for kind, seed, length in events:
        tokens = _tokens(seed, length)
        if kind in "ag":
            cache.add(tokens, gently=kind == "g")
        elif kind == "u" and pinned:
            cache.index.unpin(pinned.pop())
        elif kind in "ed":
            cache.index.evict("full" if kind == "e" else "window")
        found = cache.index.match([*tokens, 9, 9, 9], len(tokens) + seed % 3 - 1)
        cache.check()
        assert found is cache.longest(tokens, len(tokens) + seed % 3 - 1)
        if kind == "p" and found and len(pinned) < 2:
            cache.index.pin(found)
            pinned.append(found)
        assert all(s.slot for s in pinned), "what is about to be read stays"
    for snapshot in pinned:
        cache.index.unpin(snapshot)
    cache.index.clear()
    assert (len(cache.full.free), len(cache.window.free)) == (59, 59)


def test_a_second_snapshot_of_the_same_tokens_is_given_up() -> None:
    cache = Cache()
    for _ in range(3):
        cache.add(_tokens(1, 3))
    assert len(cache.index) == 1 and len(cache.index.slots.free) == 3


def test_the_longest_unused_goes_first_and_the_used_ones_last() -> None:
    cache = Cache()
    prompts = [[block] * GRID for block in range(6)]
    for prompt in prompts[:4]:
        cache.add(prompt)
    for prompt in (prompts[1], prompts[0]):
        found = cache.index.match(prompt, GRID)
        assert found
        cache.index.pin(found)
        cache.index.unpin(found)
    cache.add(prompts[4])
    cache.add(prompts[5], gently=True)
    assert [cache.index.holds(prompt, GRID) for prompt in prompts] == [
        *[True, True, False, False, True, True]
    ]
    for prompt in ([6] * GRID, [7] * GRID, [8] * GRID):
        cache.add(prompt)
    assert [cache.index.holds(prompt, GRID) for prompt in prompts[:2]] == [True, True]
    for snapshot in [*cache.index._fresh]:
        cache.index.pin(snapshot)
    cache.add([9] * GRID, gently=True)
    assert not cache.index.holds([9] * GRID, GRID), "gently, nothing used is evicted"


def test_what_is_free_cannot_be_shared_or_given() -> None:
    stock = Stock(4)
    page = stock.take()
    stock.share(page)
    stock.give(page)
    stock.keep(page)
    stock.give(page)
    assert (stock.pinned, len(stock.free), stock.available) == (1, 2, 3)
    stock.share(page)
    assert (stock.pinned, stock.available) == (0, 2)
    stock.drop(page)
    stock.give(page)
    assert (stock.pinned, stock.available) == (0, 3)
    for wrong in (stock.share, stock.give, stock.keep, stock.drop):
        with pytest.raises(AssertionError):
            wrong(page)
