#!/usr/bin/env python3
"""One batch job on a Ray cluster: `inkling-engine batch` for many shard files, several engines.

    split -n l/16 --additional-suffix=.jsonl in.jsonl shards/
    scripts/ray_batch.py ENGINE shards/*.jsonl --outputs done --actors 4 --gpus 1
    cat done/*.jsonl > out.jsonl

Engine, shards and outputs must lie where every node of the cluster sees them. Running the same
command again goes on where an interrupted job has ended. Needs the extra `ray`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from inkling_engine.artifacts.errors import UserError
from inkling_engine.runtime.ray_batch import run_shards


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", metavar="ENGINE", type=Path, help="engine folder")
    parser.add_argument("shards", metavar="SHARD", type=Path, nargs="+", help="input file")
    parser.add_argument("--outputs", type=Path, required=True, help="folder of the output files")
    parser.add_argument("--actors", type=int, default=1, help="engines at a time (default 1)")
    parser.add_argument("--cpus", type=float, default=1, help="CPUs of an engine (default 1)")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of an engine (default 0)")
    parser.add_argument("--steps-per-replay", type=int, help="as for `inkling-engine batch`")
    parser.add_argument("--random-weights", metavar="SEED", type=int, help="as there")
    return parser.parse_args()


def main() -> int:
    """Run the job; one JSON line a shard on stdout."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    given = vars(arguments())
    names = ("steps_per_replay", "random_weights")
    load: dict[str, Any] = {name: given.pop(name) for name in names if given[name] is not None}
    given = {name: value for name, value in given.items() if name not in names}
    try:
        rows = run_shards(**given, load=load)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for row in rows:
        print(json.dumps({**row, "summary": json.loads(row["summary"])}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
