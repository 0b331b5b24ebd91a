"""`Engine`: requests in, tokens out. Load a folder once, then submit and step, or just generate.

One step is: plan, fill the row buffer, replay the bucket, read its lines of the result ring, hand
tokens to their sequences. Sampling, stop ids and budgets live in the replayed program; only what
needs text (stop strings) is decided on the host. On a GPU the next replay is begun before the last
one's results are read (`overlap`). All calls may come from any thread or event loop: a lock keeps
steps, submissions and aborts apart.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
from collections.abc import AsyncIterator, Iterator
from collections.abc import Sequence as ListLike
from contextlib import nullcontext, suppress
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Self

from inkling_engine.runtime.awaited import Worker
from inkling_engine.runtime.collect import Collector
from inkling_engine.runtime.deadlines import Deadlines, check_turn
from inkling_engine.runtime.encode import encode_params
from inkling_engine.runtime.errors import FailedError, UsageError
from inkling_engine.runtime.loader import LoadOptions, load
from inkling_engine.runtime.plan import Flight
from inkling_engine.runtime.requests import (
    Completion,
    Delta,
    Feed,
    Prompt,
    Request,
    open_request,
    pair_prompts,
    read_prompt,
)
from inkling_engine.runtime.sampling import SamplingParams
from inkling_engine.runtime.scheduler import Scheduler
from inkling_engine.runtime.tokens import TextStream

if TYPE_CHECKING:
    from inkling_engine.runtime.binding import Loaded
    from inkling_engine.runtime.replay import Replayer, RunnerFactory


class Engine:
    """An open engine. Close it, or use it as a context manager."""

    def __init__(self, loaded: Loaded, *, prefix_cache: bool = True) -> None:
        """Run on what `loader.load` or `binding.assemble` made."""
        self.manifest, self.spec = loaded.manifest, loaded.manifest.spec
        self.pool, self.tokenizer, self.timings = loaded.pool, loaded.tokenizer, loaded.timings
        self._rows, self._names = loaded.rows, {p.bucket: p.name for p in loaded.manifest.programs}
        self._replayer: Replayer | None = loaded.replayer
        self.scheduler = Scheduler(self.spec, loaded.steps, prefix_cache=prefix_cache)
        self._collector = Collector(loaded.results, self.scheduler, self.tokenizer)
        self.observers, self.finished = self._collector.observers, self._collector.finished
        self.drafts = self._collector.drafts
        self.overlap = loaded.replayer.overlaps and 2 * loaded.steps <= self.spec.pools.results
        self._ahead: Flight | None = None
        self._ids, self._deadlines, self.steps = itertools.count(), Deadlines(), 0
        self._lock, self._worker = threading.Lock(), Worker()
        self._closed: FailedError | None = None

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        random_weights: int | None = None,
        memory: float | None = None,
        programs: RunnerFactory | None = None,
        steps_per_replay: int = 1,
        device_index: int | tuple[int, ...] = 0,
        alone: bool = False,
        prefix_cache: bool = True,
    ) -> Self:
        """Open the engine in `folder`; see `loader.LoadOptions` for the keywords. With
        `prefix_cache`, what requests have in common at their beginnings is computed once.

        Seconds by phase are in `timings`. Raises a UserError that says what to do next.
        """
        options = LoadOptions(
            random_weights=random_weights,
            memory=memory,
            programs=programs,
            steps_per_replay=steps_per_replay,
            device_index=device_index,
            alone=alone,
        )
        return cls(load(Path(folder), options), prefix_cache=prefix_cache)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
    ) -> Request:
        """Queue a prompt (text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...}).

        Lower `priority` numbers go first. What is unfinished `deadline` seconds from now ends with
        reason `deadline`.
        """
        check_turn(priority, deadline)
        request = self._open(prompt, params, priority=priority)
        self._queue([request], deadline)
        return request

    def step(self) -> list[Request]:
        """Run one replay; return the requests that it finished. Without work nothing happens."""
        timed = nullcontext() if self._collector.tokens else self.timings.phase("first token")
        with self._lock, timed:
            if self._closed:
                raise self._closed
            try:
                return self._step()
            except BaseException as error:
                found = f"{type(error).__name__} in a step"
                self._closed = FailedError("engine", found, "an open engine", "load it again")
                raise

    def abort(self, request: Request) -> None:
        """End a request's unfinished choices with reason `abort` and free what they hold."""
        with self._lock:
            if not self._closed:
                self._collector.end(request, "abort")

    def generate(
        self,
        prompts: Prompt | ListLike[Prompt],
        params: SamplingParams | ListLike[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Run prompts to their ends together; completions come in the order of the prompts.

        `params` is one for all or a list of the same length. Nothing runs if one is refused.
        """
        requests = [self._open(*pair) for pair in zip(*pair_prompts(prompts, params), strict=True)]
        self._queue(requests)
        try:
            for request in requests:
                while not request.finished:
                    self.step()
        finally:
            self._abandon(requests)
        return [request.completion() for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Run a prompt, yielding each choice's new tokens and text as they come.

        The deltas of a choice add up to its completion. It is checked at once, and queued when the
        iteration begins; ending that early aborts.
        """
        return self._stream(self._open(prompt, params, streaming=True))

    async def agenerate(self, prompt: Prompt, params: SamplingParams | None = None) -> Completion:
        """`generate` for one prompt, awaited; concurrent calls run together."""
        request = await asyncio.to_thread(self._open, prompt, params)
        async with self._worker.queued(request, self._queue, self._abandon):
            while not request.finished:
                await self._worker.step(self.step)
        return request.completion()

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncIterator[Delta]:
        """`stream`, awaited; concurrent calls run together."""
        request = await asyncio.to_thread(self._open, prompt, params, streaming=True)
        feed = Feed(request)
        async with self._worker.queued(request, self._queue, self._abandon):
            while not feed.exhausted:
                for delta in feed.take():
                    yield delta
                if not request.finished:
                    await self._worker.step(self.step)

    def close(self) -> None:
        """Abort what runs and let go of weights, pools and programs. Twice does no harm."""
        with self._lock:
            if not self._closed:
                for sequence in self.scheduler.unfinished():
                    self._collector.finish(sequence, "abort")
                self._closed = FailedError("engine", "closed", "an open engine", "load it again")
            if self._ahead:
                with suppress(Exception):  # nobody reads these results
                    self._ahead.wait()
            self._rows.clear()
            self.pool.close()
            self._replayer = self._ahead = None

    def __enter__(self) -> Self:
        """The engine itself; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _queue(self, requests: list[Request], deadline: float | None = None) -> None:
        with self._lock:
            if self._closed:
                raise self._closed
            for request in requests:
                self._deadlines.add(request, deadline)
                for sequence in request.sequences:
                    self.scheduler.add(sequence)

    def _open(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        streaming: bool = False,
        priority: int = 0,
    ) -> Request:
        """Check a prompt and make its request, which nothing knows of yet."""
        params = params or SamplingParams()
        ids, seed = read_prompt(prompt, self.tokenizer), secrets.randbits(64)
        request = open_request(next(self._ids), ids, params, self.spec, seed, priority)
        for sequence in request.sequences:
            self.scheduler.holdings.require_fit(sequence)
            encode_params(sequence, self.spec)
            if self.tokenizer and params.detokenize and (streaming or params.stop):
                sequence.stream = TextStream(self.tokenizer, params)
        if params.stop and not self.tokenizer:
            remedy = "use stop_token_ids"
            raise UsageError("stop", params.stop, "none: the engine has no tokenizer", remedy)
        return request

    def _step(self) -> list[Request]:
        """Collect a replay. In `overlap`, the one after it is begun before."""
        late = [r for r in self._deadlines.passed() if self._collector.end(r, "deadline")]
        flight = self._ahead or self._begin()
        if flight is None:
            self.scheduler.check()
            return late
        if self.overlap:
            self._begin()
        flight.wait()
        if self._ahead is flight:
            self._ahead = None
        return late + self._collector.collect(flight.plan, flight.step, flight.began)

    def _begin(self) -> Flight | None:
        """Plan and start the next replay, if there is one: then it is the last not known to be over."""
        if (plan := self.scheduler.next()) is None:
            return None
        assert self._replayer is not None
        name, began = self._names[plan.bucket], perf_counter()
        self._rows[name].fill(plan)
        wait = self._replayer.replay(name, plan.steps)
        flight = self._ahead = Flight(plan, self.steps, began, wait)
        self.scheduler.complete()
        self.steps += plan.steps
        return flight

    def _stream(self, request: Request) -> Iterator[Delta]:
        feed, request.arrived = Feed(request), perf_counter()
        self._queue([request])
        try:
            while not feed.exhausted:
                yield from feed.take()
                if not request.finished:
                    self.step()
        finally:
            self._abandon([request])

    def _abandon(self, requests: list[Request]) -> None:
        for request in requests:
            if not request.finished:
                self.abort(request)
