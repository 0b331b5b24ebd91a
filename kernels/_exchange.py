"""How ranks exchange data inside an op: the block, the sequence, publishing and waiting.

Each rank has one block of int64 words that the others can address: CONTROL words (the error word,
a limit, 1 + the block's rank), FLAGS sequence flags, and two halves of data. A collective numbered
`call` out of the `calls` of a program has the sequence step_counter[0] * calls + call + 1, the same on
all ranks; it uses half sequence % 2. A rank writes its part, then its flag, then waits until the other
ranks' flags have come as far, and reads their parts. So nobody writes what a slow rank still reads: who
publishes s has read s - 1 of all, and they had then read s - 2. That holds while no number is left
out: a program makes all its calls. What stands behind the step counter's growth has negative numbers.

On a GPU two slots a rank follow the halves, into which the other ranks push small parts, and flags count
PHASES times as fast, for large parts come in pieces (`_exchange_triton.py`).

`peers` [8] i64 are the blocks' addresses in this process, the own one's included. 0 is a rank that
is absent: it is never waited for and gives nothing. Flags outlive steps and are never reset alone: who
zeroes a step counter zeroes the block, before any rank's next step. With one rank nothing is read.

A rank that does not come within LIMIT_MS (or word LIMIT, if that is not 0) is noted in the error word as
1 + rank, the first one only. Then nobody waits any more: what has not come counts as absent.
On the CPU so is a rank whose process has ended: word LIFE + r may hold 1 + a descriptor, of this process,
that hangs up then. Nothing of Python runs while a program waits, so the native wait looks itself; time
in which it did not, being suspended, is not the other rank's.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

CONTROL = 32  # words
PHASES = 16  # of a call, on a GPU
FLAGS = 256  # a launch of more programs than that does not wait
HEADER = CONTROL + FLAGS
ERROR, LIMIT, OWNER, LIFE = 0, 1, 2, 8  # words of the control part; LIFE is one a rank
LIMIT_MS = 5_000
WORD = 8  # bytes
ALIGNMENT = 32  # words, of a half or a slot
MOST_PUSHED = 1 << 18  # words of a slot: 2 MiB
ABSENT_LOGIT = -1e30


def exchange_words(part_bytes: int, pushers: int = 0) -> int:
    """Words of a block whose calls give at most `part_bytes` each; `pushers` ranks push to it."""
    half = -(-part_bytes // (WORD * ALIGNMENT)) * ALIGNMENT
    return HEADER + 2 * (half + pushers * min(half, MOST_PUSHED))


def slot_words(words: int, pushers: int) -> int:
    """Words of each rank's slots in a block of `words` words."""
    return min(MOST_PUSHED, (words - HEADER) // 2 // (1 + pushers) // ALIGNMENT * ALIGNMENT)


def half_words(words: int, pushers: int) -> int:
    """Words of each half of a block of `words` words."""
    both = (words - HEADER) // 2 - pushers * slot_words(words, pushers)
    return both // ALIGNMENT * ALIGNMENT


def all_parts(
    part: Tensor,
    peers: Tensor,
    exchange: Tensor,
    step_counter: Tensor,
    rank: Tensor,
    call: int,
    calls: int,
    world: int,
) -> list[Tensor | None]:
    """Publish `part` and return every rank's, in rank order; None for one that gave nothing.

    peers [8] i64, exchange [words] i64 (written), step_counter [4] i64, rank [4] i32.
    """
    own, sequence = int(rank[0]), int(step_counter[0]) * calls + call + 1
    size, half = part.nbytes, WORD * half_words(len(exchange), 0)
    assert size <= half, f"a part of {size} bytes for a half of {half}"
    at = WORD * HEADER + (sequence % 2) * half
    block = exchange.data_ptr()
    ctypes.memmove(block + at, part.contiguous().data_ptr(), size)
    _word(block, CONTROL).value = sequence
    deadline = time.monotonic() + (_word(block, LIMIT).value or LIMIT_MS) / 1000
    parts: list[Tensor | None] = []
    for other in range(world):
        address = block if other == own else int(peers[other])
        if address == 0 or not _arrived(block, address, other, sequence, deadline):
            parts.append(None)
            continue
        copy = part.new_empty(part.shape)
        ctypes.memmove(copy.data_ptr(), address + at, size)
        parts.append(copy)
    return parts


def rank_sum(parts: Iterable[Tensor | None]) -> Tensor:
    """The sum of the parts that were given: fp32, in rank order, rounded once to their dtype."""
    given = [part for part in parts if part is not None]
    total = given[0].float() + 0.0
    for part in given[1:]:
        total = total + part.float()
    return total.to(given[0].dtype)


def _word(block: int, index: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(block + WORD * index)


def _arrived(block: int, peer: int, rank: int, sequence: int, deadline: float) -> bool:
    """Wait until the flag of `peer` is at `sequence`; False, and noted, when time is over."""
    flag, error = _word(peer, CONTROL), _word(block, ERROR)
    while flag.value < sequence:
        if error.value == 0 and time.monotonic() > deadline:
            error.value = 1 + rank
        if error.value != 0:
            return False
        time.sleep(0)
    return True
