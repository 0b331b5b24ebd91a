"""The short convolution with its ring of inputs (spec 5.5), as the references use it.

The input of position p of a request lies at entry p % RING of its slot's ring, RING >= 3. A row of
c tokens from position n on sees z = the inputs at n-3 .. n+c-1; those before position 0 are zeros,
masked by the row's length. Token i gives y[i] = x[i] + sum_j w[j] * z[i + j]. The row leaves its
last min(c, RING) inputs, and what it saw of another slot (`sources`); a snapshot at offset o gets
z[o : o + 3]. So what a row leaves past the length that is committed later is overwritten, unread.
The old inputs of all rows are read before anything is written: a row may start from another row's
slot, and a snapshot near the chunk's start mixes old and new.
"""

from typing import NamedTuple

import torch
from torch import Tensor

TAPS = 4
WINDOW = TAPS - 1


class Rows(NamedTuple):
    """What `step_metadata` says of a step's rows: int32, [R] each but starts [R + 1] and the
    destinations [R, G]. Tokens from starts[R] on are padding."""

    slots: Tensor
    sources: Tensor
    starts: Tensor
    lengths: Tensor
    destination_slots: Tensor
    destination_offsets: Tensor


def short_conv(x: Tensor, weight: Tensor, pool: Tensor, rows: Rows) -> Tensor:
    """Convolve `x` [T, C] with `weight` [C, 4] (last tap: the current token) -> fp32 [T, C].

    `pool` [slots, RING, C] holds one layer's rings; new inputs and snapshots are written to it. A
    padded token is convolved as if it had no history.
    """
    starts = rows.starts.tolist()
    strips = [_strip(x, pool, rows, row) for row in range(len(starts) - 1)]
    parts = [_convolve(strip, weight) for strip in strips]
    empty = x.new_zeros(WINDOW, x.shape[1])
    parts += [_convolve(torch.cat([empty, token[None]]), weight) for token in x[starts[-1] :]]
    for row, strip in enumerate(strips):
        _store(strip, pool, rows, row)
    return torch.cat(parts)


def window(ring: Tensor, length: int) -> Tensor:
    """The three inputs before position `length` [.., 3, C], oldest first, zeros before position 0,
    of a ring [.., RING, C]."""
    positions = torch.arange(length - WINDOW, length, device=ring.device)
    return ring[..., positions % ring.shape[-2], :].where((positions >= 0)[:, None], 0)


def _strip(x: Tensor, pool: Tensor, rows: Rows, row: int) -> Tensor:
    """z of one row [3 + c, C]."""
    begin, end = rows.starts[row : row + 2].tolist()
    return torch.cat([window(pool[int(rows.sources[row])], int(rows.lengths[row])), x[begin:end]])


def _convolve(strip: Tensor, weight: Tensor) -> Tensor:
    count = len(strip) - WINDOW
    wide, taps = strip.float(), weight.float()
    y = wide[WINDOW:]
    for tap in range(TAPS):
        y = y + taps[:, tap] * wide[tap : tap + count]
    return y


def _store(strip: Tensor, pool: Tensor, rows: Rows, row: int) -> None:
    """Write what the row leaves and its snapshots."""
    length, slot, ring = int(rows.lengths[row]), int(rows.slots[row]), pool.shape[1]

    def keep(slot: int, first: int, end: int) -> None:
        for index in range(max(first, WINDOW - length), end):
            pool[slot, (length + index - WINDOW) % ring] = strip[index]

    if len(strip) > WINDOW:
        first = WINDOW if slot == int(rows.sources[row]) else 0
        keep(slot, max(first, len(strip) - ring), len(strip))
    offsets = rows.destination_offsets[row].tolist()
    for slot, offset in zip(rows.destination_slots[row].tolist(), offsets, strict=True):
        if slot != 0:
            keep(slot, offset, offset + WINDOW)
