"""Numbers of a program's collectives, in the order in which it makes them (`kernels/_exchange.py`).

Every program of an engine makes the same ones: the embedding, two boundaries a layer, the candidates and,
of several ranks, the whole logits; each draft depth as many for its block, but never whole logits. What stands behind the commit, which lets the step counter
grow, is numbered back from the next step's first.
"""

from __future__ import annotations

from inkling_engine.artifacts.spec import EngineSpec


class Calls:
    """Hands out (call, calls) to the collectives of one program."""

    def __init__(self, spec: EngineSpec) -> None:
        """A program of `spec` that has made no call."""
        blocks = spec.shape.layers + spec.spec_depth
        self.total = 2 * blocks + 2 * (1 + spec.spec_depth) + (spec.tp > 1)
        self.made = 0
        self._step = 0

    def take(self) -> tuple[int, int]:
        """`call` and `calls` of the next collective."""
        call = self.made + self._step
        self.made += 1
        return call, self.total

    def commit(self) -> None:
        """The step counter has grown."""
        self._step -= self.total
