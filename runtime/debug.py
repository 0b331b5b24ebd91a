"""What is too slow, or too careful, for every day; for tests and the curious.

`INKLING_ENGINE_DEBUG=1`: every replay first checks that no input has moved, and a load probes the
folder again even if it remembers that it did. The functions look into an engine between its steps:
they wait for a replay that was begun ahead, so what they see and write is settled, on any device.
`script.Script` is the part that decides what runs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as ListLike
from itertools import chain
from typing import TYPE_CHECKING

from inkling_engine.kernels import table
from inkling_engine.runtime.requests import Status
from inkling_engine.runtime.stats import by_state

if TYPE_CHECKING:
    from torch import Tensor

    from inkling_engine.runtime.engine import Engine
    from inkling_engine.runtime.plan import Plan
    from inkling_engine.runtime.replay import Replayer
    from inkling_engine.runtime.requests import Request, Sequence


def active() -> bool:
    """Whether the environment asks for it."""
    return os.environ.get("INKLING_ENGINE_DEBUG", "0") not in ("", "0")


def address_check(inputs: Mapping[str, list[Tensor]]) -> Callable[[], None]:
    """What asserts that no input of any program has moved since this call."""
    addresses = {name: [t.data_ptr() for t in tensors] for name, tensors in inputs.items()}

    def check() -> None:
        for name, tensors in inputs.items():
            found = [tensor.data_ptr() for tensor in tensors]
            assert found == addresses[name], f"an input of {name} moved after it was bound"

    return check


class Checked:
    """A replayer that calls `check` before each replay."""

    def __init__(self, replayer: Replayer, check: Callable[[], None]) -> None:
        """Stand in front of `replayer`."""
        self._replayer, self._check, self.overlaps = replayer, check, replayer.overlaps

    def replay(self, name: str, steps: int) -> Callable[[], None]:
        """Check, then replay."""
        self._check()
        return self._replayer.replay(name, steps)


def accounting(engine: Engine) -> dict[str, dict[str, int]]:
    """Slots and pages by pool and state (free, live, pinned); the states add up."""
    return {name: by_state(account) for name, account in engine.scheduler.accounting().items()}


def check(engine: Engine) -> None:
    """Assert that nothing is lost, and nothing both free and held. Meant for the end of every job:
    of an engine without work, what is not free must be the prefix cache's."""
    scheduler = engine.scheduler
    if not scheduler.unfinished():
        engine.step()  # reads what was begun ahead
    with engine._lock:
        scheduler.check()
        running = scheduler.prefilling + scheduler.decoding
        for name, held in (
            ("slots", {sequence.slot for sequence in running}),
            ("full_pages", set(chain(*(sequence.full_pages for sequence in running)))),
            ("window_pages", set(chain(*(sequence.window_pages for sequence in running)))),
        ):
            free = getattr(scheduler.holdings, name).free
            assert len(set(free)) == len(free), f"{name}: one is free twice"
            assert not held & set(free), f"{name}: one is free and held"
            assert 0 not in held, f"{name}: the inert one is held"


def poison_free(engine: Engine, value: float = math.nan) -> None:
    """Fill with `value` all that nobody may read: free slots and pages, and the inert slot 0 and
    page 0. Tokens must not change."""
    holdings, pool = engine.scheduler.holdings, engine.pool
    settle(engine)
    for slot in (0, *holdings.slots.free, *holdings.prefix.slots.free):
        pool.poison_slot(slot, value)
    for page in (0, *holdings.full_pages.free):
        pool.poison_page("full", page, value)
    for page in (0, *holdings.window_pages.free):
        pool.poison_page("window", page, value)
    settle(engine)


def poison_releases(engine: Engine, value: float = math.nan) -> None:
    """From now on `poison_free` after every replay, so that all that was released is poisoned."""

    def observe(plan: Plan, began: float, ended: float, tokens: int) -> None:
        poison_free(engine, value)

    poison_free(engine, value)
    engine.observers.append(observe)


def digest(engine: Engine, sequence: Sequence) -> str:
    """SHA-256 of what a running sequence's next token can read in the target's layers: its last
    conv inputs, oldest first, then keys and values of all positions in full layers and of the
    window's in window layers, wherever they lie. Equal states of two sequences have equal digests,
    whether or not their engines draft."""
    from inkling_engine.runtime.pool import digest as digest_tensors

    assert sequence.slot, "a sequence that has not run has no state"
    settle(engine)
    return digest_tensors(_state(engine, sequence))


def draft_digest(engine: Engine, sequence: Sequence) -> str:
    """SHA-256 of what a running sequence's next round can read of the draft depths, and its drafts.
    It depends on the tokens so far alone, not on what was guessed on the way."""
    from inkling_engine.runtime.pool import digest as digest_tensors

    assert sequence.slot and engine.spec.spec_depth, "there is no draft state"
    settle(engine)
    return digest_tensors(_draft_state(engine, sequence))


