"""What the engine asks of whatever runs its steps, and how anything that runs one step answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from inkling_engine.artifacts.manifest import Manifest


class Runner(Protocol):
    """Whatever runs the step of a bucket over the inputs that it was made with."""

    def run(self, name: str) -> None:
        """Run program `name` once, to completion."""


@runtime_checkable
class Replayer(Protocol):
    """What the engine asks for replays. They follow one another in the order of the calls."""

    overlaps: bool  # whether `replay` returns before the replay has ended

    def replay(self, name: str, steps: int) -> Callable[[], None]:
        """Begin `steps` steps of program `name`; what is returned waits for their results."""


RunnerFactory = Callable[[Manifest, Mapping[str, list[Tensor]]], Runner | Replayer]


class Loop:
    """Any runner as a replayer: a replay is so many plain calls."""

    overlaps = False

    def __init__(self, runner: Runner) -> None:
        """Replay with `runner`."""
        self.runner = runner

    def replay(self, name: str, steps: int) -> Callable[[], None]:
        """Run program `name` `steps` times; it has completed when this returns."""
        for _ in range(steps):
            self.runner.run(name)
        return _nothing


def _nothing() -> None:
    """Wait for what has completed already."""
