"""Sampling and commit: exact distributions, independence of rows, penalties, stops, logprobs.

A row's noise depends on seed, position and token id alone, so one call with 20,000 rows of one slot
at different positions is 20,000 draws.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from inkling_engine.kernels import table
from inkling_engine.kernels._cases import normal
from inkling_engine.kernels.commit import commit
from inkling_engine.kernels.sample import reference, sample
from inkling_engine.kernels.sample.cases import BIAS_IDS, STOP_IDS, Request, table_lines
from inkling_engine.kernels.table import PROMPT_SEEN, Finish

pytestmark = pytest.mark.usefixtures("native_library")

DRAWS = 24_000
LOGITS = [1.3, -0.4, 2.1, 0.0, -3.0, 1.9, 0.7, -1.2, 2.05, -0.9]
STATE = [10, 3, 4, 0, 6, 0, 0, 0]
ALL = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)


class Sampled(NamedTuple):
    """What `sample` returns."""

    tokens: Tensor
    logprobs: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor


def run(
    logits: Tensor,
    requests: list[Request],
    slots: list[int],
    positions: list[int],
    counts: Tensor | None = None,
    top: int = 3,
) -> Sampled:
    """Sample `logits` [R, V]: row i is at slots[i] (`requests` from slot 1 on)."""
    rows, vocab = logits.shape
    if counts is None:
        counts = torch.zeros(1 + len(requests), vocab, dtype=torch.int32)
    starts = torch.arange(rows + 1, dtype=torch.int32)
    metadata = [torch.tensor(values, dtype=torch.int32) for values in (slots, positions, slots)]
    emits = (metadata[2] > 0).int()
    lines, own = table_lines(requests), torch.arange(rows, dtype=torch.int32)
    step = own, own, metadata[0], starts, metadata[1] - 1, own, emits
    return Sampled(*sample(logits, counts, *lines, *step, STOP_IDS, BIAS_IDS, top, 0))


def one(logits: Tensor, request: Request, counts: Tensor | None = None) -> int:
    """The token of one row [V]; `counts` [V]."""
    lines = None if counts is None else torch.stack([torch.zeros_like(counts), counts])
    return int(run(logits[None], [request], [1], [9], lines).tokens[0])


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ALL,) * 4, (ALL, ALL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (*PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    """Random123's published vectors; the native kernel asserts them as it compiles."""
    first = torch.tensor([counter[0]])
    found = reference.philox(first, counter[1], *key, *counter[2:])
    assert tuple(int(word) for word in found) == words


def test_noise_is_the_stated_function_of_seed_position_and_token() -> None:
    """Flat logits: the native choice is the argmax of the reference's noise, for many seeds."""
    requests = [Request(temperature=1.0, seed=(s * 77_777 - 9, -s)) for s in range(64)]
    slots = list(range(1, 65))
    found = run(torch.zeros(64, 200), requests, slots, [3 * s for s in slots])
    for slot, request, token in zip(slots, requests, found.tokens.tolist(), strict=True):
        noise = reference.gumbel(200, 3 * slot, torch.tensor(request.seed, dtype=torch.int32))
        assert token == int(noise.argmax())


def exact(request: Request) -> list[float]:
    """Probabilities [V] of `request` over LOGITS, from the definitions, in fp64."""
    weights = [math.exp(logit / request.temperature) for logit in LOGITS]
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    order = [token for token in order if weights[token] >= request.min_p * max(weights)]
    order = order[: request.top_k or None]
    total, reached = sum(weights[token] for token in order), 0.0
    kept: list[int] = []
    for token in order:
        if kept and reached >= request.top_p * total:
            break
        kept.append(token)
        reached += weights[token]
    return [weights[token] / reached * (token in kept) for token in range(len(weights))]


