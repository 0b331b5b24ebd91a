"""Golden inputs: short greedy continuations recorded from the eager reference.

`verify` must reproduce their tokens and log-probabilities. A continuation ends before the first
position whose two best logits are so close that rounding alone could exchange them. An engine that
drafts must give what the same engine without drafting gives: that is what is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor

from inkling_engine.artifacts.golden import Golden, GoldenCase
from inkling_engine.artifacts.spec import Bucket, EngineSpec, StepKind
from inkling_engine.compile.driver import Chunk, Machine
from inkling_engine.compile.export import program_inputs
from inkling_engine.compile.tokenizer import golden_texts
from inkling_engine.kernels import table

NEW_TOKENS = 8
MARGIN = {"float32": 1e-3, "bfloat16": 0.25}
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


def record(spec: EngineSpec, weights: Path | None, tokenizer: Path | None) -> bytes:
    """Golden JSON of the one-rank engine whose weight file is `weights`; no cases without it."""
    cases = []
    if weights is not None:
        with safe_open(weights, framework="pt") as tensors:
            loaded = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
        plain = msgspec.structs.replace(spec, spec_depth=0)
        cases = [_record_case(plain, loaded, prompt) for prompt in _prompts(spec, tokenizer)]
    return msgspec.json.encode(Golden(cases=cases, tolerance=TOLERANCE[spec.dtype]))


def _prompts(spec: EngineSpec, tokenizer: Path | None) -> list[list[int]]:
    longest = max(1, spec.max_context - NEW_TOKENS)
    if tokenizer is not None and tokenizer.exists():
        return [ids[:longest] for ids in golden_texts(tokenizer)]
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, spec.shape.real_vocab, (min(n, longest),), generator=generator).tolist()
        for n in (3, 40)
    ]


def _record_case(
    spec: EngineSpec, weights: Mapping[str, Tensor], prompt: Sequence[int]
) -> GoldenCase:
    """The prompt is fed in chunks as an engine would: a ring of window pages holds no longer one."""
    machine, size = Machine(spec, weights), spec.longest_chunk
    starts = range(0, len(prompt), size)
    chunks = [Chunk(1, i, prompt[i : i + size], i == 0, i == starts[-1]) for i in starts]
    for chunk in chunks[:-1]:
        _logits(machine, chunk)
    chunk = chunks[-1]
    tokens: list[int] = []
    logprobs: list[float] = []
    while len(tokens) < min(NEW_TOKENS, spec.max_context - len(prompt)):
        best = _logits(machine, chunk).topk(2).values
        if best[0] - best[1] < MARGIN[spec.dtype]:
            break
        ints, floats = machine.results(1)
        tokens.append(int(ints[0, table.RESULT_HEADER]))
        logprobs.append(float(floats[0, 0]))
        chunk = Chunk(slot=1, start=chunk.start + chunk.count)
    return GoldenCase(list(prompt), tokens, logprobs)


def _logits(machine: Machine, chunk: Chunk) -> Tensor:
    """Process one row alone with the references; logits [real vocabulary] after it."""
    kind: StepKind = "extend" if chunk.tokens else "decode"
    bucket = Bucket(kind=kind, rows=1, tokens=chunk.count)
    rows = machine.rows(program_inputs(machine.spec, bucket, ()), [chunk])
    return machine.eager(bucket, rows)[0]
