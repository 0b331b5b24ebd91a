"""The twin gate: a compiled program must equal the eager step over several stateful steps.

A small engine's program is its own twin; a large one is proved by the same step code and bucket at
reduced widths; of several ranks it is the first one alone, without what the absent ones would add.
Both sides start each step from the same state, so that a rounding difference in one step does not
become another token in the next. In float32 eager means the ops' references. In
bfloat16 one rounding may choose other experts and everything after it differs: there the program
must equal the same ops called one by one, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from inkling_engine.artifacts.errors import FailedError
from inkling_engine.artifacts.manifest import TensorEntry
from inkling_engine.artifacts.spec import Bucket, EngineSpec
from inkling_engine.compile.driver import Chunk, Machine
from inkling_engine.compile.export import Inputs
from inkling_engine.compile.pools import entry_bytes, pool_entries
from inkling_engine.compile.script import longest, script
from inkling_engine.kernels import table
from inkling_engine.kernels.state import random_weight

SMALL_BYTES = 5 << 28
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.0}
UNCOMPARED = ("request_state", "token_counts", "results_int", "results_float", "exchange")
DEVICE_COLUMNS = [table.LENGTH, table.GENERATED, table.FINISH, table.DRAFTS]

Run = Callable[[list[Tensor]], list[Tensor]]


def is_small(spec: EngineSpec, weights: Sequence[TensorEntry]) -> bool:
    """Whether the engine itself can be proved: weights and two sets of pools take 1.25 GiB."""
    pools = sum(entry_bytes(entry) for entry in pool_entries(spec))
    return sum(entry_bytes(entry) for entry in weights) + 2 * pools <= SMALL_BYTES


def reduced(spec: EngineSpec) -> EngineSpec:
    """The same buckets, layers, ranks and options at small widths of each rank and few pages."""
    shape, tp = spec.shape, spec.tp
    shrink = msgspec.structs.replace
    heads = {"heads": 4 * tp, "kv_heads": 2 * tp, "head_dim": 16}
    kinds = [
        shrink(kind, **heads, window=min(kind.window, 128), extent=128)
        for kind in (shape.full, shape.local)
    ]
    small = shrink(
        shape,
        hidden=64,
        full=kinds[0],
        local=kinds[1],
        dense_width=96 * tp,
        expert_width=32 * tp,
        experts=min(shape.experts, 16),
        vocab=512 * tp,
        real_vocab=512 * tp - 12,
    )
    running = max(bucket.rows for bucket in spec.buckets)
    width = -(-longest(spec) // spec.page_size)
    pools = shrink(
        spec.pools,
        slots=1 + 2 * running,
        snapshots=running,
        table_width=width,
        window_ring=width,
        full_pages=1 + running * width,
        window_pages=1 + running * width,
    )
    vocab = min(spec.draft_vocab, small.real_vocab)
    return shrink(spec, shape=small, max_running=running, pools=pools, draft_vocab=vocab)


def prove(spec: EngineSpec, bucket: Bucket, inputs: Inputs, run: Run) -> None:
    """Compare `run` (inputs in call order -> [logits]) with the eager step.

    Raises `FailedError` naming the first tensor that differs and by how much.
    """
    weights = {entry.name: random_weight(entry, 1) for entry in inputs.weights}
    there = {name: weight.to(spec.device) for name, weight in weights.items()}
    compiled = Machine(spec, there, spec.device)
    eager = Machine(spec, weights) if spec.dtype == "float32" else Machine(spec, there, spec.device)
    for number, chunks in enumerate(script(spec, bucket)):
        eager.guess(chunks)
        for name, pool in eager.pools.items():
            compiled.pools[name].copy_(pool)
        expected_rows, rows = eager.rows(inputs, chunks), compiled.rows(inputs, chunks)
        oracle = eager.eager if spec.dtype == "float32" else eager.native
        expected = oracle(bucket, expected_rows)
        call = [*there.values(), *compiled.pools.values(), *rows.values()]
        (found,) = run(call)
        where = f"step {number + 1}"
        _compare(f"{where} logits", found, expected, spec.dtype)
        for name, pool in eager.pools.items():
            if name not in UNCOMPARED:
                _compare(f"{where} pool {name}", compiled.pools[name], pool, spec.dtype)
        for name, tensor in expected_rows.items():
            _compare(f"{where} row input {name}", rows[name], tensor, spec.dtype)
        state, wanted = (m.pools["request_state"][:, DEVICE_COLUMNS] for m in (compiled, eager))
        _compare(f"{where} pool request_state", state, wanted, spec.dtype)
        _compare_choices(where, eager, compiled, expected, chunks)


def _compare(what: str, found: Tensor, expected: Tensor, dtype: str) -> None:
    found = found.to(expected.device)
    if not expected.is_floating_point():
        difference = 0.0 if torch.equal(found, expected) else float("inf")
    elif expected.numel() == 0:
        return
    else:
        scale = max(1.0, expected.abs().max().item())
        difference = (found.float() - expected.float()).abs().max().item() / scale
    if not difference <= TOLERANCE[dtype]:
        raise FailedError(
            "gate twin", f"{what} off by {difference:.3g}", "equal to the eager step", "report this"
        )


def _compare_choices(
    where: str, eager: Machine, compiled: Machine, logits: Tensor, chunks: Sequence[Chunk]
) -> None:
    """Sampled tokens must agree where a row has a favourite, and in greedy rows wherever the
    reference's own margins are above the tolerance."""
    ints, found = (machine.results(len(chunks))[0].cpu() for machine in (eager, compiled))
    drafts, first = eager.spec.spec_depth, 0
    best = logits.cpu().topk(2).values
    near = (best[:, 0] - best[:, 1]) <= 4 * TOLERANCE[eager.spec.dtype] * best.abs().max()
    for row, chunk in enumerate(chunks):
        samples = 1 + drafts if chunk.guesses else 1
        unclear = chunk.temperature > 0 or bool(near[first : first + samples].any())
        first += samples
        line, wanted = (side[row, : table.RESULT_HEADER + 1 + drafts] for side in (found, ints))
        if (chunk.favourite or not unclear) and not torch.equal(line, wanted):
            raise FailedError(
                "gate twin", f"{where} row {row}: {line.tolist()}", f"{wanted.tolist()}",
                "report this",
            )  # fmt: skip