@pytest.mark.parametrize(
    "request_",
    [
        Request(temperature=1.0),
        Request(temperature=0.6, seed=(7, 9)),
        Request(temperature=2.0, top_k=4),
        Request(temperature=1.0, top_p=0.7),
        Request(temperature=1.5, min_p=0.38),
        Request(temperature=1.7, min_p=0.05, top_k=7, top_p=0.85, seed=(-3, 1)),
    ],
    ids=["plain", "cold", "top-k", "top-p", "min-p", "all"],
)
def test_draws_follow_the_exact_distribution(request_: Request) -> None:
    logits = torch.tensor(LOGITS).repeat(DRAWS, 1)
    tokens = run(logits, [request_], [1] * DRAWS, list(range(DRAWS))).tokens
    found = tokens.bincount(minlength=len(LOGITS)).tolist()
    wanted = [DRAWS * probability for probability in exact(request_)]
    assert all(count == 0 for count, mean in zip(found, wanted, strict=True) if mean == 0)
    pairs = [pair for pair in zip(found, wanted, strict=True) if pair[1] > 0]
    statistic = sum((count - mean) ** 2 / mean for count, mean in pairs)
    freedom = len(pairs) - 1
    assert freedom > 0 and statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_draws_of_different_seeds_are_independent() -> None:
    """Two seeds agree as often as two independent draws would."""
    logits = torch.zeros(DRAWS, 10)
    draws = [
        run(logits, [Request(temperature=1.0, seed=seed)], [1] * DRAWS, list(range(DRAWS))).tokens
        for seed in ((1, 0), (2, 0), (1, 1))
    ]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        equal = int((draws[a] == draws[b]).sum())
        assert abs(equal - DRAWS / 10) < 4 * math.sqrt(DRAWS * 0.09)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    requests = [
        Request(),
        Request(temperature=1.0, seed=(5, 5)),
        Request(temperature=0.8, top_k=9, repetition=1.3),
        Request(temperature=1.2, top_p=0.8, bias=((3, 2.0),)),
    ]
    logits, counts = normal(4, 150, scale=3), normal(5, 150).clamp(min=0).round().int()
    positions = [4, 90, 17, 2000]
    whole = run(logits, requests, [1, 2, 3, 4], positions, counts)
    for order in ([3, 1, 0, 2], [2], [1, 1, 1]):
        chosen = [positions[i] for i in order]
        again = run(logits[order], requests, [i + 1 for i in order], chosen, counts)
        assert all(torch.equal(a[order], b) for a, b in zip(whole, again, strict=True))


@pytest.mark.parametrize("repetition", [1.0, 0.5, 1.8])
@pytest.mark.parametrize(("presence", "frequency"), [(0.0, 0.0), (0.9, 0.0), (-0.4, 0.35)])
def test_penalties(repetition: float, presence: float, frequency: float) -> None:
    """Tokens never seen, generated once and thrice, in the prompt, and both."""
    counts = torch.tensor([0, 1, 3, PROMPT_SEEN, PROMPT_SEEN + 2], dtype=torch.int32)
    seen, output = [0, 1, 1, 1, 1], [0, 1, 3, 0, 2]
    for sign in (1.0, -1.0):
        logits = sign * torch.tensor([1.0, 1.2, 1.4, 1.1, 1.3])
        request = Request(presence=presence, frequency=frequency, repetition=repetition)
        wanted = []
        for token, logit in enumerate(logits.tolist()):
            if seen[token]:
                logit = logit / repetition if logit > 0 else logit * repetition
            wanted.append(logit - frequency * output[token] - presence * (output[token] > 0))
        assert one(logits, request, counts) == wanted.index(max(wanted))
        ints, floats = (lines[1] for lines in table_lines([request])[1:])
        found = reference.process(logits, counts, 4, ints, floats, STOP_IDS, BIAS_IDS)
        torch.testing.assert_close(found, torch.tensor(wanted))


def test_logit_bias_comes_before_the_repetition_penalty() -> None:
    """Token 1 becomes (-1 + 4) / 2 = 1.5, not -1 * 2 + 4 = 2."""
    counts = torch.tensor([0, 2, 0], dtype=torch.int32)
    request = Request(repetition=2.0, bias=((1, 4.0),))
    assert one(torch.tensor([1.4, -1.0, 0.0]), request, counts) == 1
    assert one(torch.tensor([1.6, -1.0, 0.0]), request, counts) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_are_masked_until_min_tokens(temperature: float) -> None:
    logits = torch.tensor([0.0, 50.0, 30.0, 40.0])
    for generated, token in ((0, 2), (4, 2), (5, 1)):
        request = Request(temperature, stops=(1, 3), min_tokens=5, generated=generated)
        assert one(logits, request) == token


def test_ties_go_to_the_lowest_ids() -> None:
    logits = torch.tensor([1.0, 2.0, 2.0, 2.0, 1.0, 2.0])
    found = run(
        logits.repeat(400, 1), [Request(temperature=1.0, top_k=2)], [1] * 400, [*range(400)]
    )
    assert set(found.tokens.tolist()) == {1, 2}
    greedy = run(logits[None], [Request()], [1], [1], top=5)
    assert int(greedy.tokens) == 1 and greedy.top_tokens.tolist() == [[1, 2, 3, 5, 0]]


def test_logprobs_are_normalised_over_the_vocabulary_and_ignore_processing() -> None:
    logits = normal(3, 40, scale=4)
    plain = run(logits, [Request(top=40)], [1] * 3, [1, 2, 3], top=40)
    torch.testing.assert_close(plain.top_logprobs.exp().sum(1), torch.ones(3))
    assert (plain.top_logprobs.diff(dim=1) <= 0).all()
    assert (plain.top_tokens.sort(1).values == torch.arange(40)).all()
    changed = Request(0.7, top_k=3, repetition=1.4, presence=0.5, bias=((7, 3.0),), top=40)
    counts = torch.ones(2, 40, dtype=torch.int32)
    other = run(logits, [changed], [1] * 3, [1, 2, 3], counts, top=40)
    assert torch.equal(other.top_tokens, plain.top_tokens)
    assert torch.equal(other.top_logprobs, plain.top_logprobs)
    for row, token in enumerate(other.tokens.tolist()):
        wanted = logits[row].double().log_softmax(0)[token]
        torch.testing.assert_close(other.logprobs[row].double(), wanted, atol=1e-5, rtol=0)


