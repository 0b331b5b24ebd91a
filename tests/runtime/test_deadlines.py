"""Priorities and deadlines of requests: what is refused, and what is held no longer than needed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from support.fake_spec import build_spec
from support.fake_step import open_engine

from inkling_engine.runtime.errors import UsageError
from inkling_engine.runtime.requests import Request
from inkling_engine.runtime.sampling import SamplingParams

SPEC = build_spec()
LONG = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("deadline", value) for value in (NAN, INFINITY, "1", [1], True)],
        pytest.param("deadline", 10**400, id="deadline-huge"),
        *[("priority", value) for value in (None, "1", NAN, 0.5, True, [1])],
    ],
)
def test_what_has_no_order_is_refused_before_it_is_queued(field: str, value: Any) -> None:
    with open_engine(SPEC) as engine:
        known = engine.submit([5, 6], LONG, priority=-(10**30), deadline=10.0**6)
        with pytest.raises(UsageError) as caught:
            engine.submit([5, 7], LONG, **{field: value})
        assert caught.value.field == field
        assert engine.scheduler.unfinished() == known.sequences
        late = engine.submit([5, 8], LONG, deadline=-1)
        while not (known.finished and late.finished):
            engine.step()
        reasons = [r.completion().choices[0].finish_reason for r in (known, late)]
        assert reasons == ["length", "deadline"]


def test_what_ended_in_time_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    class Traced(Request):
        """A request that can be referred to weakly."""

    monkeypatch.setattr("inkling_engine.runtime.requests.Request", Traced)
    ended: list[weakref.ref[Request]] = []
    with open_engine(build_spec(running=1)) as engine:
        waiting = engine.submit([5, 6], LONG, deadline=3600)
        for _ in range(300):
            request = engine.submit([5], SamplingParams(max_tokens=1), priority=-1, deadline=3000)
            ended.append(weakref.ref(request))
            while not request.finished:
                engine.step()
        del request
        gc.collect()
        assert sum(one() is not None for one in ended) < 100
        engine._deadlines._clock = lambda: INFINITY
        engine.step()
        assert waiting.completion().choices[0].finish_reason == "deadline"
