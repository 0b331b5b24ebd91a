"""What rounds emit follows the target's distribution, whatever the drafts are."""

from __future__ import annotations

import pytest
import torch
from support.rounds import VOCAB, Batch, Draw
from torch import Tensor

from inkling_engine.kernels import table
from inkling_engine.kernels._cases import normal

pytestmark = pytest.mark.usefixtures("native_library")

ROWS, DRAFTS, DRAWS = 256, 3, 200_000
LIMIT = 45.0  # of chi-square with 12 degrees of freedom: exceeded once in 100,000 times


def target(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Probabilities [V] after temperature and top-p."""
    kept = (logits.double() / temperature).softmax(0)
    order = kept.argsort(descending=True)
    before = kept[order].cumsum(0) - kept[order]
    kept[order[before >= top_p]] = 0
    return kept / kept.sum()


def emitted(
    logits: Tensor, temperature: float, top_p: float, force: int = 0
) -> tuple[Tensor, float]:
    """How often each token was emitted in DRAWS, and the share of drafts that were accepted. Half of
    the drafts are likely tokens, half are any."""
    floats = (temperature, top_p, 0.0, 0.0, 0.0, 1.0)
    draws = [
        Draw(seed=seed, floats=floats, top=0, max_tokens=1 << 30, force=force)
        for seed in range(ROWS)
    ]
    batch, generator = Batch(draws, DRAFTS, grid=64), torch.Generator().manual_seed(0)
    batch.tables["snapshot_slots"].zero_()
    likely = logits.softmax(0).expand(ROWS, VOCAB)
    counts, rounds = torch.zeros(VOCAB, dtype=torch.int64), 0
    while counts.sum() < DRAWS:
        guesses = batch.tables["draft_tokens"][1:]
        guesses.copy_(likely.multinomial(DRAFTS, replacement=True, generator=generator))
        guesses[::2].random_(0, VOCAB, generator=generator)
        batch.tables["request_state"][1:, table.DRAFTS] = DRAFTS
        meta = batch.metadata(DRAFTS)
        batch.finish(meta, logits.expand(len(meta.emits), VOCAB).contiguous(), DRAFTS)
        line = (int(batch.tables["step_counter"][0]) - 1) % 2
        results = batch.tables["results_int"][line, 1:]
        tokens = results[:, table.RESULT_HEADER : table.RESULT_HEADER + 1 + DRAFTS]
        here = torch.arange(1 + DRAFTS) < results[:, table.RESULT_COUNT, None]
        counts += tokens[here].bincount(minlength=VOCAB)
        rounds += 1
    return counts, (int(counts.sum()) / (rounds * ROWS) - 1) / DRAFTS


def chi_square(counts: Tensor, wanted: Tensor) -> float:
    """The statistic over tokens that may occur; infinite if another one did."""
    possible = wanted > 0
    if counts[~possible].any():
        return float("inf")
    expected = wanted[possible] * counts.sum()
    return float(((counts[possible] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.3, 0.8)])
def test_rounds_follow_the_targets_distribution(temperature: float, top_p: float) -> None:
    logits = normal(VOCAB, scale=1.2, seed=5)
    counts, accepted = emitted(logits, temperature, top_p)
    assert accepted > 0.05
    assert chi_square(counts, target(logits, temperature, top_p)) < LIMIT


def test_drafts_accepted_by_force_do_not() -> None:
    logits = normal(VOCAB, scale=1.2, seed=5)
    counts, accepted = emitted(logits, 1.0, 1.0, force=1 + DRAFTS + 16 * DRAFTS)
    assert accepted == 1
    assert chi_square(counts, target(logits, 1.0, 1.0)) > 100 * LIMIT
