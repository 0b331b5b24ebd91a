"""Tensor parallelism as a transform: the recipes of the whole model -> those of one rank.

Each engine tensor is cut along one axis into sections of equal units (heads, kv heads, MLP columns,
vocabulary rows); a rank takes its run of units of every section. Gate and up are sections of their
own, so no slab cuts through a pair. With more ranks than kv heads, neighbouring ranks hold the same
kv head. Everything else is replicated (spec 4.1, 4.2).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from inkling_engine.artifacts.errors import UsageError
from inkling_engine.artifacts.manifest import Recipe
from inkling_engine.artifacts.spec import LayerKind, ModelShape
from inkling_engine.compile.recipes import Interval, take


class Section(NamedTuple):
    """`units` runs of `size` elements of an axis; a run is never cut."""

    units: int
    size: int = 1


def rank_recipes(
    recipes: Iterable[Recipe], shape: ModelShape, tp: int, rank: int
) -> tuple[Recipe, ...]:
    """Rank `rank`'s share of each of the whole model's `recipes`, in their order."""
    check_tp(shape, tp)
    assert 0 <= rank < tp, f"rank {rank} of {tp}"
    if tp == 1:
        return tuple(recipes)
    return tuple(_share(recipe, shape, tp).of_rank(rank, tp) for recipe in recipes)


def rank_shape(shape: ModelShape, tp: int) -> ModelShape:
    """The shape that one rank's decoder blocks have; the vocabulary stays the whole model's."""
    check_tp(shape, tp)
    full, local = (
        msgspec.structs.replace(kind, heads=kind.heads // tp, kv_heads=max(1, kind.kv_heads // tp))
        for kind in (shape.full, shape.local)
    )
    return msgspec.structs.replace(
        shape,
        full=full,
        local=local,
        dense_width=shape.dense_width // tp,
        expert_width=shape.expert_width // tp,
    )


def check_tp(shape: ModelShape, tp: int) -> None:
    """Raise UsageError naming every reason why the model cannot be split `tp` ways."""
    if tp < 1:
        raise UsageError("--tp", tp, "at least 1", "use --tp 1")
    reasons = [
        f"{count} {what} do not divide by {tp}"
        for what, count in _divided(shape).items()
        if count % tp
    ]
    for what, kind in (("full", shape.full), ("window", shape.local)):
        if kind.kv_heads % tp and tp % kind.kv_heads:
            reasons.append(f"{kind.kv_heads} kv heads of {what} layers neither divide nor repeat")
    if reasons:
        raise UsageError(
            "--tp", f"{tp} ({'; '.join(reasons)})", "a split of every tensor", _fitting(shape)
        )


def _divided(shape: ModelShape) -> dict[str, int]:
    return {
        "query heads of full layers": shape.full.heads,
        "query heads of window layers": shape.local.heads,
        "dense MLP columns": shape.dense_width,
        "expert columns": shape.expert_width,
        "vocabulary rows": shape.vocab,
    }


def _fitting(shape: ModelShape) -> str:
    """The remedy: the powers of two that would do."""
    kinds = (shape.full, shape.local)
    fitting = [
        str(tp)
        for tp in (1, 2, 4, 8)
        if not any(count % tp for count in _divided(shape).values())
        and not any(kind.kv_heads % tp and tp % kind.kv_heads for kind in kinds)
    ]
    return f"use --tp {' or '.join(fitting)}"


def _share(recipe: Recipe, shape: ModelShape, tp: int) -> Recipe:
    """Rank 0's units of every section of the tensor; more ranks than units share them."""
    cut = _cut(recipe.name, shape)
    if cut is None:
        return recipe
    axis, sections = cut
    extent = sum(section.units * section.size for section in sections)
    assert extent == recipe.shape[axis], f"{recipe.name}: {sections} do not make {recipe.shape}"
    intervals: list[Interval] = []
    counts: list[int] = []
    start = 0
    for units, size in sections:
        counts.append(units if units % tp else tp)
        intervals.append((start, start + units // counts[-1] * size))
        start += units * size
    return take(recipe, axis, intervals, counts)


def _cut(name: str, shape: ModelShape) -> tuple[int, list[Section]] | None:
    """The axis along which the engine tensor `name` is split, None for a replicated tensor."""
    scope, _, role = name.rpartition(".")
    if name in ("embed", "head"):
        return 0, [Section(shape.vocab)]
    if role in ("qkvr", "kv_conv", "o"):
        return _attention_cut(role, _kind(scope, shape), shape.rel_dim)
    return {
        "w13": (0, [Section(shape.dense_width)] * 2),
        "w2": (1, [Section(shape.dense_width)]),
        "experts_w13": (1, [Section(shape.expert_width)] * 2),
        "experts_w2": (2, [Section(shape.expert_width)]),
    }.get(role)


def _attention_cut(role: str, kind: LayerKind, rel_dim: int) -> tuple[int, list[Section]]:
    query, kv = Section(kind.heads, kind.head_dim), Section(kind.kv_heads, kind.head_dim)
    if role == "o":
        return 1, [query]
    return 0, [kv, kv] if role == "kv_conv" else [query, kv, kv, Section(kind.heads, rel_dim)]


def _kind(scope: str, shape: ModelShape) -> LayerKind:
    """Attention geometry of the block `layers.{i}` or `drafts.{d}`."""
    place, index = scope.split(".")
    if place == "layers":
        return shape.kind(int(index))
    return shape.draft_kind(int(index))
