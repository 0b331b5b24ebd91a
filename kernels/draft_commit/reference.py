"""End of a draft phase, row by row; see the package docstring."""

import torch
from torch import Tensor

from inkling_engine.kernels import table


def draft_commit(
    request_state: Tensor,
    draft_hidden: Tensor,
    recent_tokens: Tensor,
    request_ints: Tensor,
    hidden: Tensor,
    ids: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    destination_slots: Tensor,
    destination_offsets: Tensor,
    emits: Tensor,
    drafts: int,
) -> None:
    """Store what the next round needs; see the package docstring."""
    for row, slot in enumerate(slots.tolist()):
        if slot == 0:
            continue
        begin, first = int(starts[row]), int(lengths[row])
        ends = {slot: first + int(starts[row + 1]) - begin}
        for target, offset in zip(
            destination_slots[row].tolist(), destination_offsets[row].tolist(), strict=True
        ):
            if target:
                ends[target] = first + drafts + offset
        for target, end in ends.items():
            rows = torch.arange(max(0, end - drafts), end)
            draft_hidden[target, rows % drafts] = hidden[begin + rows - first]
            known = rows[1:]
            tokens = ids[begin + row * drafts + known - first - 1]
            recent_tokens[target, known % drafts] = tokens
        limit = min(drafts, int(request_ints[slot, table.DRAFT_LIMIT]))
        request_state[slot, table.DRAFTS] = limit if emits[row] else 0
