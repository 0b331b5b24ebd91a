"""Drafting as the host sees it: how far a sequence is while replays are under way, and what drafts gave.

How many tokens a round gives is known from its results only, and the next replay is planned
before they are there. So a sequence has a least length (each round gives a token) and a `slack` on
top: what may be written has pages, what may still be read is not freed. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inkling_engine.artifacts.spec import EngineSpec
from inkling_engine.kernels.table import SAMPLE
from inkling_engine.runtime.plan import Plan
from inkling_engine.runtime.requests import Sequence, Status

if TYPE_CHECKING:
    from inkling_engine.runtime.holdings import Holdings


def begin_rounds(plan: Plan, holdings: Holdings) -> None:
    """A replay has begun, and lengths have advanced by a token a round."""
    for sequence in _sampling(plan):
        sequence.rounds += plan.steps
        sequence.slack += plan.steps * _drafts(plan, sequence)
        holdings.pass_boundary(sequence)


def end_rounds(plan: Plan, holdings: Holdings) -> None:
    """The results of a replay were handed out: its rounds' tokens are known."""
    for sequence in _sampling(plan):
        if sequence.status is not Status.RUNNING:  # preempted or ended meanwhile
            continue
        sequence.rounds -= plan.steps
        sequence.slack -= plan.steps * _drafts(plan, sequence)
        processed = len(sequence.prompt) + len(sequence.tokens) - 1
        length = min(processed + sequence.rounds, sequence.total - 1)
        assert length >= sequence.length and sequence.rounds >= 0, "a round gives a token"
        sequence.length = length
        if length >= sequence.window_end:
            holdings.free_window(sequence)
        holdings.pass_boundary(sequence)


@dataclass(slots=True)
class DraftStats:
    """Drafts so far, from the rounds that had some; `proposed` and `accepted` are by depth, from
    the first draft on. Drafts behind a sequence's last token are in neither, so `tokens`, what
    these rounds gave, is `rounds` and all that was accepted."""

    rounds: int
    tokens: int
    proposed: list[int]
    accepted: list[int]

    def add(self, drafted: int, tokens: int, *, ended: bool) -> None:
        """Count a round with `drafted` drafts that gave `tokens`; perhaps its sequence `ended`."""
        if not drafted or not tokens:
            return
        self.rounds += 1
        self.tokens += tokens
        for depth in range(tokens - 1 if ended else drafted):
            self.proposed[depth] += 1
        for depth in range(tokens - 1):
            self.accepted[depth] += 1

    @property
    def acceptance_length(self) -> float:
        """Tokens of a round with drafts, on average; 1 without any."""
        return self.tokens / self.rounds if self.rounds else 1.0

    @property
    def rates(self) -> list[float]:
        """By depth, which part of the proposed drafts was accepted, those before it included."""
        pairs = zip(self.accepted, self.proposed, strict=True)
        return [accepted / proposed if proposed else 0.0 for accepted, proposed in pairs]

    def since(self, before: DraftStats) -> DraftStats:
        """What was added to `before`, an earlier copy."""

        def less(now: list[int], then: list[int]) -> list[int]:
            return [a - b for a, b in zip(now, then, strict=True)]

        return DraftStats(
            self.rounds - before.rounds,
            self.tokens - before.tokens,
            less(self.proposed, before.proposed),
            less(self.accepted, before.accepted),
        )

    def copy(self) -> DraftStats:
        """As it is now."""
        return DraftStats(self.rounds, self.tokens, [*self.proposed], [*self.accepted])

    def report(self) -> dict[str, Any]:
        """As plain JSON values; lists are by depth."""
        return {
            "rounds": self.rounds,
            "tokens": self.tokens,
            "acceptance_length": self.acceptance_length,
            "proposed": [*self.proposed],
            "accepted": [*self.accepted],
            "rates": self.rates,
        }

    @classmethod
    def none(cls, depth: int) -> DraftStats:
        """Of an engine that drafts `depth` tokens, before its first round."""
        return cls(0, 0, [0] * depth, [0] * depth)


def render_drafts(report: dict[str, Any]) -> str:
    """What `DraftStats.report` says, in a line for people."""
    rates = " ".join(f"{100 * rate:.0f}" for rate in report["rates"])
    length, rounds = report["acceptance_length"], report["rounds"]
    return f"{length:.2f} tokens a round in {rounds} rounds; accepted by depth, %: {rates}"


def replay_steps(spec: EngineSpec) -> int:
    """The most steps of a replay: its lines fit the result ring and a bucket's page lines, and with
    drafts a row crosses one grid boundary at most."""
    width, tokens = 1 + spec.spec_depth, 2 * spec.page_size
    if spec.spec_depth:
        tokens = min(tokens, spec.snapshot_grid)
    return max(1, min(spec.pools.results, tokens // width))


def _sampling(plan: Plan) -> Iterator[Sequence]:
    return (s for s, flag in zip(plan.sequences, plan.flags, strict=True) if flag & SAMPLE)


def _drafts(plan: Plan, sequence: Sequence) -> int:
    """Drafts that a round of the sequence may accept."""
    return min(plan.bucket.drafts, sequence.drafts)
