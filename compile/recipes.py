"""Arithmetic on recipes: sizes, what a set of recipes reads, and a slice of a recipe.

A recipe says which blocks of which checkpoint tensors make up an engine tensor. Taking intervals of
one axis of it gives another recipe: tensor parallelism takes a rank's rows and columns, the
converter takes as many rows as it wants in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

import msgspec

from inkling_engine.artifacts.manifest import Part, Recipe

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "int32": 4, "int64": 8}

Interval = tuple[int, int]
T = TypeVar("T")


def nbytes(recipe: Recipe) -> int:
    """Bytes of the engine tensor."""
    return math.prod(recipe.shape) * ITEM_BYTES[recipe.dtype]


def source_shapes(recipes: Iterable[Recipe]) -> dict[str, tuple[int, ...]]:
    """Smallest shape of each checkpoint tensor that holds every block the recipes read.

    For the recipes of an unsharded model these are the shapes themselves.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for part in (part for recipe in recipes for part in recipe.parts):
        stops = tuple(stop for _, stop, _ in part.source)
        known = shapes.get(part.tensor, stops)
        assert len(known) == len(stops), f"{part.tensor} is read with different ranks"
        shapes[part.tensor] = tuple(map(max, known, stops))
    return shapes


def take(
    recipe: Recipe, axis: int, intervals: Sequence[Interval], blocks: Sequence[int] = ()
) -> Recipe:
    """The recipe of the engine tensor's `intervals` (start, stop) of `axis`, one after another.

    `blocks`: each interval is the first of so many alike, of which every rank has one.
    """
    parts: list[Part] = []
    position = 0
    for at, interval in enumerate(intervals):
        clipped = (_clip(part, axis, interval, position) for part in recipe.parts)
        found = [part for part in clipped if part is not None]
        parts += [_split(part, axis, blocks[at]) for part in found] if blocks else found
        position += interval[1] - interval[0]
    shape = _replaced(recipe.shape, axis, position)
    return msgspec.structs.replace(recipe, shape=shape, parts=tuple(parts))


def _clip(part: Part, axis: int, interval: Interval, position: int) -> Part | None:
    """The overlap of `part` with `interval`, moved so that the interval starts at `position`."""
    begin = part.offset[axis]
    low, high = max(interval[0], begin), min(interval[1], begin + part.shape[axis])
    if low >= high:
        return None
    source_axis = _source_axis(part, axis)
    start, stop, step = part.source[source_axis]
    first = start + (low - begin) * step
    block = (first, min(stop, first + (high - low) * step), step)
    return Part(
        tensor=part.tensor,
        source=_replaced(part.source, source_axis, block),
        offset=_replaced(part.offset, axis, position + low - interval[0]),
        shape=_replaced(part.shape, axis, high - low),
    )


def _split(part: Part, axis: int, blocks: int) -> Part:
    return msgspec.structs.replace(part, split=(_source_axis(part, axis), blocks))


def _source_axis(part: Part, axis: int) -> int:
    """Axis of the checkpoint tensor behind `axis`: reshaping only drops axes of length one."""
    kept: list[int] = []
    for index, block in enumerate(part.source):
        length = len(range(*block))
        if len(kept) < len(part.shape) and length == part.shape[len(kept)]:
            kept.append(index)
        else:
            assert length == 1, f"{part.tensor}: {part.source} is not {part.shape}"
    return kept[axis]


def _replaced(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])
