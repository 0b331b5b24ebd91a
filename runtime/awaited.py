"""The awaited side of an engine: one thread that does its work for whoever awaits it.

Calls may come from any event loop, of any thread: what they share is a future of that one thread,
which belongs to no loop. Its work is done in the order in which it was asked for, so that a request is
queued before it is given up, however early the call was cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager

from inkling_engine.runtime.requests import Request

Work = Callable[[list[Request]], None]


class Worker:
    """A thread beside the event loops, started by the first call."""

    def __init__(self) -> None:
        """No thread yet; it ends with this."""
        self._thread = ThreadPoolExecutor(1, "inkling-engine")
        self._shared: Future[object] | None = None

    @asynccontextmanager
    async def queued(self, request: Request, queue: Work, abandon: Work) -> AsyncIterator[None]:
        """Queue `request` for the block; what is unfinished at its end, or if it is never entered,
        is given up."""
        try:
            await _wait(self._thread.submit(queue, [request]))
            yield
        finally:
            if not request.finished:
                await _wait(self._thread.submit(abandon, [request]))

    async def step(self, step: Callable[[], object]) -> None:
        """Wait for a step, which all that wait share."""
        if self._shared is None or self._shared.done():
            self._shared = self._thread.submit(step)
        await _wait(self._shared)


async def _wait(work: Future[object] | Future[None]) -> None:
    """Wait for work that goes on if the waiting is cancelled."""
    await asyncio.shield(asyncio.wrap_future(work))
