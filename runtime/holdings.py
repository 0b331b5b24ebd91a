"""What running sequences hold: a slot, pages of full and of window layers. No torch.

Pages are taken as a sequence grows. Those of window layers sit in a ring of table entries: each
logical page gets a fresh physical one, and the sequence lets go of it when no later token can see
it, so a page that the prefix cache keeps is never written again. A hit shares the cache's pages and
begins behind them. Slot 0 and page 0 are never handed out.

With drafting, keys and values of drafts lie K positions behind their tokens: pages are taken for K
tokens more than there may be, and freed by how many there are at least.
"""

from __future__ import annotations

from collections.abc import Iterable

from inkling_engine.artifacts.errors import UsageError
from inkling_engine.artifacts.spec import EngineSpec
from inkling_engine.kernels.table import FULL_TABLE, WINDOW_TABLE
from inkling_engine.runtime.capacity import Account, Stock
from inkling_engine.runtime.prefix import PrefixIndex, Snapshot
from inkling_engine.runtime.requests import PageLine, Sequence


class Holdings:
    """Slots, pages and the prefix cache of one engine."""

    def __init__(self, spec: EngineSpec, chunk: int, steps: int, *, prefix_cache: bool) -> None:
        """All free; a replay adds at most `chunk` prompt tokens or `steps` others to a sequence."""
        pools, shape = spec.pools, spec.shape
        self._page, self._drafts = spec.page_size, spec.spec_depth
        self._most_added = max(chunk, steps * (1 + self._drafts))
        self._past = shape.local.window - 1  # positions before a token that window layers read
        self._ring = pools.window_ring if shape.count(local=True) else 0
        self._has_full = shape.count(local=False) > 0
        whole = self._ring >= pools.table_width  # no two pages share an entry
        least = self._past + 2 * self._drafts
        assert not self._ring or whole or (self._ring - 1) * self._page >= least, "short ring"
        self.slots = Stock(1 + spec.max_running)
        self.full_pages, self.window_pages = Stock(pools.full_pages), Stock(pools.window_pages)
        self.prefix = PrefixIndex(spec, self.full_pages, self.window_pages, enabled=prefix_cache)

    def require_fit(self, sequence: Sequence) -> None:
        """Raise UsageError for a sequence that could not run even alone."""
        for name, need, pool in zip(
            ("full", "window"),
            self._most(sequence),
            (self.full_pages, self.window_pages),
            strict=True,
        ):
            if need > pool.total:
                found = f"{sequence.total} tokens, {need} {name} pages of {self._page}"
                remedy = "shorten them or build with more pages"
                raise UsageError(
                    "prompt + max_tokens", found, f"at most {pool.total} pages", remedy
                )

    def has_room(self, sequence: Sequence, hit: Snapshot | None, running: list[Sequence]) -> bool:
        """Whether there is a slot, and pages for what a waiting sequence has to compute and, at
        once, for the prompts of `running` ones, and a page more for each of these."""
        if not self.slots.free:
            return False
        full = window = len(running)
        for other in running:
            missing = max(0, self._pages(len(other.feed)) - other.capacity // self._page)
            full, window = full + missing, window + min(missing, self._ring)
        most_full, most_window = self._most(sequence)
        full += min(most_full, (len(sequence.feed) + self._drafts) // self._page + 1)
        window += most_window
        if hit:  # what others hold already is shared, what the cache alone holds is used up
            pages = self.prefix.pages(hit)
            full -= len(pages) - sum(map(self.full_pages.is_pinned, pages))
            window -= len(hit.pages) - sum(map(self.window_pages.is_pinned, hit.pages))
        has_full = not self._has_full or full <= self.full_pages.available
        return has_full and (not self._ring or window <= self.window_pages.available)

    def is_in_the_making(
        self, sequence: Sequence, hit: Snapshot | None, prefilling: list[Sequence]
    ) -> bool:
        """Whether a running sequence is about to compute what would make a longer hit."""
        end = (hit.length if hit else 0) + self.prefix.grid
        if not self.prefix.slots.total or end > sequence.most_cached:
            return False
        begun = (s.feed for s in prefilling if s.length < end <= len(s.feed))
        return any(feed[:end] == sequence.feed[:end] for feed in begun)

    def enter(self, sequence: Sequence, hit: Snapshot | None) -> None:
        """Give a waiting sequence a slot, and a hit's pages; `backlog` has the lines that map them."""
        sequence.start(self.slots.take())
        sequence.cached = hit.length if hit else 0
        self._see_from(sequence, hit.first if hit else 0)
        if hit is None:
            return
        self.prefix.pin(hit)
        sequence.source, sequence.length, sequence.capacity = hit, hit.length, hit.length
        full = self.prefix.pages(hit)
        for page in full:
            self.full_pages.share(page)
        for page in hit.pages:
            self.window_pages.share(page)
        sequence.full_pages.extend(full)
        sequence.window_pages.extend(hit.pages)
        slot, ring = sequence.slot, self._ring
        sequence.backlog = [(FULL_TABLE, slot, index, page) for index, page in enumerate(full)]
        sequence.backlog += [
            (WINDOW_TABLE, slot, index % ring, page)
            for index, page in enumerate(hit.pages, start=hit.first)
        ]

    def leave(self, sequence: Sequence) -> None:
        """Take back all that a sequence holds; what it computed may stay in the cache."""
        self.settle(sequence)
        if snapshot := sequence.pending:
            snapshot.pins = 0
            self.prefix.remove(snapshot)
            sequence.pending = None
        self.read(sequence)
        for page in sequence.full_pages:
            self.full_pages.give(page)
        for page in sequence.window_pages:
            self.window_pages.give(page)
        self.slots.give(sequence.slot)
        sequence.full_pages.clear()
        sequence.window_pages.clear()
        sequence.backlog.clear()
        sequence.length = sequence.capacity = sequence.window_first = sequence.quiet = 0
        sequence.rounds = sequence.slack = 0

    def room(self, sequence: Sequence) -> int:
        """Tokens that one replay may add: later pages would overwrite ring entries still read."""
        end = (sequence.window_first + self._ring) * self._page - self._drafts
        return end - sequence.reach if self._ring else sequence.total

    def fits(self, sequence: Sequence, length: int) -> bool:
        """Whether there is room to grow to `length`."""
        return length - sequence.reach <= self.room(sequence)

    def lines(self, sequence: Sequence, length: int) -> int:
        """How many page lines `grow` will make."""
        pages = self._pages(length) - sequence.capacity // self._page
        return max(0, pages) * (self._has_full + bool(self._ring))

    def can_grow(self, sequence: Sequence, length: int) -> bool:
        """Make pages for `length` tokens free, if there is room for them and the cache can be made to
        let go of as many."""
        pages = self._pages(length) - sequence.capacity // self._page
        if not self.fits(sequence, length):
            return False
        if self._has_full and self.full_pages.available < pages:
            return False
        if self._ring and self.window_pages.available < pages:
            return False
        while self._has_full and len(self.full_pages.free) < pages:
            if not self.prefix.evict("full"):
                return False
        while self._ring and len(self.window_pages.free) < pages:
            if not self.prefix.evict("window"):
                return False
        return True

    def grow(self, sequence: Sequence, length: int) -> Iterable[PageLine]:
        """Take the pages that `length` tokens need; the lines that map them."""
        slot, lines = sequence.slot, list[PageLine]()
        for index in range(sequence.capacity // self._page, self._pages(length)):
            if self._has_full:
                sequence.full_pages.append(page := self.full_pages.take())
                lines.append((FULL_TABLE, slot, index, page))
            if self._ring:
                sequence.window_pages.append(page := self.window_pages.take())
                lines.append((WINDOW_TABLE, slot, index % self._ring, page))
            sequence.capacity += self._page
        return lines

    def destinations(self, sequence: Sequence, length: int, most: int) -> list[int]:
        """Snapshot slots for the grid boundaries that growing to `length` crosses, at most `most`
        of them; 0 where nothing is to be kept. Decoding takes one, and evicts none that was used; it
        waits on the device for the next boundary, so no boundary may lie where it may be already."""
        grid = self.prefix.grid
        boundaries = range((sequence.length // grid + 1) * grid, length + 1, grid)[:most]
        if sequence.length >= len(sequence.feed):
            self.settle(sequence)
            if not boundaries or sequence.pending or boundaries[0] <= sequence.reach:
                return []
            slot = self.prefix.take_slot(gently=True)
            return [slot] if slot else []
        found = [0] * len(boundaries)
        for at in reversed(range(len(boundaries))):
            if not self.prefix.holds(sequence.feed, boundaries[at]):
                found[at] = self.prefix.take_slot(gently=False)
        return found if any(found) else []

    def capture(self, sequence: Sequence, start: int, slots: list[int]) -> None:
        """A replay has begun that scatters the state of the boundaries after `start` to `slots`;
        a prompt's are entered, a decoding sequence's once its tokens are known."""
        grid = self.prefix.grid
        for boundary, slot in enumerate(slots, start=start // grid + 1):
            if not slot:
                continue
            length = boundary * grid
            first = max(0, length - self._past) // self._page
            at = first - sequence.window_first
            pages = list(sequence.window_pages)[at : at + length // self._page - first]
            snapshot = self.prefix.hold(slot, length, first, pages)
            if start < len(sequence.feed):
                self.prefix.insert(snapshot, sequence.feed, sequence.full_pages)
            else:
                sequence.pending = snapshot
                snapshot.pins += bool(self._drafts)

    def pass_boundary(self, sequence: Sequence) -> None:
        """The least length has grown: a snapshot before it is written by what has begun, or never,
        and until then its slot must not be another's."""
        snapshot = sequence.pending
        if snapshot and snapshot.pins and snapshot.length <= sequence.length:
            self.prefix.unpin(snapshot)

    def settle(self, sequence: Sequence) -> None:
        """Enter a decoding sequence's snapshot if the tokens before it are known."""
        snapshot, known = sequence.pending, len(sequence.prompt) + len(sequence.tokens)
        if snapshot and not snapshot.slot:  # evicted meanwhile
            sequence.pending = None
        elif snapshot and snapshot.length < known:  # the token after it was drawn from it
            snapshot.pins = 0
            tokens = [*sequence.prompt, *sequence.tokens]
            self.prefix.insert(snapshot, tokens, sequence.full_pages)
            sequence.pending = None

    def read(self, sequence: Sequence) -> None:
        """The replay that reads the snapshot of a sequence's hit has begun, or never will."""
        if sequence.source:
            self.prefix.unpin(sequence.source)
            sequence.source = None

    def quiet(self, sequence: Sequence) -> int:
        """Up to which length a sequence that has grown needs neither page nor snapshot."""
        boundary = (sequence.length // self.prefix.grid + 1) * self.prefix.grid
        return min(sequence.capacity - self._drafts, boundary - 1)

    def free_window(self, sequence: Sequence) -> None:
        """Return window pages that the token at `length` and later ones cannot see."""
        first = (sequence.length - self._past) // self._page
        for _ in range(sequence.window_first, first):
            self.window_pages.give(sequence.window_pages.popleft())
        self._see_from(sequence, first)

    def accounting(self, running: list[Sequence]) -> dict[str, Account]:
        """Balance of slots, pages and snapshot slots; live ones are those of `running`."""
        full = {page for s in running for page in s.full_pages}
        window = {page for s in running for page in s.window_pages}
        return {
            "slots": self.slots.account(len(running)),
            "full_pages": self.full_pages.account(len(full)),
            "window_pages": self.window_pages.account(len(window)),
            "snapshots": self.prefix.account(),
        }

    def _see_from(self, sequence: Sequence, first: int) -> None:
        """Window layers see pages from logical page `first` on, until its last token is past."""
        sequence.window_first = first
        end = (first + 1) * self._page + self._past
        sequence.window_end = end if self._ring else sequence.total

    def _most(self, sequence: Sequence) -> tuple[int, int]:
        """Most pages of full and of window layers that the sequence holds at once."""
        pages, added = self._pages(sequence.total), min(sequence.total - 1, self._most_added)
        spanned = -(-(self._past + added + self._drafts - 1) // self._page) + 1
        return pages * self._has_full, min(pages, spanned, self._ring)

    def _pages(self, length: int) -> int:
        """Pages of `length` tokens, and of their drafts."""
        return -(-(length + self._drafts) // self._page)
