"""A second, plain reading of recipes: engine tensors in memory, for tests to compare with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from inkling_engine.artifacts.manifest import Recipe

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def assemble(recipe: Recipe, tensors: Mapping[str, Tensor]) -> Tensor:
    """The engine tensor; asserts that its parts tile it exactly."""
    result = torch.zeros(recipe.shape, dtype=DTYPES[recipe.dtype])
    written = torch.zeros(recipe.shape, dtype=torch.int32)
    for part in recipe.parts:
        block = tensors[part.tensor][tuple(slice(*axis) for axis in part.source)]
        place = tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape, strict=True))
        result[place] = block.reshape(part.shape).to(result.dtype)
        written[place] += 1
    assert bool((written == 1).all()), f"{recipe.name} is not tiled exactly"
    return result


def assemble_all(recipes: Iterable[Recipe], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every engine tensor by name, in the order of `recipes`."""
    return {recipe.name: assemble(recipe, tensors) for recipe in recipes}
