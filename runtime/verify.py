"""Whether an engine folder still does what it did when it was built.

Loading proves the digests and the probe; then the golden inputs, recorded from the eager reference
at build time, must give the same tokens and log-probabilities. Without the weights they were
recorded with, drawn ones can show that answers are finite and do not depend on the neighbours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from inkling_engine.artifacts.compat import Environment, require
from inkling_engine.artifacts.golden import Golden, GoldenCase
from inkling_engine.artifacts.layout import GOLDEN_FILE
from inkling_engine.artifacts.store import open_manifest, verify_files
from inkling_engine.runtime import probe
from inkling_engine.runtime.errors import CorruptError, FailedError
from inkling_engine.runtime.requests import Choice
from inkling_engine.runtime.sampling import SamplingParams

_DRAWN_PROMPTS = 4
_DRAWN_TOKENS = 8
_CLOSE = {"float32": 1e-3, "bfloat16": 0.1}  # logits that rounding may exchange
_REMEDY = "build the engine again; if it fails again, report the engine id and this message"


def verify_engine(
    folder: Path, *, random_weights: int | None = None, **load: Any
) -> dict[str, str]:
    """Check the folder; return what was shown, by check. The first failure raises a UserError."""
    manifest = open_manifest(folder)
    if not manifest.weights and random_weights is None:
        require(manifest, Environment.current())
        verify_files(folder, manifest)
        return {"digests": "ok", "golden": "not run: programs only (attach-weights adds weights)"}
    from inkling_engine.runtime.engine import Engine

    probe.forget(manifest)
    with Engine.load(folder, random_weights=random_weights, **load) as engine:
        if random_weights is not None or load.get("alone"):
            return {"digests": "ok", "drawn": _run_drawn(engine)}
        return {"digests": "ok", "golden": _run_golden(engine, read_golden(folder))}


def read_golden(folder: Path) -> Golden:
    """The golden inputs of a folder."""
    path = folder / GOLDEN_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Golden)
    except (OSError, msgspec.DecodeError) as error:
        raise CorruptError(str(path), str(error), "golden inputs", _REMEDY) from None


def compare(case: GoldenCase, choice: Choice, tolerance: float) -> None:
    """Raise FailedError at the first position where a result is not the recorded one."""
    logprobs = choice.logprobs or ()
    if len(logprobs) < len(case.tokens):
        found = f"{len(logprobs)} tokens, {choice.finish_reason}"
        raise FailedError("golden", found, f"{len(case.tokens)} tokens", _REMEDY)
    recorded = zip(case.tokens, case.logprobs, strict=True)
    for at, ((token, logprob), item) in enumerate(zip(recorded, logprobs, strict=False)):
        if item.token_id != token or not abs(item.logprob - logprob) <= tolerance:
            where = f"golden prompt of {len(case.prompt)} tokens, position {at}"
            found = f"token {item.token_id} with logprob {item.logprob:.6f}"
            expected = f"token {token} with logprob {logprob:.6f} (+-{tolerance:g})"
            raise FailedError(where, found, expected, _REMEDY)


def _run_golden(engine: Any, golden: Golden) -> str:
    cases = [case for case in golden.cases if case.tokens]
    params = [_greedy(len(case.tokens)) for case in cases]
    done = engine.generate([case.prompt for case in cases], params)
    for case, completion in zip(cases, done, strict=True):
        compare(case, completion.choices[0], golden.tolerance)
    return f"ok, {sum(len(case.tokens) for case in cases)} tokens of {len(cases)} prompts"


def _run_drawn(engine: Any) -> str:
    vocab, context = engine.spec.shape.real_vocab, engine.spec.max_context
    lengths = [min(4**i, context - _DRAWN_TOKENS) for i in range(_DRAWN_PROMPTS)]
    prompts = [[(7 + 31 * i) % vocab for i in range(length)] for length in lengths]
    params = _greedy(_DRAWN_TOKENS, logprobs=2)
    together = engine.generate(prompts, params)
    gap = 0.0 if engine.spec.device == "cpu" else _CLOSE[engine.spec.dtype]
    for prompt, completion in zip(prompts, together, strict=True):
        (alone,), (found,) = engine.generate(prompt, params)[0].choices, completion.choices
        if found.finish_reason == "error" or not _same(found, alone, gap):
            where = f"prompt of {len(prompt)} tokens"
            text = f"{found.finish_reason}, other tokens than alone"
            raise FailedError(where, text, "finite and equal answers", _REMEDY)
    return f"ok, {len(prompts)} prompts, finite and the same alone and together"


def _same(found: Choice, alone: Choice, gap: float) -> bool:
    """Whether tokens agree up to the first whose two best, alone, are less than `gap` apart:
    on a GPU programs of different buckets round differently."""
    pairs = zip(found.token_ids, alone.token_ids, alone.logprobs or (), strict=True)
    top = next((item.top for a, b, item in pairs if a != b), None)
    return top is None or top[0][1] - top[1][1] < gap


def _greedy(count: int, logprobs: int = 0) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, logprobs=logprobs, detokenize=False
    )
