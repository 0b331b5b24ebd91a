"""Rounds of draft metadata. Everything is an integer: results are equal."""

from inkling_engine.kernels._case_drafts import ROUNDS
from inkling_engine.kernels._cases import Case


def cases() -> list[Case]:
    """Verify and extend steps: short, resumed, finished, unsampled and inert rows, snapshots."""
    return [Case(name, spec.arguments, tolerance=0) for name, spec in ROUNDS.items()]
