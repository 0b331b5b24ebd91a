"""Names and paths inside an engine folder: the only place that spells them."""

from __future__ import annotations

from typing import Final

from inkling_engine.artifacts.spec import Bucket, EngineSpec

MANIFEST: Final = "manifest.json"
PROGRAMS: Final = "programs"
WEIGHTS: Final = "weights"
TOKENIZER: Final = "tokenizer"
GOLDEN_FILE: Final = "golden/golden.json"
REPORT: Final = "report"


def program_name(bucket: Bucket) -> str:
    """Fixed-width name of a bucket's program, e.g. `extend-t00512-r0016`."""
    if bucket.kind == "decode":
        return f"decode-r{bucket.rows:04d}"
    if bucket.kind == "extend":
        return f"extend-t{bucket.tokens:05d}-r{bucket.rows:04d}"
    return f"verify-r{bucket.rows:04d}-k{bucket.drafts:02d}"


def program_file(bucket: Bucket) -> str:
    """Relative path of a bucket's program."""
    return f"{PROGRAMS}/{program_name(bucket)}.pt2"


def kernel_library_file() -> str:
    """Relative path of the native CPU kernels."""
    return f"{PROGRAMS}/kernels.so"


def weights_file(rank: int) -> str:
    """Relative path of one rank's weights."""
    return f"{WEIGHTS}/rank{rank}.safetensors"


def engine_id(spec: EngineSpec, digest: str) -> str:
    """Folder name of an engine: what it is for, then the first 8 digits of its digest."""
    dtype = {"float32": "fp32", "bfloat16": "bf16"}[spec.dtype]
    return f"{spec.model}-tp{spec.tp}-{spec.arch}-{dtype}-{digest[:8]}"
