"""Run as a program with an engine folder: how far each program's step raises the peak memory.

Prints one JSON object: bytes by program, and under `copied` those of a step that copies a pool.
The peak of a process never falls, so ballast first lifts the resident size to the old peak.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from support.programs import Programs
from support.rig import Rig
from torch import Tensor

from inkling_engine.artifacts.layout import program_name
from inkling_engine.compile.driver import Chunk


def peak() -> int:
    """Highest resident size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident() -> int:
    """Resident size of this process now, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def growth(run: Callable[[], object]) -> int:
    """By how much `run` raises the peak, in bytes."""
    ballast: list[Tensor] = []
    while (gap := peak() - resident()) > 1 << 16:
        ballast.append(torch.ones(gap, dtype=torch.uint8))
    before = peak()
    run()
    return peak() - before


def measure(folder: Path) -> dict[str, int]:
    """Growth by program, each with as many tokens as it holds; `copied` is the control."""
    programs = Programs(folder)
    rig, found = Rig(programs.model, programs), {}
    for bucket in programs.model.spec.buckets:
        each = bucket.tokens // bucket.rows
        chunks = [Chunk(1 + i, 0, [1 + i] * each, admit=True) for i in range(bucket.rows)]
        rows = rig.rows(bucket, chunks)
        found[program_name(bucket)] = growth(lambda b=bucket, r=rows: rig.replay(b, r))  # type: ignore[misc]
    found["copied"] = growth(lambda: rig.pools["kv_window"].clone())
    return found


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
