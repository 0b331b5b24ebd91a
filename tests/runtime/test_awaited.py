"""Awaited calls and streams: from several event loops, cancelled anywhere, begun or not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

import pytest
from support.fake_spec import build_spec
from support.fake_step import open_engine, run_oracle

from inkling_engine.runtime.engine import Engine
from inkling_engine.runtime.errors import FailedError, UsageError
from inkling_engine.runtime.requests import Completion
from inkling_engine.runtime.sampling import SamplingParams

SPEC = build_spec()
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = [40, 41, 42]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with open_engine(SPEC) as one:
        yield one
        assert not one.scheduler.unfinished(), "nothing is queued that nobody listens to"
        assert [c.choices[0].finish_reason for c in one.generate([PROMPT], GREEDY)] == ["length"]


def _tokens(completion: Completion) -> list[int]:
    return list(completion.choices[0].token_ids)


def _held_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Let each step say that it runs, and wait to be let go on: two events."""
    runs, goes_on, step = threading.Event(), threading.Event(), engine.step

    def held() -> Any:
        runs.set()
        assert goes_on.wait(30)
        return step()

    monkeypatch.setattr(engine, "step", held)
    return runs, goes_on


def test_event_loops_of_several_threads_share_an_engine(engine: Engine) -> None:
    async def ask(first: int) -> list[Completion]:
        prompts = [[first + i, 41] for i in range(3)]
        return [one for p in prompts for one in [await engine.agenerate(p, GREEDY)]]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda first: asyncio.run(ask(first)), range(20, 60, 5)))
    for completion in (one for part in found for one in part):
        prompt = list(completion.prompt_token_ids)
        assert _tokens(completion) == run_oracle(SPEC, prompt, GREEDY)[0]


def test_a_loop_that_closes_in_a_step_leaves_the_next_one_its_own(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, goes_on = _held_steps(engine, monkeypatch)
    loop = asyncio.new_event_loop()
    left = loop.create_task(engine.agenerate(PROMPT, GREEDY))

    async def until_it_runs() -> None:
        assert await asyncio.to_thread(runs.wait, 30)

    loop.run_until_complete(until_it_runs())
    left.cancel()
    loop.run_until_complete(asyncio.sleep(0))  # now it waits for its request to be given up
    loop.close()
    goes_on.set()
    assert _tokens(asyncio.run(engine.agenerate(PROMPT, GREEDY)))
    del left


def _is_cancelled(call: Coroutine[Any, Any, Any], pauses: int) -> bool:
    """Whether `call`, cancelled after so many turns of the loop, ends as cancelled."""

    async def run() -> bool:
        task = asyncio.create_task(call)
        for _ in range(pauses):
            await asyncio.sleep(0)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return True
        return False

    return asyncio.run(run())


async def _first(engine: Engine) -> object:
    async for delta in engine.astream(PROMPT, GREEDY):
        return delta
    return None


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_cancelled_anywhere_leaves_nothing(engine: Engine, streamed: bool) -> None:
    for pauses in range(8):
        call = _first(engine) if streamed else engine.agenerate(PROMPT, GREEDY)
        assert _is_cancelled(call, pauses)


def test_a_call_cancelled_while_it_is_queued_leaves_nothing(engine: Engine) -> None:
    """The queue's lock is held until the call was cancelled."""

    async def run() -> None:
        call = asyncio.create_task(engine.agenerate(PROMPT, GREEDY))
        with engine._lock:
            await asyncio.sleep(0.05)
            call.cancel()
            await asyncio.sleep(0.05)
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(run())


def test_a_stream_that_was_never_begun_leaves_nothing(engine: Engine) -> None:
    closed = engine.stream(PROMPT, GREEDY)
    closed.close()  # type: ignore[attr-defined]
    dropped = engine.stream(PROMPT, GREEDY)
    del dropped
    assert not engine.scheduler.unfinished()
    with pytest.raises(UsageError, match="prompt"):
        engine.stream([])


def test_a_stream_arrives_when_it_begins(engine: Engine) -> None:
    """What its first token took is counted from there."""
    stream, made = engine.stream(PROMPT, GREEDY), perf_counter()
    assert next(stream)
    (sequence,) = engine.scheduler.unfinished()
    assert sequence.request.arrived > made
    stream.close()  # type: ignore[attr-defined]


def test_a_closed_engine_says_so_to_those_that_await() -> None:
    engine = open_engine(SPEC)
    engine.close()
    with pytest.raises(FailedError, match="closed"):
        asyncio.run(engine.agenerate(PROMPT))
    with pytest.raises(FailedError, match="closed"):
        asyncio.run(_first(engine))
    with pytest.raises(FailedError, match="closed"):
        next(engine.stream(PROMPT))
