"""The scripted steps of the twin gate: uneven chunks over all rows of a bucket but one.

Where the engine drafts, each row but the first has a favourite token that its logit bias makes the
outcome of every draw, so a script knows how many of the guesses that it plants are right; the first
row draws freely and has a forced number of guesses accepted. Every other row begins just before a
snapshot boundary.
"""

from __future__ import annotations

import torch

from inkling_engine.artifacts.spec import Bucket, EngineSpec
from inkling_engine.compile.driver import Chunk, Guesses
from inkling_engine.compile.pools import destinations

STEPS = 3
FARTHEST = 1024  # tokens before the boundary that rows begin at
FAVOURITES = 8  # ids from 1 on, one a row


def script(spec: EngineSpec, bucket: Bucket) -> list[list[Chunk]]:
    """The chunks of each step, with snapshots; some row goes on from its own token."""
    rows = row_count(spec, bucket)
    lengths = [_begin(spec, bucket, i) for i in range(rows)]
    generator = torch.Generator().manual_seed(0)
    steps = []
    for number in range(STEPS):
        chunks = []
        for i in range(rows):
            count = max(1, share(spec, bucket, rows) * (i + 1) // rows)
            follow = number > 0 and (bucket.kind != "extend" or i == rows - 1)
            count = count if bucket.kind == "extend" else 1
            ids = torch.randint(0, spec.shape.real_vocab, (count,), generator=generator).tolist()
            chunk = Chunk(
                slot=1 + i,
                start=lengths[i],
                tokens=() if follow else ids,
                admit=number == 0,
                sample=number > 0 or bucket.kind != "extend" or i == rows - 1,
                temperature=0.8 if i == 1 else 0.0,
                snapshots=_snapshots(spec, bucket, i, rows),
                guesses=_guesses(spec, bucket, i, number, lengths[i]) if follow else None,
                **_drafting(spec, i),
            )
            lengths[i] += chunk.count + (chunk.guesses.right if chunk.guesses else 0)
            chunks.append(chunk)
        steps.append(chunks)
    return steps


def row_count(spec: EngineSpec, bucket: Bucket) -> int:
    """Rows that the script fills."""
    return max(1, min(bucket.rows - 1, spec.max_running))


def share(spec: EngineSpec, bucket: Bucket, rows: int) -> int:
    """Most tokens that the script gives to one row: all steps together stay in the context."""
    if bucket.kind != "extend":
        return 1 + bucket.drafts
    return min(bucket.tokens // rows, spec.max_context // STEPS)


def longest(spec: EngineSpec) -> int:
    """Most tokens of one row after all steps, drafts beyond its end included."""
    steps = [
        _begin(spec, bucket, 1) + STEPS * share(spec, bucket, row_count(spec, bucket))
        for bucket in spec.buckets
    ]
    return max(steps) + spec.spec_depth


def _begin(spec: EngineSpec, bucket: Bucket, row: int) -> int:
    """Where a row begins: 0, or where a verify step crosses the grid, if the context reaches there."""
    begin = spec.snapshot_grid - 2
    end = begin + STEPS * (1 + bucket.drafts)
    reachable = 0 < begin <= FARTHEST and end <= spec.max_context
    return begin if bucket.drafts and row % 2 and reachable else 0


def _snapshots(spec: EngineSpec, bucket: Bucket, row: int, rows: int) -> tuple[int, ...]:
    first = 1 + spec.max_running
    slots = range(first + row, first + spec.pools.snapshots, rows)
    return tuple(slots)[: destinations(spec, bucket)]


def _favourite(row: int) -> int:
    return 1 + row % FAVOURITES


def _drafting(spec: EngineSpec, row: int) -> dict[str, int]:
    """The first row has half of its guesses accepted whatever they are, the others a favourite."""
    if not spec.spec_depth:
        return {}
    return {"favourite": _favourite(row)} if row else {"accept": 1 + (1 + spec.spec_depth) // 2}


def _guesses(
    spec: EngineSpec, bucket: Bucket, row: int, number: int, length: int
) -> Guesses | None:
    """Right ones of a number that changes with row and step, then wrong ones."""
    drafts = bucket.drafts
    if not drafts:
        return None
    left = spec.max_context - length - 1
    if not row:
        return Guesses((), min((1 + drafts) // 2, left))
    right, token = min((row + number) % (1 + drafts), left), _favourite(row)
    return Guesses((token,) * right + (token + FAVOURITES,) * (drafts - right), right)
