"""The benchmark against transformers compares the same model: fp32 logits agree, step by step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from inkling_engine.compile.models.inkling.shape import preset

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import bench_transformers
from bench import pair


def test_both_sides_give_the_same_logits(native_library: Path) -> None:
    shape = preset("inkling-tiny")
    assert shape is not None
    assert bench_transformers.check(shape, "cpu") < 1e-5


def test_another_weight_is_noticed(native_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = pair.piece

    def wrong(*arguments: object) -> object:
        found = genuine(*arguments)  # type: ignore[arg-type]
        return found * 1.01 if found.shape[-1] == 4 else found  # the convolutions' taps

    monkeypatch.setattr(pair, "piece", wrong)
    shape = preset("inkling-tiny")
    assert shape is not None
    assert bench_transformers.check(shape, "cpu") > bench_transformers.CHECK_TOLERANCE
