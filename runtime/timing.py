"""Where the time of a load goes, by phase."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

log = logging.getLogger("inkling_engine.load")


class Timings(dict[str, float]):
    """Seconds by phase, in the order in which phases began."""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to phase `name`."""
        self.setdefault(name, 0.0)
        start = time.perf_counter()
        try:
            yield
        finally:
            self[name] += time.perf_counter() - start
            log.debug("%s: %.3f s", name, self[name])
