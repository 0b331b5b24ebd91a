"""What build tests share: the compilers' cache, and models small enough to build again and again."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def compiler_cache(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let Inductor in this process keep its files where builds keep theirs."""
    from inkling_engine.compile.items import cache_folder

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor-tests"))
    return cache_folder()
