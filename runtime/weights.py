"""Weights in memory: read once from safetensors, or seeded for engines that have none.

Each tensor lies at an aligned address of its own; every program reads the same copy.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from inkling_engine.artifacts.manifest import Manifest, Recipe
from inkling_engine.kernels.state import allocate, random_weight
from inkling_engine.runtime.errors import CorruptError


def used_weights(manifest: Manifest) -> list[Recipe]:
    """The engine tensors that its programs read; others (later drafts) stay on disk."""
    inputs = {name for program in manifest.programs for name in program.inputs}
    return [recipe for recipe in manifest.recipe if f"weights.{recipe.name}" in inputs]


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


def random_weights(manifest: Manifest, seed: int, device: str = "cpu") -> dict[str, Tensor]:
    """Weights drawn with `seed`, scaled as in `kernels.state.random_weight`."""
    return {recipe.name: random_weight(recipe, seed, device) for recipe in used_weights(manifest)}
