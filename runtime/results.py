"""What a step leaves behind for the host: the ring of result lines that `commit` writes."""

from __future__ import annotations

from inkling_engine.kernels import table
from inkling_engine.runtime.requests import TokenLogprob


class ResultRing:
    """The lines that `commit` writes: one a row, in the ring line of the step's number. A line has
    up to 1 + `drafts` tokens, in order, each with its alternatives."""

    def __init__(
        self,
        ints: memoryview[int],
        floats: memoryview[float],
        shape: tuple[int, int, int],
        drafts: int = 0,
    ) -> None:
        """Views of `results_int` [results, rows, 5 + (1+drafts) * (1+top)], whose shape this is,
        and `results_float` [results, rows, (1+drafts) * (1+top)]."""
        self._lines, self._rows, self._width = shape
        self._floats_width, self._most = self._width - table.RESULT_HEADER, 1 + drafts
        self._top = self._floats_width // self._most - 1
        self.ints, self._floats = ints, floats

    def rows(self, step: int, count: int) -> range:
        """Where the first `count` rows of step number `step` begin in `ints` (`kernels.table`)."""
        start = step % self._lines * self._rows * self._width
        return range(start, start + count * self._width, self._width)

    def logprob(self, at: int, index: int, top: int) -> TokenLogprob:
        """Token `index` of the line at position `at` of `rows` with its `top` alternatives."""
        line, tokens = at // self._width * self._floats_width, at + table.RESULT_HEADER
        first = self._most + index * self._top
        ids = self.ints[tokens + first : tokens + first + top].tolist()
        values = self._floats[line + first : line + first + top].tolist()
        alternatives = tuple(zip(ids, values, strict=True))
        return TokenLogprob(self.ints[tokens + index], self._floats[line + index], alternatives)
