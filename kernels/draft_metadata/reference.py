"""Metadata of a draft phase, row by row; see the package docstring."""

from typing import NamedTuple

import torch
from torch import Tensor

from inkling_engine.kernels import table
from inkling_engine.kernels._draft_rows import behind
from inkling_engine.kernels.step_metadata.reference import locations


class DraftMeta(NamedTuple):
    """What every draft depth needs of the rows; shapes in the package docstring."""

    ids: Tensor
    token_rows: Tensor
    positions: Tensor
    hidden_rows: Tensor
    full_locations: Tensor
    window_locations: Tensor
    slots: Tensor
    sources: Tensor
    starts: Tensor
    lengths: Tensor
    kv_lengths: Tensor
    destination_slots: Tensor
    destination_offsets: Tensor
    frontier_rows: Tensor
    emits: Tensor


def empty_meta(
    like: Tensor, tokens: int, rows: int, destinations: int, drafts: int, most: int
) -> DraftMeta:
    """The outputs' shapes and dtypes, zeroed, on the device of `like`."""
    packed = tokens + rows * behind(drafts, most)

    def ints(*shape: int) -> Tensor:
        return like.new_zeros(shape, dtype=torch.int32)

    def wide() -> Tensor:
        return like.new_zeros(packed, dtype=torch.int64)

    per_token = (
        ints(packed + rows * drafts),
        ints(packed),
        ints(packed),
        ints(packed),
        wide(),
        wide(),
    )
    per_row = ints(rows), ints(rows), ints(rows + 1), ints(rows), ints(rows)
    snapshots = ints(rows, destinations), ints(rows, destinations)
    return DraftMeta(*per_token, *per_row, *snapshots, ints(rows), ints(rows))


def draft_metadata(
    request_state: Tensor,
    full_table: Tensor,
    window_table: Tensor,
    recent_tokens: Tensor,
    step_tokens: Tensor,
    slots: Tensor,
    sources: Tensor,
    starts: Tensor,
    lengths: Tensor,
    destination_slots: Tensor,
    destination_offsets: Tensor,
    emits: Tensor,
    page_size: int,
    drafts: int,
    most: int,
) -> DraftMeta:
    """Resolve a draft phase; see the package docstring."""
    rows, destinations = destination_slots.shape
    meta = empty_meta(slots, len(step_tokens), rows, destinations, drafts, most)
    for row, slot in enumerate(slots.tolist()):
        meta.starts[row + 1] = meta.starts[row]
        if slot == 0:
            continue
        state, known = request_state[slot], int(lengths[row])
        first, end = max(0, known - behind(drafts, most)), int(state[table.LENGTH])
        begin, stop = int(meta.starts[row]), int(meta.starts[row]) + end - first
        meta.starts[row + 1], meta.slots[row], meta.sources[row] = stop, slot, sources[row]
        meta.lengths[row], meta.kv_lengths[row] = first, first + drafts
        positions = torch.arange(first, end)
        meta.token_rows[begin:stop], meta.positions[begin:stop] = row, positions.int()
        packed = int(starts[row]) + positions - known
        stashed = len(step_tokens) + positions % drafts
        meta.hidden_rows[begin:stop] = torch.where(positions < known, stashed, packed).int()
        placed = positions + drafts
        meta.full_locations[begin:stop] = locations(full_table[slot], placed, page_size)
        meta.window_locations[begin:stop] = locations(window_table[slot], placed, page_size)
        sampled = bool(emits[starts[row] if most else row])
        fed = step_tokens[int(starts[row]) :][: end - known]
        recent = recent_tokens[int(sources[row]), positions[positions < known] % drafts]
        last = sampled * state[table.LAST_TOKEN : table.LAST_TOKEN + 1]
        ids = torch.cat([recent, fed, last])[1:]
        meta.ids[begin + row * drafts :][: len(ids)] = ids
        if sampled and int(state[table.FINISH]) == 0:
            meta.frontier_rows[row], meta.emits[row] = stop - 1, 1
        kept = (destination_slots[row] > 0) & (known + destination_offsets[row] <= end)
        boundaries = known + destination_offsets[row] - drafts - first
        meta.destination_slots[row] = destination_slots[row] * kept
        meta.destination_offsets[row] = boundaries * kept
    return meta
