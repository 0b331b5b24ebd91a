"""Golden inputs: what a build records and `verify` must reproduce (`layout.GOLDEN_FILE`)."""

from __future__ import annotations

import msgspec


class GoldenCase(msgspec.Struct, frozen=True):
    """A prompt, the greedy tokens that follow, and the log-probability of each."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


class Golden(msgspec.Struct, frozen=True):
    """All cases of an engine, and the absolute tolerance of their log-probabilities."""

    cases: list[GoldenCase]
    tolerance: float
