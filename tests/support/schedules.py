"""Random batches of a rig's flows, and buckets that hold them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from support.rig import Flow, Rig

from inkling_engine.artifacts.spec import Bucket, EngineSpec

MOST_ROWS = 8
Batch = list[tuple[Flow, int] | None]


def draw_batch(flows: Sequence[Flow], most: int, choose: random.Random) -> Batch:
    """At most 8 rows and `most` tokens over some of `flows`, in any order, inert rows (None) among
    them."""
    batch: Batch = []
    for flow in choose.sample(flows, choose.randint(1, min(MOST_ROWS, len(flows)))):
        room = most - count_tokens(batch)
        if room and not flow.done:
            batch.append((flow, choose.randint(1, min(flow.left or 1, room))))
    for _ in range(choose.choice((0, 0, 1, 2))):
        if len(batch) < MOST_ROWS and count_tokens(batch) < most:
            batch.insert(choose.randint(0, len(batch)), None)
    return batch


def draw_bucket(batch: Batch, choose: random.Random) -> Bucket:
    """A bucket of any size that holds `batch`; a batch of single tokens may be a decode."""
    tokens, rows = count_tokens(batch), len(batch)
    more = choose.randint(0, MOST_ROWS - rows)
    if tokens == rows and choose.random() < 0.5:
        return Bucket(kind="decode", rows=rows + more, tokens=rows + more)
    return Bucket(kind="extend", rows=rows + more, tokens=tokens + more + choose.randint(0, 5))


def fit(spec: EngineSpec, batch: Batch) -> list[Bucket]:
    """The engine's own buckets that hold `batch`, in the spec's order."""
    tokens, rows = count_tokens(batch), len(batch)
    return [
        bucket
        for bucket in spec.buckets
        if bucket.tokens >= tokens
        and bucket.rows >= rows
        and (bucket.kind == "extend" or tokens == rows)
    ]


def run_to_the_end(rig: Rig, flows: Sequence[Flow], choose: random.Random, *, own: bool) -> None:
    """Run all flows in random batches; buckets are the engine's `own`, or of any size."""
    spec = rig.model.spec
    most = max(bucket.tokens for bucket in spec.buckets)
    while not all(flow.done for flow in flows):
        batch = draw_batch(flows, most, choose)
        if any(batch):
            bucket = choose.choice(fit(spec, batch)) if own else draw_bucket(batch, choose)
            rig.advance(bucket, batch)


def count_tokens(batch: Batch) -> int:
    """Tokens of a batch, as the host packs them: an inert row has one."""
    return sum(pair[1] if pair else 1 for pair in batch)
