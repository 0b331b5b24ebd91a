"""What a step reads: a bucket's row buffer.

A row buffer is one static block of memory, filled in place from a plan through views made once.
One-shot lines (admissions, page updates, snapshot destinations) are inert by slot 0, and the step
itself clears them after use: the host writes only what has changed since the bucket's last
replay, which for a steady decode step is nothing. No torch here: memory comes as memoryviews.
"""

from __future__ import annotations

import math
from array import array
from typing import Any, Protocol

from inkling_engine.artifacts.manifest import ProgramEntry
from inkling_engine.kernels import table
from inkling_engine.runtime.plan import Plan
from inkling_engine.runtime.requests import Sequence


class Upload(Protocol):
    """Sends a buffer to where the program reads it, without waiting for the program."""

    def send(self) -> None:
        """Begin to send."""

    def wait(self) -> None:
        """Until the last sending is over."""


class RowInputs:
    """The row inputs of one bucket. `fill` makes them say what a plan says."""

    def __init__(
        self, entry: ProgramEntry, buffer: memoryview, upload: Upload | None = None
    ) -> None:
        """Make views into `buffer`, `entry.row_bytes` zeroed bytes that live as long as this.

        `upload` sends the buffer to where the program reads it; none if it reads it here.
        """
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
        self._sources, self._pages = views["row_sources"], views["page_updates"]
        self._snapshots, self._snapshots_width = (
            views["snapshot_updates"],
            widths["snapshot_updates"],
        )
        self._ints_width, self._floats_width = widths["admit_ints"], widths["admit_floats"]
        self._last: tuple[Any, ...] = ()
        self._upload, self._one_shot = upload, buffer[entry.row_bytes : entry.row_bytes]
        if upload:  # the device clears its own copy only
            first = next(row.offset for row in entry.rows if row.name == "admit_ints")
            self._one_shot = buffer[first:]
        self._zeros = bytes(len(self._one_shot))

    def fill(self, plan: Plan) -> bool:
        """Write what `plan` changes; return whether anything was written."""
        rows = (plan.slots, plan.counts, plan.flags, plan.sources)
        changed = rows != self._last
        if not (changed or plan.tokens or plan.pages or plan.snapshots):
            return False
        if self._upload:
            self._upload.wait()
            self._one_shot[:] = self._zeros
        if changed:
            self._last = rows
            padding = [0] * (self._rows - len(plan.slots))
            self._slots[:] = array("i", plan.slots + padding)
            self._counts[:] = array("i", plan.counts + padding)
            self._flags[:] = array("i", plan.flags + padding)
            self._sources[:] = array("i", [0] * self._rows)
            for row, slot in plan.sources.items():
                self._sources[row] = slot
        if plan.tokens:
            self._tokens[: len(plan.tokens)] = array("i", plan.tokens)
        for line, sequence in enumerate(plan.admissions):
            self._admit(line, sequence)
        if plan.pages:
            flat = [number for update in plan.pages for number in update]
            self._pages[: len(flat)] = array("i", flat)
        for line, (sequence, slots) in enumerate(plan.snapshots):
            start, width = line * self._snapshots_width, self._snapshots_width
            numbers = [sequence.slot, *slots, *[0] * (width - 1 - len(slots))]
            self._snapshots[start : start + width] = array("i", numbers)
        if self._upload:
            self._upload.send()
        return True

    def _admit(self, line: int, sequence: Sequence) -> None:
        start = line * self._ints_width
        generated = len(sequence.feed) - len(sequence.prompt)  # before a preemption
        header = (sequence.slot, sequence.length, generated, 0)
        self._admit_ints[start : start + table.ADMIT_HEADER] = array("i", header)
        ints = self._admit_ints[start + table.ADMIT_HEADER : start + self._ints_width]
        ints[:] = sequence.admit_ints
        start = line * self._floats_width
        self._admit_floats[start : start + self._floats_width] = sequence.admit_floats
