"""Shapes, inputs and tolerances of sampling."""

from dataclasses import dataclass

import torch
from torch import Tensor

from inkling_engine.kernels import table
from inkling_engine.kernels._cases import Case, normal

STOP_IDS, BIAS_IDS, TOP = 3, 4, 5


@dataclass(frozen=True)
class Request:
    """A line of the request table; defaults change nothing and sample greedily."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    seed: tuple[int, int] = (1, 2)
    min_tokens: int = 0
    generated: int = 4
    stops: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    top: int = TOP


def table_lines(requests: list[Request]) -> tuple[Tensor, Tensor, Tensor]:
    """request_state, request_ints and request_floats with `requests` at slots 1, 2, ...

    Line 0 and whatever means nothing hold garbage.
    """
    lines = 1 + len(requests)
    state = torch.full((lines, table.STATE_WIDTH), -7, dtype=torch.int32)
    ints = torch.full((lines, table.INT_HEADER + STOP_IDS + BIAS_IDS), -7, dtype=torch.int32)
    floats = torch.full((lines, table.FLOAT_HEADER + BIAS_IDS), torch.nan)
    for slot, request in enumerate(requests, start=1):
        state[slot, table.GENERATED] = request.generated
        ints[slot, table.MIN_TOKENS] = request.min_tokens
        ints[slot, table.TOP_K] = request.top_k
        ints[slot, table.TOP_LOGPROBS] = request.top
        ints[slot, table.SEED_LOW], ints[slot, table.SEED_HIGH] = request.seed
        stops = [*request.stops, *[table.INERT_TOKEN] * STOP_IDS][:STOP_IDS]
        bias = [*request.bias, *[(0, 0.0)] * BIAS_IDS][:BIAS_IDS]
        ints[slot, table.INT_HEADER :] = torch.tensor([*stops, *[token for token, _ in bias]])
        floats[slot, table.TEMPERATURE] = request.temperature
        floats[slot, table.TOP_P] = request.top_p
        floats[slot, table.MIN_P] = request.min_p
        floats[slot, table.PRESENCE] = request.presence
        floats[slot, table.FREQUENCY] = request.frequency
        floats[slot, table.REPETITION] = request.repetition
        floats[slot, table.FLOAT_HEADER :] = torch.tensor([value for _, value in bias])
    return state, ints, floats


def counts(lines: int, vocab: int) -> Tensor:
    """token_counts [lines, vocab]: some ids in the prompt, some generated, some both."""
    generator = torch.Generator().manual_seed(5)
    sampled = torch.randint(0, 8, (lines, vocab), generator=generator)
    prompt = torch.randint(0, 4, (lines, vocab), generator=generator) == 0
    return ((sampled - 5).clamp(min=0) + prompt * table.PROMPT_SEEN).int()


def _case(name: str, requests: list[Request], vocab: int, special: Tensor | None = None) -> Case:
    rows = len(requests) + 1  # the last one emits nothing
    own = torch.arange(rows, dtype=torch.int32)
    arguments = (
        normal(rows, vocab, scale=3) if special is None else special,
        counts(rows, vocab),
        *table_lines(requests),
        own,
        own,
        (own + 1) * (own < rows - 1),
        torch.arange(rows + 1, dtype=torch.int32),
        own * 17,
        own,
        (own < rows - 1).int(),
        STOP_IDS,
        BIAS_IDS,
        TOP,
        0,
    )
    return Case(f"{name}-{vocab}", arguments, tolerance=2e-6)


def _verify(name: str, requests: list[Request], vocab: int, drafts: int = 3) -> Case:
    """Rows of as many drafts as there are, fewer, none, and an inert row in between."""
    valid = [[drafts, 1, 0][i % 3] for i in range(len(requests))]
    slots = [1, 0, *range(2, 1 + len(requests))]
    lengths = [1 + valid[0], 0, *(1 + count for count in valid[1:])]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    capacity, live = len(slots) * (1 + drafts), int(starts[-1])
    at = torch.arange(capacity, dtype=torch.int32)
    rows = torch.tensor([row for row, count in enumerate(lengths) for _ in range(count)])
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(min(vocab, 8), (capacity,), generator=generator)  # often the same one
    arguments = (
        normal(capacity, vocab, scale=3),
        counts(1 + len(requests), vocab),
        *table_lines(requests),
        (tokens * (at < live)).int(),
        torch.cat([rows, rows.new_zeros(capacity - live)]).int(),
        torch.tensor(slots, dtype=torch.int32),
        starts,
        torch.arange(len(slots), dtype=torch.int32) * 17,
        at * (at < live),
        (at < live).int(),
        STOP_IDS,
        BIAS_IDS,
        TOP,
        drafts,
    )
    return Case(f"{name}-{vocab}", arguments, tolerance=2e-6)


def _not_finite(vocab: int) -> Tensor:
    logits = normal(4, vocab)
    logits[0, 3], logits[1, vocab - 1] = torch.nan, torch.inf
    logits[3] = torch.nan
    return logits


def _tied(vocab: int) -> Tensor:
    return normal(3, vocab).round()


_CHANGES = [
    Request(repetition=1.5, presence=0.3, frequency=0.7),
    Request(bias=((7, 20.0), (3, -30.0)), top=0),
    Request(bias=((5, 40.0),), stops=(5, 9), min_tokens=5),
    Request(bias=((5, 40.0),), stops=(5, 9), min_tokens=4),
    Request(temperature=0.7, repetition=0.8, stops=(1,), min_tokens=9),
]
FILTERS = [
    Request(temperature=1.0),
    Request(temperature=0.8, top_k=1, top=2),
    Request(temperature=2.5, top_k=7, seed=(-1, -1)),
    Request(temperature=1.5, top_p=0.63),
    Request(temperature=4.0, min_p=0.07),
    Request(temperature=3.0, top_p=0.97, top_k=40, min_p=0.011, seed=(3, 1 << 30)),
    Request(temperature=1e-3),
    Request(temperature=1.0, top_p=1e-6),
]


def cases() -> list[Case]:
    """Greedy and sampled rows, every filter and penalty, ties, logits that are not finite."""
    return [
        *(_case("greedy", [Request()] * 3, vocab) for vocab in (50, 150, 2040)),
        *(_case("changes", _CHANGES, vocab) for vocab in (50, 150)),
        *(_case("filters", FILTERS, vocab) for vocab in (50, 150, 2040)),
        _case(
            "not-finite", [Request(), Request(temperature=1.0), Request(top=1)], 67, _not_finite(67)
        ),
        _verify("verify-changes", _CHANGES, 50),
        _verify("verify-filters", FILTERS, 150),
        _verify("verify-one", [Request(1.0, presence=1.0, top_p=0.9)], 67, drafts=8),
        _case("tied", [Request(), Request(temperature=1.0, top_k=2)], 67, _tied(67)),
    ]
