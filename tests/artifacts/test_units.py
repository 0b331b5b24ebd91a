"""Sizes as texts say them."""

from __future__ import annotations

import pytest

from inkling_engine.artifacts.units import read_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("123456", 123456),
        ("0.5", 0.5),
        ("80G", 80e9),
        ("80 gb", 80e9),
        ("16GiB", 16 * 2**30),
        ("1.5Ki", 1536),
        ("141e9", 141e9),
        *((text, 0) for text in ("", "lots", "-1", "1X", "iB", "1e999", "9" * 400, "nan", "0")),
    ],
)
def test_sizes(text: str, size: float) -> None:
    assert read_size(text) == size
