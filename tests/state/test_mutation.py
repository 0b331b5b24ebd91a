"""Every compiled program changes what a step must change, in place, and not one element else.

Memory is full of garbage before each step, so an element that is written is seen to change. Pools,
row inputs and weights keep their addresses, and no step needs memory in the order of a pool.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.programs import Programs
from support.rig import GARBAGE, INERT, WINDOWS, Flow, Model, Rig, Traces, bits
from support.writes import Writes
from torch import Tensor

from inkling_engine.artifacts.layout import program_name
from inkling_engine.artifacts.spec import Bucket
from inkling_engine.compile.driver import Chunk

pytestmark = pytest.mark.usefixtures("native_library")

SIZES = pytest.mark.parametrize("tokens", [1, 8, 64, 256])


def bucket_of(programs: Programs, tokens: int) -> Bucket:
    """The bucket of `tokens`."""
    (bucket,) = (b for b in programs.model.spec.buckets if b.tokens == tokens)
    return bucket


def changes(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    """By name, which elements differ."""
    return {name: bits_of(tensor) != bits_of(before[name]) for name, tensor in after.items()}


def bits_of(tensor: Tensor) -> Tensor:
    """The elements as integers of their size."""
    return tensor if tensor.dtype == torch.int64 else bits(tensor)


def assert_exact(rig: Rig, bucket: Bucket, chunks: Sequence[Chunk]) -> None:
    """Run `chunks`; what changes is what `Writes` predicts, and all stays where it is."""
    rows = rig.rows(bucket, chunks)
    for name, pool in rig.pools.items():
        if name.startswith("results"):
            pool.fill_(GARBAGE if name == "results_int" else torch.nan)
        elif name.startswith(("conv", "kv")):
            pool[:, 0] = torch.nan
    writes = Writes(rig, bucket, chunks, rows)
    tensors = {"pools": rig.pools, "rows": rows, "weights": dict(rig.model.weights)}
    before = {group: {n: t.clone() for n, t in named.items()} for group, named in tensors.items()}
    addresses = [t.data_ptr() for named in tensors.values() for t in named.values()]
    writes.finish(rig.replay(bucket, rows))
    assert addresses == [t.data_ptr() for named in tensors.values() for t in named.values()]
    for name, mask in changes(before["pools"], rig.pools).items():
        extra = mask & ~(writes.must[name] | writes.may[name])
        assert not extra.any(), f"{name} changed at {extra.nonzero()[:3].tolist()}"
        missed = writes.must[name] & ~mask
        assert not missed.any(), f"{name} was not written at {missed.nonzero()[:3].tolist()}"
    for name, mask in changes(before["rows"], rows).items():
        assert torch.equal(mask, writes.rows[name]), f"row input {name}"
        assert not rows[name][mask].any(), f"{name} is cleared by zeros"
    assert not any(
        mask.any() for mask in changes(before["weights"], dict(rig.model.weights)).values()
    )


@SIZES
def test_pools_change_where_they_must_and_nowhere_else(
    programs: Programs, trained_traces: Traces, tokens: int
) -> None:
    """Requests that go on, over a grid boundary and not, one that begins, one from the table."""
    bucket, largest = bucket_of(programs, tokens), bucket_of(programs, 256)
    rig, trace = Rig(programs.model, programs, pages=4), trained_traces(262, at=400, new=6)
    crossing, going, fresh, drawn = (Flow(trace, slot) for slot in (5, 2, 8, 3))
    rig.advance(largest, [(crossing, 255)])
    rig.advance(largest, [(going, 60), (drawn, 190)])
    rig.advance(largest, [(drawn, 72)])
    each = {1: 1, 8: 1, 64: 20, 256: 80}[tokens]
    crossing.snapshots, fresh.snapshots = [12], [10]
    order = [going, None, crossing, drawn, fresh]
    together: list[list[Flow | None]] = [order, [None] * 8]
    for batch in [[flow] for flow in order] if bucket.rows == 1 else together:
        chunks = [flow.take(min(each, flow.left or 1)) if flow else INERT for flow in batch]
        assert_exact(rig, bucket, chunks)
    for flow in (crossing, going, fresh, drawn):
        rig.check_state(flow)


def test_the_eager_step_writes_the_same(small: Model, small_traces: Traces) -> None:
    """Small pages and grid, several boundaries in a chunk, padded tokens, a used slot admitted."""
    rig, trace = Rig(small, pages=4), small_traces(40, at=280, new=10)
    used, going, fresh = Flow(small_traces(9, at=63, new=4), 8), Flow(trace, 2), Flow(trace, 8)
    bucket = Bucket(kind="extend", rows=5, tokens=48)
    rig.advance(bucket, [(used, 9), (going, 7)])
    for name in ("request_state", "request_ints", "token_counts", "snapshot_slots"):
        rig.pools[name][8] = GARBAGE
    for name in WINDOWS:
        rig.pools[name][:, 8] = torch.nan
    rig.pools["request_floats"][8] = torch.nan
    going.snapshots, fresh.snapshots = [12, 0, 9, 16], [10]
    chunks = [fresh.take(5), INERT, going.take(30)]
    assert_exact(rig, bucket, chunks)
    decode = Bucket(kind="decode", rows=4, tokens=4)
    for _ in range(5):
        assert_exact(rig, decode, [INERT, going.take(1), fresh.take(1)])
    assert_exact(rig, decode, [INERT] * 3)
    rig.check_state(going)
    rig.check_state(fresh)


@SIZES
def test_a_program_gets_every_input_at_its_own_address(programs: Programs, tokens: int) -> None:
    """The manifest names each weight of the step, pool and row input once, and none overlaps."""
    bucket, rig = bucket_of(programs, tokens), Rig(programs.model, programs)
    inputs = programs.inputs(bucket, rig.model.weights, rig.pools, rig.rows(bucket, [INERT]))
    assert tuple(inputs) == programs.entries[bucket].inputs
    assert {name for name in inputs if name.startswith("pools.")} == {
        f"pools.{n}" for n in rig.pools
    }
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in inputs.values()
    )
    for (_, end), (start, _) in pairwise(spans):
        assert end <= start


def test_no_program_copies_a_pool(tiny_engine: Path, programs: Programs) -> None:
    """Peak memory of each program in a process of its own, far below the smallest KV pool."""
    path = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "support.peak_memory", str(tiny_engine)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, pools = json.loads(done.stdout), Rig(programs.model).pools
    least = min(pools[name].nbytes for name in ("kv_full", "kv_window"))
    assert found.pop("copied") > 0.9 * least, "a copy would be seen"
    assert set(found) == {program_name(bucket) for bucket in programs.model.spec.buckets}
    for name, grown in found.items():
        assert grown < least / 4, f"{name} needs {grown:,} bytes beside its inputs"
