"""Metadata of a step: one-shot lines are applied, then each row is resolved; see the package."""

from typing import NamedTuple

import torch
from torch import Tensor

from inkling_engine.kernels import table


class StepMeta(NamedTuple):
    """What every layer of a step needs of its rows, derived once; shapes in the package docstring."""

    tokens: Tensor
    positions: Tensor
    token_rows: Tensor
    full_locations: Tensor
    window_locations: Tensor
    slots: Tensor
    sources: Tensor
    starts: Tensor
    lengths: Tensor
    destination_slots: Tensor
    destination_offsets: Tensor
    sample_rows: Tensor
    emits: Tensor


class _Table(NamedTuple):
    """The request table, one line a slot (snapshot_lengths: one entry a slot)."""

    request_state: Tensor
    request_ints: Tensor
    request_floats: Tensor
    token_counts: Tensor
    full_table: Tensor
    window_table: Tensor
    snapshot_slots: Tensor
    snapshot_lengths: Tensor
    draft_tokens: Tensor


def empty_meta(like: Tensor, tokens: int, rows: int, destinations: int, drafts: int) -> StepMeta:
    """The outputs' shapes and dtypes, zeroed, on the device of `like`."""
    samples = tokens if drafts else rows

    def ints(*shape: int) -> Tensor:
        return like.new_zeros(shape, dtype=torch.int32)

    def locations() -> Tensor:
        return like.new_zeros(tokens, dtype=torch.int64)

    per_token = ints(tokens), ints(tokens), ints(tokens), locations(), locations()
    per_row = ints(rows), ints(rows), ints(rows + 1), ints(rows)
    snapshots = ints(rows, destinations), ints(rows, destinations)
    return StepMeta(*per_token, *per_row, *snapshots, ints(samples), ints(samples))


def step_metadata(
    request_state: Tensor,
    request_ints: Tensor,
    request_floats: Tensor,
    token_counts: Tensor,
    full_table: Tensor,
    window_table: Tensor,
    snapshot_slots: Tensor,
    snapshot_lengths: Tensor,
    draft_tokens: Tensor,
    row_slots: Tensor,
    row_counts: Tensor,
    row_sources: Tensor,
    row_flags: Tensor,
    token_ids: Tensor,
    admit_ints: Tensor,
    admit_floats: Tensor,
    page_updates: Tensor,
    snapshot_updates: Tensor,
    page_size: int,
    snapshot_grid: int,
    destinations: int,
    drafts: int,
) -> StepMeta:
    """Resolve a step; see the package docstring."""
    tables = token_counts, full_table, window_table, snapshot_slots, snapshot_lengths
    pools = _Table(request_state, request_ints, request_floats, *tables, draft_tokens)
    _admit(pools, admit_ints, admit_floats)
    _update(pools, page_updates, snapshot_updates)
    meta = empty_meta(row_slots, len(token_ids), len(row_slots), destinations, drafts)
    rows = torch.stack([row_slots, row_counts, row_sources, row_flags], dim=1).tolist()
    given = token_ids.split([*row_counts.tolist(), len(token_ids) - int(row_counts.sum())])
    for row, (slot, count, source, flags) in enumerate(rows):
        assert not drafts or count <= 1, "rows of a verify step are given one token"
        live = slot != 0 and count > 0 and int(request_state[slot, table.FINISH]) == 0
        meta.starts[row + 1] = meta.starts[row]
        if live:
            meta.slots[row], meta.sources[row] = slot, source or slot
            fed = given[row]
            if flags & table.FROM_TABLE:
                assert count == 1, "a row fed from the table has one token"
                fed = _known(pools, slot, drafts if flags & table.SAMPLE else 0)
            _place(pools, meta, row, fed, not flags & table.FROM_TABLE, page_size)
            _cross_grid(pools, meta, row, snapshot_grid, taken=not drafts)
            if flags & table.SAMPLE:
                _sample(meta, row, bool(drafts))
    return meta


def _admit(pools: _Table, admit_ints: Tensor, admit_floats: Tensor) -> None:
    for ints, floats in zip(admit_ints, admit_floats, strict=True):
        if slot := int(ints[table.ADMIT_SLOT]):
            pools.request_ints[slot] = ints[table.ADMIT_HEADER :]
            pools.request_floats[slot] = floats
            pools.request_state[slot] = 0
            pools.request_state[slot, table.LENGTH] = ints[table.ADMIT_LENGTH]
            pools.request_state[slot, table.GENERATED] = ints[table.ADMIT_GENERATED]
            pools.token_counts[slot] = 0
            pools.snapshot_slots[slot] = 0
            ints[table.ADMIT_SLOT] = 0


