"""What build tests share: two builds of a small engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builds import Builds, build_both, two_layers
from support.checkpoints import write_random
from support.once import Once


@pytest.fixture(scope="session")
def checkpoint(once: Once, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two-layer model."""
    folder = tmp_path_factory.mktemp("two") / "two-layers"
    return once("two-layers", lambda: write_random(folder, two_layers(), seed=1))


@pytest.fixture(scope="session")
def builds(checkpoint: Path, once: Once, tmp_path_factory: pytest.TempPathFactory) -> Builds:
    """Both builds of the two-layer model, finished."""
    return once("builds", lambda: build_both(tmp_path_factory.mktemp("builds"), checkpoint))


@pytest.fixture(scope="session")
def engine(builds: Builds) -> Path:
    """The undisturbed engine. Copy it before you change it."""
    return builds.whole
