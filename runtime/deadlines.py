"""Requests that must end in time, ordered by when; and what a request may be ordered by."""

from __future__ import annotations

import heapq
import sys
import time
from collections.abc import Callable

from inkling_engine.artifacts.errors import UsageError, show
from inkling_engine.runtime.requests import Request

_SPARE = 64  # finished requests that are held before it is worth looking for them
_MOST = sys.float_info.max


def check_turn(priority: object, deadline: object) -> None:
    """Raise UsageError unless requests can be ordered by `priority` and by `deadline`: what compares
    with no other, as NaN, would break the order of those that do."""
    if type(priority) is not int:
        remedy = "give 0, or less for what goes first"
        raise UsageError("priority", show(priority), "an integer", remedy)
    if deadline is None:
        return
    if type(deadline) not in (int, float) or not -_MOST <= deadline <= _MOST:  # type: ignore[operator]
        remedy = "give seconds from now, or None for no deadline"
        raise UsageError("deadline", show(deadline), "a finite number", remedy)


class Deadlines:
    """Deadlines of requests, by a clock that never goes back. Not for several threads at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """None yet; `clock` tells seconds."""
        self._clock, self._heap = clock, list[tuple[float, int, Request]]()
        self._most = _SPARE

    def add(self, request: Request, seconds: float | None) -> None:
        """Note that `request` has `seconds` from now; None is for ever. What has finished meanwhile is
        let go of each time that there is twice as much as was left the last time."""
        if seconds is None:
            return
        if len(self._heap) >= self._most:
            self._heap = [one for one in self._heap if not one[2].finished]
            heapq.heapify(self._heap)
            self._most = 2 * len(self._heap) + _SPARE
        heapq.heappush(self._heap, (self._clock() + seconds, request.id, request))

    def passed(self) -> list[Request]:
        """Take the requests, finished or not, whose time is over."""
        found: list[Request] = []
        while self._heap and self._heap[0][0] <= self._clock():
            found.append(heapq.heappop(self._heap)[2])
        return found
