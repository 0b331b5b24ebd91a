"""One prompt from an engine folder to plain JSON values: what `inkling-engine generate` prints."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from inkling_engine.runtime.debug import check
from inkling_engine.runtime.engine import Engine
from inkling_engine.runtime.requests import Prompt
from inkling_engine.runtime.sampling import SamplingParams
from inkling_engine.runtime.trace import tracing
from inkling_engine.runtime.usage import report

Result = dict[str, Any]


def run_prompt(
    folder: Path, prompt: Prompt, params: SamplingParams, trace: Path | None = None, **load: Any
) -> Result:
    """Load the engine and continue `prompt`: choices, usage and timings."""
    with Engine.load(folder, **load) as engine, tracing(engine, trace):
        start = time.perf_counter()
        done = engine.generate([prompt], params)[0]
        check(engine)
        usage = msgspec.to_builtins(done.usage) | {"total_tokens": done.usage.total_tokens}
        return {
            "engine_id": engine.manifest.engine_id,
            "choices": msgspec.to_builtins(done.choices),
            "usage": usage,
            "timings": _timings(engine, start),
            **report(engine),
            **({"drafts": engine.drafts.report()} if engine.spec.spec_depth else {}),
        }


def stream_prompt(
    folder: Path,
    prompt: Prompt,
    params: SamplingParams,
    write: Callable[[str], None],
    trace: Path | None = None,
    **load: Any,
) -> Result:
    """Load the engine and hand the text of one choice to `write` as it comes."""
    with Engine.load(folder, **load) as engine, tracing(engine, trace):
        start = time.perf_counter()
        reason = None
        for delta in engine.stream(prompt, params):
            write(delta.text)
            reason = delta.finish_reason
        check(engine)
        choice = {"index": 0, "finish_reason": reason}
        return {"choices": [choice], "timings": _timings(engine, start)}


def _timings(engine: Engine, start: float) -> dict[str, float]:
    return {**engine.timings, "generate": time.perf_counter() - start}
