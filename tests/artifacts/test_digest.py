"""Canonical JSON has one form for one value, and everything that an identity holds moves it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.folders import SPEC

from inkling_engine.artifacts.digest import (
    Identity,
    canonical_json,
    digest,
    engine_digest,
    file_digest,
)
from inkling_engine.artifacts.layout import engine_id
from inkling_engine.artifacts.spec import EngineSpec

pytestmark = pytest.mark.null

IDENTITY = Identity(
    schema_version=1,
    spec=SPEC,
    torch="2.13.0+cpu",
    cuda="none",
    machine="x86_64",
    op_schemas=("a() -> ()", "b() -> ()"),
    sources={"kernels": "12", "model": "34"},
)


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Paths of all scalars in builtin containers."""
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in leaves(item, (*path, key))]
    if isinstance(value, list | tuple):
        return [leaf for i, item in enumerate(value) for leaf in leaves(item, (*path, i))]
    return [path]


def changed(path: tuple[str | int, ...]) -> Identity:
    """The identity with the scalar at `path` replaced by another of its type."""
    values = json.loads(msgspec.json.encode(IDENTITY))
    target = values
    for key in path[:-1]:
        target = target[key]
    old = target[path[-1]]
    other = {"cpu": "cuda", "float32": "bfloat16", "decode": "verify", "extend": "verify"}
    doubled = not old if isinstance(old, bool) else old * 2 + type(old)(1)
    target[path[-1]] = other.get(str(old), doubled)
    return msgspec.convert(values, Identity)


LEAVES = leaves(msgspec.to_builtins(IDENTITY))


def test_canonical_json_is_sorted_and_dense() -> None:
    assert (
        canonical_json({"b": [1, 2.5], "a": {"d": None, "c": "é"}})
        == '{"a":{"c":"é","d":null},"b":[1,2.5]}'.encode()
    )


def test_every_field_is_written_even_at_its_default() -> None:
    text = canonical_json(SPEC).decode()
    assert all(f'"{name}":' in text for name in EngineSpec.__struct_fields__)


def test_one_value_has_one_form() -> None:
    whole = msgspec.structs.replace(SPEC.shape, mup=4, local_layers=[0, 1, 2, 3, 4])
    assert digest(whole) == digest(SPEC.shape)


def test_a_value_of_another_type_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="layers"):
        digest(msgspec.structs.replace(SPEC.shape, layers="6"))


@given(st.permutations(["x", "y", "z"]))
def test_order_of_keys_does_not_matter(names: list[str]) -> None:
    sources = {name: name * 2 for name in names}
    first = msgspec.structs.replace(IDENTITY, sources=sources)
    second = msgspec.structs.replace(IDENTITY, sources=dict(sorted(sources.items())))
    assert engine_digest(first) == engine_digest(second)


@pytest.mark.parametrize("path", LEAVES, ids=lambda path: ".".join(map(str, path)))
def test_changing_any_field_changes_the_digest(path: tuple[str | int, ...]) -> None:
    assert engine_digest(changed(path)) != engine_digest(IDENTITY)


@pytest.mark.parametrize("base", [SPEC, SPEC.shape, SPEC.pools, SPEC.limits, SPEC.buckets[0]])
def test_adding_a_field_changes_the_digest(base: msgspec.Struct) -> None:
    wider = msgspec.defstruct(
        "Wider", [("added", int, 0)], bases=(type(base),), kw_only=True, frozen=True
    )
    value = wider(**{name: getattr(base, name) for name in base.__struct_fields__})
    assert digest(value) != digest(base)


def test_adding_a_source_or_schema_changes_the_digest() -> None:
    more = [
        msgspec.structs.replace(IDENTITY, sources={**IDENTITY.sources, "recipe": ""}),
        msgspec.structs.replace(IDENTITY, op_schemas=(*IDENTITY.op_schemas, "")),
        msgspec.structs.replace(IDENTITY, op_schemas=IDENTITY.op_schemas[::-1]),
    ]
    assert len({engine_digest(identity) for identity in [IDENTITY, *more]}) == 4


def test_identity_is_stable_between_versions_of_this_code() -> None:
    assert digest({"a": 1}) == hashlib.sha256(b'{"a":1}').hexdigest()
    assert engine_id(SPEC, "0123456789") == "toy-tp1-x86-64-v3-fp32-01234567"


def test_file_digest(tmp_path: Path) -> None:
    data = bytes(range(256)) * 9999
    (tmp_path / "file").write_bytes(data)
    assert file_digest(tmp_path / "file") == hashlib.sha256(data).hexdigest()
