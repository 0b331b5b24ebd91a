"""Shapes, inputs and tolerances of commit."""

import torch
from torch import Tensor

from inkling_engine.kernels import table
from inkling_engine.kernels._cases import Case, normal

STOP_IDS, VOCAB, RESULTS, MAX_ROWS, LINES, SLOTS, WAITING = 2, 40, 4, 8, 8, 12, 3


def _case(name: str, steps_done: int, top: int, most: int = 1) -> Case:
    """Rows that go on, stop, reach MAX_TOKENS, are not finite, do not emit, are inert."""
    slots = _int32([3, 1, 0, 2, 5, 4])
    emits = _int32([1, 1, 0, 1, 0, 1])
    logprobs = -normal(6).abs() * emits
    logprobs[3] = torch.nan
    arguments = (
        *_tables(steps_done, top, most),
        _int32([11, 7, 0, 0, 0, 39]),
        logprobs,
        torch.arange(6 * top, dtype=torch.int32).view(6, top),
        normal(6, top),
        torch.arange(10, dtype=torch.int32),
        slots,
        _int32([0, 1, 4, 4, 5, 9, 10]),
        slots * 100,
        emits,
        _int32([[9, 0]] * 6),
        _int32([[1, 0]] * 6),
        STOP_IDS,
        0,
    )
    return Case(name, arguments, tolerance=0.0)


# Drafts, the target's tokens, and an offset and destination, by row: 3 drafts at most.
_ROUNDS = {
    3: ([11, 12, 13], [11, 12, 13, 14], (4, 9)),  # all accepted, the boundary just reached
    1: ([5, 7, 8], [5, 7, 8, 9], (3, 10)),  # the second token stops it: the boundary is not reached
    0: ([], [], (0, 0)),
    2: ([6, 6], [6, 3, 6], (2, 0)),  # one accepted; a boundary that no snapshot is wanted of
    5: ([], [17], (1, 11)),  # no drafts
    4: ([20, 21, 22], [20, 21, 22, 23], (0, 0)),  # two tokens are left
    6: ([0, 1, 2], [0, 0, 2, 3], (2, 8)),  # the second one is not finite
    7: ([30, 31, 32], [30, 31, 32, 33], (3, 10)),  # two are accepted by force
}


def _verify(name: str, steps_done: int, top: int) -> Case:
    """A round of every kind of end."""
    drafts, slots = 3, list(_ROUNDS)
    counts = [len(tokens) for _, tokens, _ in _ROUNDS.values()]
    starts, capacity = _int32([0, *torch.tensor(counts).cumsum(0).tolist()]), 8 * (1 + drafts)
    tokens = [token for _, row, _ in _ROUNDS.values() for token in row]
    fed = [token for guesses, row, _ in _ROUNDS.values() for token in [38, *guesses][: len(row)]]
    emits = (torch.arange(capacity) < len(tokens)).int()
    logprobs = -normal(capacity).abs() * emits
    logprobs[int(starts[slots.index(6)]) + 1] = torch.nan
    destinations = [(slot, offset) for _, _, (offset, slot) in _ROUNDS.values()]
    arguments = (
        *_tables(steps_done, top, 1 + drafts),
        _padded(tokens, capacity),
        logprobs,
        torch.arange(capacity * top, dtype=torch.int32).view(capacity, top),
        normal(capacity, top),
        _padded(fed, capacity),
        _int32(slots),
        starts,
        _int32([100 * slot for slot in slots]),
        emits,
        _int32([[slot] for slot, _ in destinations]),
        _int32([[offset] for _, offset in destinations]),
        STOP_IDS,
        drafts,
    )
    return Case(name, arguments, tolerance=0.0)


def _tables(steps_done: int, top: int, most: int) -> tuple[Tensor, ...]:
    """request_state to request_ints; slot 1 stops at token 7, slot 4 has one or two tokens left."""
    state = torch.arange(LINES)[:, None] * torch.tensor([100, 1, 2, 0, 9, 9, 9, 9])
    ints = torch.full((LINES, table.INT_HEADER + STOP_IDS + 3), table.INERT_TOKEN).int()
    ints[:, table.MAX_TOKENS] = 100
    ints[:, table.FORCE_ACCEPT] = 0
    ints[7, table.FORCE_ACCEPT] = 1 + 2 + 16 * 9
    ints[1, table.INT_HEADER + 1] = 7
    ints[4, table.MAX_TOKENS] = 9 if most == 1 else 10
    columns = most * (1 + top)
    return (
        state.int(),
        torch.arange(LINES * VOCAB, dtype=torch.int32).view(LINES, VOCAB),
        torch.full((RESULTS, MAX_ROWS, table.RESULT_HEADER + columns), -7, dtype=torch.int32),
        torch.full((RESULTS, MAX_ROWS, columns), torch.nan),
        torch.tensor([steps_done, 5, 6, 7]),
        _int32([[8, 9, 10]] * LINES),
        torch.full((SLOTS,), -7, dtype=torch.int32),
        ints,
    )


def _padded(values: list[int], count: int) -> Tensor:
    return _int32([*values, *[0] * (count - len(values))])


def _int32(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cases() -> list[Case]:
    """The first step, a full ring, a counter beyond 32 bits; top logprobs or none; verify steps."""
    return [
        _case("first", steps_done=0, top=3),
        _case("wrapped", steps_done=RESULTS + 1, top=3),
        _case("long", steps_done=(1 << 33) + 3, top=0),
        _case("room-for-drafts", steps_done=1, top=2, most=4),
        _verify("verify", steps_done=2, top=3),
        _verify("verify-odd", steps_done=3, top=0),
    ]
