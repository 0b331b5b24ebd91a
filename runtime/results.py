"""What a step leaves behind for the host: the ring of result lines that `commit` writes."""

from __future__ import annotations

from inkling_engine.kernels import table
from inkling_engine.runtime.requests import TokenLogprob


class ResultRing:
    """The lines that `commit` writes: one a row, in the ring line of the step's number."""

    def __init__(
        self, ints: memoryview[int], floats: memoryview[float], shape: tuple[int, int, int]
    ) -> None:
        """Views of `results_int` [results, rows, 5+1+top], whose shape this is, and `results_float`
        [results, rows, 1+top]."""
        self._lines, self._rows, self._width = shape
        self._top = self._width - table.RESULT_HEADER - 1
        self.ints, self._floats = ints, floats

    def rows(self, step: int, count: int) -> range:
        """Where the first `count` rows of step number `step` begin in `ints`."""
        start = step % self._lines * self._rows * self._width
        return range(start, start + count * self._width, self._width)

    def logprob(self, at: int, top: int) -> TokenLogprob:
        """The token at position `at` of `rows` with its `top` alternatives."""
        start, chosen = at // self._width * (1 + self._top), at + table.RESULT_HEADER
        values = self._floats[start : start + 1 + top].tolist()
        token, *ids = self.ints[chosen : chosen + 1 + top].tolist()
        return TokenLogprob(token, values[0], tuple(zip(ids, values[1:], strict=True)))
