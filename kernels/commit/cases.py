"""Shapes, inputs and tolerances of commit."""

import torch
from torch import Tensor

from inkling_engine.kernels import table
from inkling_engine.kernels._cases import Case, normal

STOP_IDS, VOCAB, RESULTS, MAX_ROWS = 2, 40, 4, 8


def _case(name: str, steps_done: int, top: int) -> Case:
    """Rows that go on, stop, reach MAX_TOKENS, are not finite, do not emit, are inert."""
    slots = torch.tensor([3, 1, 0, 2, 5, 4], dtype=torch.int32)
    emits = torch.tensor([1, 1, 0, 1, 0, 1], dtype=torch.int32)
    tokens = torch.tensor([11, 7, 0, 0, 0, 39], dtype=torch.int32)
    logprobs = -normal(6).abs() * emits
    logprobs[3] = torch.nan
    arguments = (
        _state(),
        torch.arange(6 * VOCAB, dtype=torch.int32).view(6, VOCAB),
        torch.full((RESULTS, MAX_ROWS, table.RESULT_HEADER + top), -7, dtype=torch.int32),
        torch.full((RESULTS, MAX_ROWS, table.RESULT_FLOAT_HEADER + top), torch.nan),
        torch.tensor([steps_done, 5, 6, 7]),
        _ints(),
        tokens,
        logprobs,
        torch.arange(6 * top, dtype=torch.int32).view(6, top),
        normal(6, top),
        slots,
        torch.tensor([0, 1, 4, 4, 5, 9, 10], dtype=torch.int32),
        emits,
        STOP_IDS,
    )
    return Case(name, arguments, tolerance=0.0)


def _state() -> Tensor:
    state = torch.arange(6, dtype=torch.int32)[:, None] * torch.tensor([100, 1, 2, 0])
    return state.int()


def _ints() -> Tensor:
    """Slot 1 stops at token 7; slot 4 has one token left."""
    ints = torch.full((6, table.INT_HEADER + STOP_IDS + 3), table.INERT_TOKEN, dtype=torch.int32)
    ints[:, table.MAX_TOKENS] = 100
    ints[1, table.INT_HEADER + 1] = 7
    ints[4, table.MAX_TOKENS] = 9
    return ints


def cases() -> list[Case]:
    """The first step, a full ring, a counter beyond 32 bits; with and without top logprobs."""
    return [
        _case("first", steps_done=0, top=3),
        _case("wrapped", steps_done=RESULTS + 1, top=3),
        _case("long", steps_done=(1 << 33) + 3, top=0),
    ]