def write_drafts(engine: Engine, sequence: Sequence, tokens: ListLike[int]) -> None:
    """Let a running sequence's next round verify `tokens` in place of the drafts that it has."""
    settle(engine)
    _require_one_rank(engine)
    tensors, slot = engine.pool.tensors, sequence.slot
    assert slot and len(tokens) <= engine.spec.spec_depth, "more drafts than a round has"
    for place, token in enumerate(tokens):
        tensors["draft_tokens"][slot, place] = token
    tensors["request_state"][slot, table.DRAFTS] = len(tokens)


def force_accept(engine: Engine, request: Request, low: int, high: int | None = None) -> None:
    """Accept exactly `low` drafts, whatever they are, in steps of even number and `high` (by default as
    many) in odd ones, as far as there are drafts: for measuring, tokens are then the drafts'."""
    most = engine.spec.spec_depth
    high = low if high is None else high
    assert 0 <= low <= most and 0 <= high <= most, f"more than {most} drafts"
    settle(engine)
    for sequence in request.sequences:
        sequence.admit_ints[table.FORCE_ACCEPT] = forced = 1 + low + 16 * high
        if sequence.status is Status.RUNNING:
            _require_one_rank(engine)
            engine.pool.tensors["request_ints"][sequence.slot, table.FORCE_ACCEPT] = forced


def _require_one_rank(engine: Engine) -> None:
    """Pools that all ranks have alike are not written from here: the ranks would part."""
    assert engine.pool.seat is None, "an engine of several ranks"


def settle(engine: Engine) -> None:
    """Wait until the device has ended all that was begun."""
    if engine._ahead:
        engine._ahead.wait()
    device = engine.pool.tensors["results_int"].device
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def rank_digests(engine: Engine) -> list[dict[str, str]]:
    """SHA-256 by name of the pools that all ranks have alike, rank by rank: all must be equal."""
    settle(engine)
    seat = engine.pool.seat
    return [engine.pool.replicated(), *(seat.digests() if seat else [])]


def _state(engine: Engine, sequence: Sequence) -> Iterator[Tensor]:
    """The tensors of `digest`; pages are [layers, 2, kv heads, page, head dim]."""
    from inkling_engine.kernels._conv import window

    tensors, length = engine.pool.tensors, _length(engine, sequence)
    for name in sorted(tensors):
        if name.startswith("conv_") and "draft" not in name:
            yield window(tensors[name][:, sequence.slot], length)
    yield from _visible(engine, sequence, "kv_", 0, length)


def _draft_state(engine: Engine, sequence: Sequence) -> Iterator[Tensor]:
    """The tensors of `draft_digest`: keys lie K positions behind their tokens."""
    import torch

    tensors, depth, slot = engine.pool.tensors, engine.spec.spec_depth, sequence.slot
    length = _length(engine, sequence)
    again = torch.arange(max(0, length - depth), length)  # computed again in the next round
    for name in sorted(tensors):
        if name.startswith("conv_") and "draft" in name:
            ring = tensors[name][:, slot]
            kept = torch.arange(max(0, length - ring.shape[1]), length)
            yield ring[:, kept % ring.shape[1]]
    yield from _visible(engine, sequence, "kv_draft_", depth, length)
    yield tensors["draft_hidden"][slot, again % depth]
    yield tensors["recent_tokens"][slot, again[1:] % depth]
    yield tensors["request_state"][slot, table.DRAFTS]
    yield tensors["draft_tokens"][slot, : int(tensors["request_state"][slot, table.DRAFTS])]


def _visible(
    engine: Engine, sequence: Sequence, family: str, first: int, length: int
) -> Iterator[Tensor]:
    """Keys and values behind KV position `first`, as far as the token at `length` may see them."""
    tensors, page, past = engine.pool.tensors, engine.spec.page_size, engine.spec.shape.local.window
    for kind, pages, logical, begin in (
        ("full", sequence.full_pages, 0, first),
        ("window", sequence.window_pages, sequence.window_first, max(first, length - past + 1)),
    ):
        for index, physical in enumerate(pages, logical):
            low, high = max(begin - index * page, 0), min(length + first - index * page, page)
            if low < high:
                yield tensors[f"{family}{kind}"][:, physical, :, :, low:high]


def _length(engine: Engine, sequence: Sequence) -> int:
    """Tokens whose state is in the pools: behind the prompt, as the device knows them."""
    if sequence.length < len(sequence.feed):
        return sequence.length
    return int(engine.pool.tensors["request_state"][sequence.slot, table.LENGTH])
