"""`INKLING_ENGINE_DEBUG=1`: what is too slow, or too careful, for every day.

Every replay first checks that no input has moved, and a load probes the folder again even if it
remembers that it did.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from inkling_engine.runtime.replay import Replayer


def active() -> bool:
    """Whether the environment asks for it."""
    return os.environ.get("INKLING_ENGINE_DEBUG", "0") not in ("", "0")


def address_check(inputs: Mapping[str, list[Tensor]]) -> Callable[[], None]:
    """What asserts that no input of any program has moved since this call."""
    addresses = {name: [t.data_ptr() for t in tensors] for name, tensors in inputs.items()}

    def check() -> None:
        for name, tensors in inputs.items():
            found = [tensor.data_ptr() for tensor in tensors]
            assert found == addresses[name], f"an input of {name} moved after it was bound"

    return check


class Checked:
    """A replayer that calls `check` before each replay."""

    def __init__(self, replayer: Replayer, check: Callable[[], None]) -> None:
        """Stand in front of `replayer`."""
        self._replayer, self._check, self.overlaps = replayer, check, replayer.overlaps

    def replay(self, name: str, steps: int) -> Callable[[], None]:
        """Check, then replay."""
        self._check()
        return self._replayer.replay(name, steps)
