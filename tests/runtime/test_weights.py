"""Drawn weights: any rank's are the shares of one model's, whatever the number of ranks."""

from __future__ import annotations

import math

import pytest
import torch
from support.checkpoints import tiny_config
from support.recipes import assemble_all
from torch import Tensor

from inkling_engine.artifacts.manifest import DType
from inkling_engine.compile.models.inkling import names
from inkling_engine.compile.models.inkling.shape import from_config
from inkling_engine.compile.recipes import source_shapes
from inkling_engine.kernels import state
from inkling_engine.kernels.state import draw_block, random_weight, weight_scale
from inkling_engine.runtime.weights import draw_weight

SHAPE = from_config(tiny_config(), {})


def drawn_checkpoint(layout: names.Layout) -> dict[str, Tensor]:
    """Every tensor of a checkpoint as the engine tensor that it belongs to draws it."""
    whole = names.recipes(SHAPE, "float32", layout)
    shapes, found = source_shapes(whole), dict[str, Tensor]()
    for recipe in whole:
        for name in {part.tensor for part in recipe.parts}:
            found[name] = torch.zeros(shapes[name])
            block = [(0, size, 1) for size in shapes[name]]
            scale = weight_scale(recipe.name, recipe.shape[-1])
            draw_block(found[name], name, block, 3, scale)
    return found


@pytest.mark.parametrize(
    ("tp", "dtype", "layout"),
    [(1, "float32", "original"), (2, "bfloat16", "hf"), (4, "float32", "original")],
)
def test_a_rank_draws_its_share_of_the_model(tp: int, dtype: DType, layout: names.Layout) -> None:
    """4 ranks over 2 kv heads included; the recipes are those of rank 0, as in a manifest."""
    disk, recipes = drawn_checkpoint(layout), names.recipes(SHAPE, dtype, layout, tp)
    for rank in range(tp):
        expected = assemble_all(names.recipes(SHAPE, dtype, layout, tp, rank), disk)
        for recipe in recipes:
            found = draw_weight(recipe, 3, "cpu", rank, tp)
            assert torch.equal(found, expected[recipe.name]), recipe.name


def test_values_are_spread_as_the_scale_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean, deviation, and no tie between neighbours, rows, seeds or names; in pieces of any size."""
    whole = [(0, 512, 1), (0, 384, 1)]
    found = {}
    for name, seed in (("a", 1), ("a", 2), ("b", 1)):
        value = found[name, seed] = torch.empty(512, 384)
        draw_block(value, name, whole, seed, 0.25)
    value = found["a", 1]
    assert abs(value.std() - 0.25) < 1e-3 and value.abs().max() <= 0.25 * math.sqrt(3)
    assert value.unique().numel() > 0.98 * value.numel()
    others = [*list(found.values())[1:], value.roll(1, 0), value.roll(1, 1), value.flip(1)]
    for other in [torch.ones_like(value), *others]:
        size = float(other.square().mean()) ** 0.5
        assert abs((value * other).mean()) < size * value.numel() ** -0.5
    monkeypatch.setattr(state, "_PIECE", 1000)
    again = torch.empty_like(value)
    draw_block(again, "a", whole, 1, 0.25)
    assert torch.equal(again, value)


def test_layouts_without_a_recipe_are_tensors_of_their_own() -> None:
    recipes = {recipe.name: recipe for recipe in names.recipes(SHAPE, "float32", "original")}
    assert bool((random_weight(recipes["layers.0.attn_norm"], 1) == 1).all())
    taps, matrix = (random_weight(recipes[f"layers.0.{n}"], 1) for n in ("kv_conv", "qkvr"))
    assert abs(taps.std() - 0.3) < 0.02
    assert abs(matrix.std() * matrix.shape[1] ** 0.5 - 1) < 0.02
