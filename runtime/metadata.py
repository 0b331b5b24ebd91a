"""What a step reads: a bucket's row buffer.

A row buffer is one static block of memory, filled in place from a plan through views made once.
One-shot lines (admissions, page updates, snapshot destinations) are inert by slot 0, and the step
itself clears them after use: the host writes only what has changed since the bucket's last
replay, which for a steady decode step is nothing. No torch here: memory comes as memoryviews.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Any

from inkling_engine.artifacts.manifest import ProgramEntry
from inkling_engine.artifacts.spec import EngineSpec
from inkling_engine.kernels import table
from inkling_engine.runtime.requests import Sequence
from inkling_engine.runtime.sampling import stop_ids
from inkling_engine.runtime.scheduler import Plan


class RowInputs:
    """The row inputs of one bucket. `fill` makes them say what a plan says."""

    def __init__(self, entry: ProgramEntry, buffer: memoryview) -> None:
        """Make views into `buffer`, `entry.row_bytes` zeroed bytes that live as long as this."""
        views: dict[str, memoryview[Any]] = {}
        widths: dict[str, int] = {}
        for row in entry.rows:
            data = buffer[row.offset : row.offset + 4 * math.prod(row.shape)]
            views[row.name] = data.cast("f" if row.dtype == "float32" else "i")
            widths[row.name] = row.shape[-1]
        self._rows = entry.bucket.rows
        self._slots, self._counts = views["row_slots"], views["row_counts"]
        self._flags, self._tokens = views["row_flags"], views["token_ids"]
        self._admit_ints, self._admit_floats = views["admit_ints"], views["admit_floats"]
        self._pages = views["page_updates"]
        self._ints_width, self._floats_width = widths["admit_ints"], widths["admit_floats"]
        self._last: tuple[list[int], list[int], list[int]] = ([], [], [])

    def fill(self, plan: Plan) -> bool:
        """Write what `plan` changes; return whether anything was written."""
        rows = (plan.slots, plan.counts, plan.flags)
        changed = rows != self._last
        if changed:
            self._last = rows
            padding = [0] * (self._rows - len(plan.slots))
            self._slots[:] = array("i", plan.slots + padding)
            self._counts[:] = array("i", plan.counts + padding)
            self._flags[:] = array("i", plan.flags + padding)
        if plan.tokens:
            self._tokens[: len(plan.tokens)] = array("i", plan.tokens)
        for line, sequence in enumerate(plan.admissions):
            self._admit(line, sequence)
        if plan.pages:
            flat = [number for update in plan.pages for number in update]
            self._pages[: len(flat)] = array("i", flat)
        return bool(changed or plan.tokens or plan.pages)

    def _admit(self, line: int, sequence: Sequence) -> None:
        start = line * self._ints_width
        header = (sequence.slot, 0, 0, 0)  # length 0, nothing generated
        self._admit_ints[start : start + table.ADMIT_HEADER] = array("i", header)
        ints = self._admit_ints[start + table.ADMIT_HEADER : start + self._ints_width]
        ints[:] = sequence.admit_ints
        start = line * self._floats_width
        self._admit_floats[start : start + self._floats_width] = sequence.admit_floats


def encode_params(sequence: Sequence, spec: EngineSpec) -> None:
    """Write a sequence's lines of `request_ints` and `request_floats` (`kernels.table`)."""
    params, limits = sequence.params, spec.limits
    ints = [0] * table.INT_HEADER
    ints[table.PROMPT_LENGTH] = len(sequence.prompt)
    ints[table.MAX_TOKENS] = sequence.max_tokens
    ints[table.MIN_TOKENS] = params.min_tokens
    ints[table.TOP_K] = max(params.top_k, 0)
    ints[table.SEED_LOW] = _signed(sequence.seed & 0xFFFFFFFF)
    ints[table.SEED_HIGH] = _signed(sequence.seed >> 32)
    floats = [0.0] * table.FLOAT_HEADER
    floats[table.TEMPERATURE] = 0.0 if params.is_greedy else params.temperature
    floats[table.TOP_P], floats[table.MIN_P] = params.top_p, params.min_p
    floats[table.PRESENCE] = params.presence_penalty
    floats[table.FREQUENCY] = params.frequency_penalty
    floats[table.REPETITION] = params.repetition_penalty
    bias: Mapping[int, float] = params.logit_bias or {}
    stops = stop_ids(params, spec)
    stops += (table.INERT_TOKEN,) * (limits.stop_ids - len(stops))
    unused = limits.bias_ids - len(bias)
    sequence.admit_ints = array("i", (*ints, *stops, *bias, *[0] * unused))
    sequence.admit_floats = array("f", (*floats, *bias.values(), *[0.0] * unused))


def _signed(word: int) -> int:
    """A 32-bit word as the int32 of the same bits."""
    return word - (1 << 32) if word >> 31 else word