def _update(pools: _Table, page_updates: Tensor, snapshot_updates: Tensor) -> None:
    for kind, slot, index, page in page_updates.tolist():
        if slot:
            pages = pools.full_table if kind == table.FULL_TABLE else pools.window_table
            pages[slot, index] = page
    page_updates[:, 1] = 0
    for line in snapshot_updates:
        if slot := int(line[0]):
            pools.snapshot_slots[slot] = line[1:]
            line[0] = 0


def _known(pools: _Table, slot: int, drafts: int) -> Tensor:
    """LAST_TOKEN and at most `drafts` drafts, no more than the request may still have tokens."""
    state = pools.request_state[slot]
    left = int(pools.request_ints[slot, table.MAX_TOKENS] - state[table.GENERATED]) - 1
    count = max(0, min(drafts, int(state[table.DRAFTS]), left))
    last = state[table.LAST_TOKEN : table.LAST_TOKEN + 1]
    return torch.cat([last, pools.draft_tokens[slot, :count]])


def _place(
    pools: _Table, meta: StepMeta, row: int, fed: Tensor, counted: bool, page_size: int
) -> None:
    """Write the row's length, tokens, positions and locations; count tokens that the host fed."""
    slot = int(meta.slots[row])
    length = int(pools.request_state[slot, table.LENGTH])
    meta.lengths[row] = length
    meta.starts[row + 1] += len(fed)
    positions = torch.arange(length, length + len(fed))
    for token, position in zip(fed.tolist(), positions.tolist(), strict=True):
        if counted:
            _count(pools, slot, token, position)
    span = slice(int(meta.starts[row]), int(meta.starts[row + 1]))
    meta.tokens[span], meta.positions[span], meta.token_rows[span] = fed, positions.int(), row
    meta.full_locations[span] = locations(pools.full_table[slot], positions, page_size)
    meta.window_locations[span] = locations(pools.window_table[slot], positions, page_size)


def locations(pages: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Physical locations [n] i64 of `positions` [n]; logical pages go round the table `pages`."""
    page = pages[positions // page_size % len(pages)].long()
    return page * page_size + positions % page_size


def _sample(meta: StepMeta, row: int, every: bool) -> None:
    """Sample after the row's last token, or after `every` one of its tokens."""
    begin, end = meta.starts[row : row + 2].tolist()
    if every:
        meta.sample_rows[begin:end] = torch.arange(begin, end, dtype=torch.int32)
        meta.emits[begin:end] = 1
    else:
        meta.sample_rows[row], meta.emits[row] = end - 1, 1


def _count(pools: _Table, slot: int, token: int, position: int) -> None:
    """A fed token was seen in the prompt, or is a sampled one that is replayed."""
    counts = pools.token_counts[slot]
    if not 0 <= token < len(counts):  # padded vocabulary, or no token
        return
    if position < int(pools.request_ints[slot, table.PROMPT_LENGTH]):
        counts[token] |= table.PROMPT_SEEN
    else:
        counts[token] += 1


def _cross_grid(pools: _Table, meta: StepMeta, row: int, grid: int, taken: bool) -> None:
    """Destinations of the boundaries in (length, length + count], `taken` off the slot's list."""
    length, count = int(meta.lengths[row]), int(meta.starts[row + 1] - meta.starts[row])
    boundaries = [b for b in range(length + 1, length + count + 1) if b % grid == 0]
    limit = meta.destination_slots.shape[1]
    assert len(boundaries) <= limit, f"{len(boundaries)} grid boundaries in one row, not {limit}"
    waiting = pools.snapshot_slots[int(meta.slots[row])]
    entries = [*waiting.tolist(), *[0] * len(boundaries)]
    for j, (boundary, slot) in enumerate(zip(boundaries, entries, strict=False)):
        meta.destination_slots[row, j] = slot
        if slot or not taken:
            meta.destination_offsets[row, j] = boundary - length
        if slot and taken:
            pools.snapshot_lengths[slot] = boundary
    if taken:
        take(waiting, len(boundaries))


def take(waiting: Tensor, count: int) -> None:
    """Drop the first `count` entries of a slot's list of destinations; zeros move in."""
    left = waiting[count:].clone()
    waiting.zero_()
    waiting[: len(left)] = left
