"""How texts say sizes."""

from __future__ import annotations

import math
import re

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]{1,2})?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def read_size(text: str) -> float:
    """Bytes that `123456`, `141e9`, `80G` or `16GiB` says; 0 if it is no finite size."""
    match = _SIZE.fullmatch(text)
    if not match:
        return 0.0
    power = "KMGT".find(match[2].upper()) + 1 if match[2] else 0
    size = float(match[1]) * (1024 if match[3] else 1000) ** power
    return size if math.isfinite(size) else 0.0
