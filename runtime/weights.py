"""Weights in memory: read once from safetensors, or seeded for engines that have none.

Each tensor lies at an aligned address of its own; every program reads the same copy.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from inkling_engine.artifacts.manifest import Manifest, Recipe
from inkling_engine.kernels.state import allocate, draw_block, weight_scale
from inkling_engine.runtime.errors import CorruptError
from inkling_engine.runtime.usage import used_weights


def read_weights(path: Path, manifest: Manifest, device: str = "cpu") -> dict[str, Tensor]:
    """Read a rank's weights; CorruptError if a tensor is missing, or of another shape or dtype."""
    weights = {}
    with safe_open(path, framework="pt") as stored:
        names = set(stored.keys())
        for recipe in used_weights(manifest):
            value = stored.get_tensor(recipe.name) if recipe.name in names else None
            weight = allocate(recipe, device)
            if value is None or (value.dtype, value.shape) != (weight.dtype, weight.shape):
                found = "nothing" if value is None else f"{value.dtype} {tuple(value.shape)}"
                expected = f"{weight.dtype} {recipe.shape}"
                remedy = "build the engine again from its checkpoint"
                raise CorruptError(f"weight {recipe.name}", found, expected, remedy)
            weights[recipe.name] = weight.copy_(value)
    return weights


def random_weights(
    manifest: Manifest, seed: int, device: str = "cpu", rank: int = 0
) -> dict[str, Tensor]:
    """Weights of `rank`, drawn as `kernels.state.draw_block` does it from the tensors of a checkpoint:
    those of all ranks, of any number, are shares of one model."""
    ranks = manifest.spec.tp
    return {
        recipe.name: draw_weight(recipe, seed, device, rank, ranks)
        for recipe in used_weights(manifest)
    }


def draw_weight(recipe: Recipe, seed: int, device: str, rank: int, ranks: int) -> Tensor:
    """The engine tensor of `rank` out of `ranks`; `recipe` is rank 0's."""
    weight = allocate(recipe, device)
    for part in recipe.parts:
        axis, blocks = part.split
        width = recipe.shape[-1] * (blocks if axis == len(part.source) - 1 else 1)
        place = tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape, strict=True))
        source = part.of_rank(rank, ranks).source
        scale = weight_scale(recipe.name, width)
        draw_block(weight[place], part.tensor, source, seed, scale)
    return weight
