"""Requests that must end in time, ordered by when."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable

from inkling_engine.runtime.requests import Request


class Deadlines:
    """Deadlines of requests, by a clock that never goes back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """None yet; `clock` tells seconds."""
        self._clock, self._heap = clock, list[tuple[float, int, Request]]()

    def add(self, request: Request, seconds: float | None) -> None:
        """Note that `request` has `seconds` from now; None is for ever."""
        if seconds is not None:
            heapq.heappush(self._heap, (self._clock() + seconds, request.id, request))

    def passed(self) -> list[Request]:
        """Take the requests, finished or not, whose time is over."""
        found: list[Request] = []
        while self._heap and self._heap[0][0] <= self._clock():
            found.append(heapq.heappop(self._heap)[2])
        return found