def test_a_row_gets_as_many_top_logprobs_as_it_wants() -> None:
    logits = normal(4, 40, scale=4)
    requests = [Request(top=wanted) for wanted in (0, 1, 9, -3)]
    found = run(logits, requests, [1, 2, 3, 4], [1] * 4, top=6)
    whole = run(logits, [Request(top=6)] * 4, [1, 2, 3, 4], [1] * 4, top=6)
    for row, count in enumerate((0, 1, 6, 0)):
        for some, every in ((found[2], whole[2]), (found[3], whole[3])):
            assert torch.equal(some[row, :count], every[row, :count])
            assert not some[row, count:].any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 33, 66])
def test_logits_that_are_not_finite_end_their_row_alone(bad: float, where: int) -> None:
    logits = normal(2, 67)
    logits[0, where] = bad
    found = run(logits, [Request(temperature=1.0), Request()], [1, 2], [1, 1])
    assert int(found.tokens[0]) == 0 and found.logprobs[0].isnan()
    assert int(found.tokens[1]) == int(logits[1].argmax()) and found.logprobs[1].isfinite()
    state = run_commit(found, slots=[1, 2])["request_state"]
    assert state[1:3, table.FINISH].tolist() == [Finish.NON_FINITE, Finish.NONE]


def test_a_row_that_does_not_emit_gives_zeros() -> None:
    found = run(torch.full((1, 9), torch.nan), [Request()], [0], [1])
    assert not any(output.any() for output in found)


def run_commit(found: Sampled, slots: list[int], **columns: int) -> dict[str, Tensor]:
    """Commit one-token rows whose requests have generated 4 tokens; `columns` set request_ints."""
    lines, vocab, top = 4, 70, found.top_tokens.shape[1]
    ints = torch.full((lines, table.INT_HEADER + 2), table.INERT_TOKEN, dtype=torch.int32)
    for name, value in columns.items():
        ints[:, table.INT_HEADER if name == "stop" else getattr(table, name)] = value
    pools: dict[str, Any] = {
        "request_state": torch.tensor([STATE], dtype=torch.int32).repeat(lines, 1),
        "token_counts": torch.zeros(lines, vocab, dtype=torch.int32),
        "results_int": torch.zeros(2, 4, table.RESULT_HEADER + 1 + top, dtype=torch.int32),
        "results_float": torch.zeros(2, 4, 1 + top),
        "step_counter": torch.tensor([3, 0, 0, 0]),
        "snapshot_slots": torch.zeros(lines, 1, dtype=torch.int32),
        "snapshot_lengths": torch.zeros(lines, dtype=torch.int32),
    }
    row_slots = torch.tensor(slots, dtype=torch.int32)
    starts = torch.arange(len(slots) + 1, dtype=torch.int32)
    none = torch.zeros(len(slots), 1, dtype=torch.int32)
    step = row_slots, row_slots, starts, row_slots + 9, (row_slots > 0).int(), none, none
    commit(*pools.values(), ints, *found, *step, 1, 0)
    return pools


@pytest.mark.parametrize(
    ("columns", "finish"),
    [
        ({"MAX_TOKENS": 6}, Finish.NONE),
        ({"MAX_TOKENS": 5}, Finish.LENGTH),
        ({"MAX_TOKENS": 6, "stop": 8}, Finish.STOP),
        ({"MAX_TOKENS": 5, "stop": 8}, Finish.STOP),
        ({"MAX_TOKENS": 6, "stop": 9}, Finish.NONE),
    ],
)
def test_finish_reasons_and_results(columns: dict[str, int], finish: Finish) -> None:
    logits = torch.zeros(1, 70)
    logits[0, 8] = 5.0
    found = run(logits, [Request()], [1], [11])
    pools = run_commit(found, [1], **columns)
    assert pools["request_state"].tolist()[1] == [11, 8, 5, finish, *STATE[4:]]
    assert pools["request_state"].tolist()[0] == STATE
    assert pools["token_counts"].nonzero().tolist() == [[1, 8]]
    assert pools["results_int"][1, 0].tolist() == [1, 1, finish, 11, 0, 8, 8, 0, 1]
    floats = torch.cat([found.logprobs, found.top_logprobs[0]])
    assert torch.equal(pools["results_float"][1, 0], floats)
    assert not pools["results_int"][0].any() and int(pools["step_counter"][0]) == 4
