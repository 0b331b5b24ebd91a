"""Models for the rig: a random small one in two sizes, the trained one, and an engine's programs."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import tiny_config, write_random
from support.draft_rig import DraftRig, DraftRigs
from support.engines import Exported
from support.oracle import TINY
from support.programs import Programs
from support.prompts import python_prompts
from support.rig import Model, Traces
from support.stepper import convert

SMALL: dict[str, Any] = {"max_running": 8, "page_size": 4, "snapshot_grid": 8, "max_context": 64}
SMALL |= {"decode_buckets": "1,2,4,8"}
TRAINED: dict[str, Any] = {"max_running": 8, "page_size": 64, "snapshot_grid": 128}
TRAINED |= {"max_context": 1024, "decode_buckets": "1,8", "extend_buckets": "64x8,256x8"}
VOCABULARY = 151
DRAFT_CHUNKS = ("8x8,16x8", "8x8,16x8,32x8,64x8")  # through a ring of pages, and of any length


def random_ids() -> list[int]:
    """400 ids of the small models' real vocabulary."""
    return random.Random(3).choices(range(VOCABULARY), k=400)


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model: window 8, extent 12, log floor 16, both layer kinds, dense and experts."""
    return write_random(tmp_path_factory.mktemp("small") / "small", tiny_config(), seed=1)


@pytest.fixture(scope="session")
def small(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The random model with pages of 4, a grid of 8, and chunks up to the whole context of 64."""
    scratch = tmp_path_factory.mktemp("whole")
    machine = convert(small_checkpoint, scratch, **SMALL, extend_buckets="8x8,16x8,32x8,64x8")
    return Model(machine.spec, machine.weights)


@pytest.fixture(scope="session")
def ring(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The same with chunks up to 16: a ring of 7 window pages, which 16 logical ones go round."""
    scratch = tmp_path_factory.mktemp("ring")
    machine = convert(small_checkpoint, scratch, **SMALL, extend_buckets="8x8,16x8")
    assert machine.spec.pools.window_ring < machine.spec.pools.table_width
    return Model(machine.spec, machine.weights)


@pytest.fixture(scope="session")
def rounded(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The random model in bf16, with a ring."""
    scratch = tmp_path_factory.mktemp("rounded")
    machine = convert(small_checkpoint, scratch, "bf16", **SMALL, extend_buckets="8x8,16x8")
    return Model(machine.spec, machine.weights)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The trained tiny model: window 128, extent 256, log floor 512, pages of 64."""
    machine = convert(TINY, tmp_path_factory.mktemp("trained"), **TRAINED)
    return Model(machine.spec, machine.weights)


@pytest.fixture(scope="session")
def programs(tiny_engine: Path) -> Programs:
    """The programs of the tiny engine."""
    return Programs(tiny_engine)


@pytest.fixture(scope="session")
def small_traces(small: Model, native_library: Path) -> Traces:
    """Traces of the random model; both sizes have the same ones."""
    return Traces(small, random_ids())


@pytest.fixture(scope="session")
def rounded_traces(rounded: Model, native_library: Path) -> Traces:
    """Traces of the random model in bf16."""
    return Traces(rounded, random_ids())


@pytest.fixture(scope="session")
def trained_traces(trained: Model, native_library: Path) -> Traces:
    """Traces of the trained model on Python source."""
    return Traces(trained, python_prompts([700])[0])


@pytest.fixture(scope="session")
def served(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The random model with few buckets, for engines: 8 rows at most, chunks up to 16."""
    options = SMALL | {"decode_buckets": "2,8", "extend_buckets": "16x8"}
    machine = convert(small_checkpoint, tmp_path_factory.mktemp("served"), **options)
    return Model(machine.spec, machine.weights)


@pytest.fixture(scope="session")
def exported(native_library: Path) -> Exported:
    """The exported steps of `served`, shared by all tests."""
    return Exported()


@pytest.fixture(scope="session")
def draft_rigs(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> DraftRigs:
    """A rig that makes so many drafts a round; fresh runs are shared."""

    @cache
    def models(drafts: int, dtype: str) -> tuple[Model, Model, dict[Any, Any]]:
        scratch = tmp_path_factory.mktemp(f"drafts-{drafts}-{dtype}")
        made = []
        for buckets in DRAFT_CHUNKS:
            options = SMALL | {"extend_buckets": buckets, "spec_depth": drafts}
            machine = convert(small_checkpoint, scratch, dtype, **options)
            made.append(Model(machine.spec, machine.weights))
        return made[0], made[1], {}

    def make(drafts: int, dtype: str = "fp32", **given: Any) -> DraftRig:
        model, whole, fresh = models(drafts, dtype)
        return DraftRig(model, whole, **{"fresh": fresh} | given)

    return make
