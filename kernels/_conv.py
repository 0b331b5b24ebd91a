"""The short convolution with its three-input window (spec 5.5), as the references use it.

For one row: z = old ++ x, the old window followed by the new inputs. Token i gives
y[i] = x[i] + sum_j w[j] * z[i + j]; the new window is z[n : n + 3]; a snapshot at offset o is
z[o : o + 3]. The old windows of all rows are read before anything is written, for a row may start
from another slot's window (`sources`) and a snapshot near the chunk's start mixes old and new.
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

    `pool` [slots, 3, C] holds one layer's windows, oldest first; new windows and snapshots are
    written to it. A padded token is convolved as if it had no history.
    """
    starts = rows.starts.tolist()
    strips = [_strip(x, pool, rows, row) for row in range(len(starts) - 1)]
    parts = [_convolve(strip, weight) for strip in strips]
    empty = x.new_zeros(WINDOW, x.shape[1])
    parts += [_convolve(torch.cat([empty, token[None]]), weight) for token in x[starts[-1] :]]
    for row, strip in enumerate(strips):
        _store(strip, pool, rows, row)
    return torch.cat(parts)


def _strip(x: Tensor, pool: Tensor, rows: Rows, row: int) -> Tensor:
    """z of one row [3 + n, C]: the old window is masked, not read, at length 0."""
    begin, end = rows.starts[row : row + 2].tolist()
    resumed = int(rows.lengths[row]) > 0
    old = pool[int(rows.sources[row])] if resumed else x.new_zeros(WINDOW, x.shape[1])
    return torch.cat([old, x[begin:end]])


def _convolve(strip: Tensor, weight: Tensor) -> Tensor:
    count = len(strip) - WINDOW
    wide, taps = strip.float(), weight.float()
    y = wide[WINDOW:]
    for tap in range(TAPS):
        y = y + taps[:, tap] * wide[tap : tap + count]
    return y


def _store(strip: Tensor, pool: Tensor, rows: Rows, row: int) -> None:
    """Write the row's new window and its snapshots."""
    if len(strip) > WINDOW:
        pool[int(rows.slots[row])] = strip[-WINDOW:]
    offsets = rows.destination_offsets[row].tolist()
    for slot, offset in zip(rows.destination_slots[row].tolist(), offsets, strict=True):
        if slot != 0:
            pool[slot] = strip[offset : offset + WINDOW]
