"""The weight tensors of a spec, as its conversion recipes define them."""

from __future__ import annotations

from inkling_engine.artifacts.manifest import TensorEntry
from inkling_engine.artifacts.spec import EngineSpec
from inkling_engine.compile.models.inkling.names import recipes


def weight_entries(spec: EngineSpec) -> tuple[TensorEntry, ...]:
    """Every tensor of a rank's weight file, in file order."""
    return tuple(
        TensorEntry(name=recipe.name, dtype=recipe.dtype, shape=recipe.shape)
        for recipe in recipes(spec.shape, spec.dtype, "original", spec.tp, 0)
    )


def step_weights(spec: EngineSpec) -> tuple[TensorEntry, ...]:
    """The tensors that the programs read: of the draft depths those that draft."""
    return tuple(entry for entry in weight_entries(spec) if _is_read(entry.name, spec.spec_depth))


def _is_read(name: str, drafts: int) -> bool:
    scope, *rest = name.split(".")
    if scope == "drafts":
        return int(rest[0]) < drafts
    return scope != "chain_norm" or drafts > 0
