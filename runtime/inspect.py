"""What a folder holds, read from its manifest alone: no torch, no program is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from inkling_engine.artifacts.layout import PROGRAMS, WEIGHTS, weights_file
from inkling_engine.artifacts.manifest import Manifest
from inkling_engine.artifacts.spec import Bucket
from inkling_engine.artifacts.store import open_manifest, verify_manifest
from inkling_engine.runtime.usage import planned, total_bytes


def describe(folder: Path) -> dict[str, Any]:
    """The facts of the engine in `folder` as plain JSON values."""
    manifest = open_manifest(folder)
    verify_manifest(folder, manifest)
    sizes = {entry.path: entry.size for entry in manifest.files}
    needs = planned(manifest)
    programs = [
        {
            "name": program.name,
            "bucket": msgspec.to_builtins(program.bucket),
            "bytes": sizes.get(program.file, 0),
            "proof": program.proof,
        }
        for program in manifest.programs
    ]
    return {
        "engine_id": manifest.engine_id,
        "created": manifest.created,
        "source": manifest.source,
        "spec": msgspec.to_builtins(manifest.spec),
        "environment": msgspec.to_builtins(manifest.environment),
        "programs": programs,
        "weights": [msgspec.to_builtins(entry) for entry in manifest.weights],
        "pools": {entry.name: total_bytes([entry]) for entry in manifest.pools},
        "ranks": [
            {"file": sizes.get(weights_file(rank), 0), **needs} for rank in range(manifest.spec.tp)
        ],
        "bytes": _totals(manifest, sizes) | {"pools": needs["pools"]},
    }


def render(facts: dict[str, Any]) -> str:
    """The same facts for people, one subject a line."""
    spec, built, sizes = facts["spec"], facts["environment"], facts["bytes"]
    shape = spec["shape"]
    buckets = [msgspec.convert(program["bucket"], Bucket) for program in facts["programs"]]
    depth = spec["spec_depth"]
    decodes = " ".join(str(b.rows) for b in buckets if b.kind != "extend")
    drafting = f"verify {depth} drafts, rows" if depth else "decode rows"
    extends = " ".join(f"{b.tokens}x{b.rows}" for b in buckets if b.kind == "extend")
    weights = _size(sizes["weights"]) if facts["weights"] else "none (programs only)"
    proofs = ", ".join(sorted({program["proof"] for program in facts["programs"]}))
    lines = {
        "engine": facts["engine_id"],
        "model": f"{spec['model']}: {shape['layers']} layers, hidden {shape['hidden']}, "
        f"vocabulary {shape['real_vocab']}",
        "source": facts["source"],
        "target": f"{spec['device']} {spec['arch']}, {spec['dtype']}, tp {spec['tp']}, "
        f"{spec['threads']} thread(s)",
        "limits": f"context {spec['max_context']}, {spec['max_running']} running, "
        f"page {spec['page_size']}",
        "programs": f"{len(buckets)}: {drafting} {decodes}; extend tokens x rows {extends}",
        "proof": proofs,
        "built": f"{facts['created']}, torch {built['torch']}, {built['machine']}, "
        f"engine {built['engine']}",
        "disk": f"programs {_size(sizes['programs'])}, weights {weights}, "
        f"other {_size(sizes['other'])}",
        "memory": _memory(facts),
    }
    return "\n".join(f"{name:<9} {text}" for name, text in lines.items())


def _memory(facts: dict[str, Any]) -> str:
    """What a rank takes, with or without weights in the folder."""
    first, *others = facts["ranks"]
    rank = f"each of {1 + len(others)} ranks: " if others else ""
    return f"{rank}state {_size(first['pools'])}, weights {_size(first['weights'])}"


def _totals(manifest: Manifest, sizes: dict[str, int]) -> dict[str, int]:
    totals = {"programs": 0, "weights": 0, "other": 0}
    for path, size in sizes.items():
        room = path.split("/", 1)[0]
        totals[room if room in (PROGRAMS, WEIGHTS) else "other"] += size
    return totals


def _size(count: int) -> str:
    """A byte count with three digits or so."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"
