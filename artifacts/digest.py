"""Canonical JSON and the digests built on it: the identity of engines, manifests and files.

Canonical JSON has sorted keys and no spaces, and every field of a struct is written, defaults
included: adding a field changes the digest. A struct is decoded once on the way, so that a value
has one form (8 in a float field is 8.0) and digests of a value and of its stored copy agree.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from inkling_engine.artifacts.spec import EngineSpec, Frozen


class Identity(Frozen):
    """All that changes the bytes of an engine's programs, as one value.

    `op_schemas` are full schemas in the order of the op list; `sources` maps a name to a digest of
    whatever else the bytes depend on (native kernels, model code, options, the checkpoint).
    """

    schema_version: int
    spec: EngineSpec
    torch: str
    cuda: str
    machine: str
    op_schemas: tuple[str, ...]
    sources: dict[str, str]


def canonical_json(value: object) -> bytes:
    """Encode `value` with sorted keys and no spaces; a struct is checked against its own type."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.json.decode(msgspec.json.encode(value), type=type(value))
    return msgspec.json.encode(value, order="sorted")


def digest(value: object) -> str:
    """SHA-256 of the canonical JSON of `value`, in hexadecimal."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal; memory use does not depend on its size."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def engine_digest(identity: Identity) -> str:
    """The digest that `layout.engine_id` takes its first eight digits from."""
    return digest(identity)
