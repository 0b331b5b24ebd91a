"""The weight tensors of a spec, as its conversion recipes define them."""

from __future__ import annotations

from inkling_engine.artifacts.manifest import TensorEntry
from inkling_engine.artifacts.spec import EngineSpec
from inkling_engine.compile.models.inkling.names import recipes

DRAFT_WEIGHTS = ("drafts.", "chain_norm")


def weight_entries(spec: EngineSpec) -> tuple[TensorEntry, ...]:
    """Every tensor of a rank's weight file, in file order."""
    return tuple(
        TensorEntry(name=recipe.name, dtype=recipe.dtype, shape=recipe.shape)
        for recipe in recipes(spec.shape, spec.dtype, "original", spec.tp, 0)
    )


def step_weights(spec: EngineSpec) -> tuple[TensorEntry, ...]:
    """The tensors that a step without drafting reads."""
    return tuple(e for e in weight_entries(spec) if not e.name.startswith(DRAFT_WEIGHTS))
