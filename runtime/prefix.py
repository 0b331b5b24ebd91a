"""The prefix cache: which beginnings of requests need not be computed again. No torch.

A tree of blocks, one for each `snapshot_grid` tokens of a path, found by the tokens themselves.
A block holds its pages of full layers; a snapshot at its end holds a slot with the conv windows
there and the pages that window layers still see from there. A hit needs all three, so it ends at
a snapshot. Snapshots that no request has started from are evicted first, then the longest unused;
a block goes with the last snapshot behind it. Pages are never copied: holders are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from typing import Literal

from inkling_engine.artifacts.spec import EngineSpec
from inkling_engine.runtime.capacity import Account, Stock

Kind = Literal["full", "window"]
Tokens = tuple[int, ...]


class Block:
    """`tokens` after its parent's; `pages` of full layers hold them; `snapshot` is at their end."""

    __slots__ = ("children", "pages", "parent", "snapshot", "tokens")

    def __init__(self, parent: Block | None, tokens: Tokens, pages: list[int]) -> None:
        """A block without snapshot and children."""
        self.parent, self.tokens, self.pages = parent, tokens, pages
        self.children: dict[Tokens, Block] = {}
        self.snapshot: Snapshot | None = None


class Snapshot:
    """The state at `length`: conv windows in `slot`, window layers' `pages` from logical page
    `first` on. In the tree at `block`, or not yet; `slot` 0 says that it was evicted."""

    __slots__ = ("block", "first", "length", "pages", "pins", "slot")

    def __init__(self, slot: int, length: int, first: int, pages: list[int]) -> None:
        """A snapshot that is not in the tree."""
        self.slot, self.length, self.first, self.pages = slot, length, first, pages
        self.block: Block | None = None
        self.pins = 0


class PrefixIndex:
    """Blocks and snapshots; owner of the snapshot slots."""

    def __init__(self, spec: EngineSpec, full: Stock, window: Stock, *, enabled: bool) -> None:
        """An empty index over the pages of `full` and `window`; not `enabled` it stays empty."""
        self.grid, self._page = spec.snapshot_grid, spec.page_size
        self._has_full = spec.shape.count(local=False) > 0
        first = 1 + spec.max_running
        self.slots = Stock(first + spec.pools.snapshots * enabled, first)
        self._stocks: dict[Kind, Stock] = {"full": full, "window": window}
        self._root = Block(None, (), [])
        self._fresh: dict[Snapshot, None] = {}  # no request has started from these; oldest first
        self._used: dict[Snapshot, None] = {}  # least recently used first

    def match(self, tokens: ListLike[int], limit: int) -> Snapshot | None:
        """The longest snapshot of a beginning of `tokens` with at most `limit` tokens."""
        found = None
        for block in self._path(tokens, limit):
            found = block.snapshot or found
        return found

    def pin(self, snapshot: Snapshot) -> None:
        """A request starts from it: it counts as used, and stays until `unpin`."""
        snapshot.pins += 1
        self._fresh.pop(snapshot, None)
        self._used.pop(snapshot, None)
        self._used[snapshot] = None

    def unpin(self, snapshot: Snapshot) -> None:
        """The request has read it."""
        snapshot.pins -= 1
        assert snapshot.pins >= 0, "it was not pinned"

    def holds(self, tokens: ListLike[int], length: int) -> bool:
        """Whether the snapshot of the first `length` tokens is there."""
        found = self.match(tokens, length)
        return found is not None and found.length == length

    def take_slot(self, *, gently: bool) -> int:
        """A slot for a snapshot to come, or 0; `gently` evicts none that was used."""
        if not self.slots.free:
            order = [self._fresh] if gently else [self._fresh, self._used]
            victim = next((s for group in order for s in group if not s.pins), None)
            if victim is None:
                return 0
            self.remove(victim)
        return self.slots.take()

    def hold(self, slot: int, length: int, first: int, pages: list[int]) -> Snapshot:
        """A snapshot in `slot` whose scatter has begun, with its window layers' pages; `insert`
        will enter it."""
        snapshot = Snapshot(slot, length, first, pages)
        self.slots.keep(slot)
        self.slots.give(slot)
        for page in pages:
            self._stocks["window"].keep(page)
        self._fresh[snapshot] = None
        return snapshot

    def insert(self, snapshot: Snapshot, tokens: ListLike[int], pages: list[int]) -> None:
        """Enter a snapshot of the first tokens, which full layers have in `pages`; what is there
        already stays, and then the snapshot is given up if it was evicted or is a second one."""
        if not snapshot.slot:
            return
        if self.holds(tokens, snapshot.length):
            self.remove(snapshot)
            return
        block, step = self._root, self.grid // self._page
        for start in range(0, snapshot.length, self.grid):
            key = tuple(tokens[start : start + self.grid])
            if (child := block.children.get(key)) is None:
                at = start // self._page
                held = pages[at : at + step] if self._has_full else []
                for page in held:
                    self._stocks["full"].keep(page)
                child = block.children[key] = Block(block, key, held)
            block = child
        block.snapshot, snapshot.block = snapshot, block

    def pages(self, snapshot: Snapshot) -> list[int]:
        """The full layers' pages of a snapshot's tokens, in order."""
        found: list[list[int]] = []
        block = snapshot.block
        while block is not None:
            found.append(block.pages)
            block = block.parent
        return [page for pages in reversed(found) for page in pages]

    def evict(self, kind: Kind) -> bool:
        """Give up a snapshot that lets pages of `kind` go, or else one that is in the way of
        such; whether there was one."""
        order = [s for group in (self._fresh, self._used) for s in group if not s.pins]
        victim = next((s for s in order if self._frees(s, kind)), None)
        if victim is None:
            victim = next((s for s in order if s.block is None or not s.block.children), None)
        if victim is not None:
            self.remove(victim)
        return victim is not None

    def remove(self, snapshot: Snapshot) -> None:
        """Give up a snapshot, and the blocks that only it made useful."""
        assert not snapshot.pins, "a request is about to read it"
        self._fresh.pop(snapshot, None)
        self._used.pop(snapshot, None)
        self.slots.drop(snapshot.slot)
        for page in snapshot.pages:
            self._stocks["window"].drop(page)
        snapshot.slot, block = 0, snapshot.block
        if block is not None:
            block.snapshot = None
        while block and block.parent and not (block.snapshot or block.children):
            for page in block.pages:
                self._stocks["full"].drop(page)
            del block.parent.children[block.tokens]
            block = block.parent

    def clear(self) -> None:
        """Give up everything."""
        for snapshot in [*self._fresh, *self._used]:
            self.remove(snapshot)

    def account(self) -> Account:
        """The balance of snapshot slots, while no snapshot is on its way."""
        return self.slots.account(0)

    def __len__(self) -> int:
        """How many snapshots there are."""
        return len(self._fresh) + len(self._used)

    def _path(self, tokens: ListLike[int], limit: int) -> Iterator[Block]:
        """Blocks along the beginning of `tokens`, up to `limit` of them."""
        block = self._root
        for end in range(self.grid, min(limit, len(tokens)) + 1, self.grid):
            child = block.children.get(tuple(tokens[end - self.grid : end]))
            if child is None:
                return
            yield child
            block = child

    def _frees(self, snapshot: Snapshot, kind: Kind) -> bool:
        if kind == "window":
            return any(map(self._stocks["window"].is_pinned, snapshot.pages))
        block = snapshot.block
        if block is None or block.children:
            return False
        return any(map(self._stocks["full"].is_pinned, block.pages))
