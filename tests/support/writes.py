"""Which elements of each pool a scripted step must write, and which it may; no other may change.

Predicted from the script alone (chunks, page lines, destinations), not from the step's metadata.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from support.rig import WINDOWS, Result, Rig, Tensors
from torch import Tensor

from inkling_engine.artifacts.spec import Bucket
from inkling_engine.compile.driver import Chunk
from inkling_engine.kernels import table

ONE_SHOT = {"admit_ints": table.ADMIT_SLOT, "page_updates": 1, "snapshot_updates": 0}


class Writes:
    """Masks by pool: `must` elements are overwritten with something new, `may` ones perhaps."""

    def __init__(self, rig: Rig, bucket: Bucket, chunks: Sequence[Chunk], rows: Tensors) -> None:
        """Predict the step of `chunks` in `bucket` with the row inputs `rows`; call before it."""
        self.spec, self.pools = rig.model.spec, rig.pools
        self.must = {n: torch.zeros_like(p, dtype=torch.bool) for n, p in rig.pools.items()}
        self.may = {n: torch.zeros_like(p, dtype=torch.bool) for n, p in rig.pools.items()}
        self.rows = {n: torch.zeros_like(r, dtype=torch.bool) for n, r in rows.items()}
        self.chunks = chunks
        self._written: list[tuple[int, Tensor]] = []
        line = int(rig.pools["step_counter"][0]) % self.spec.pools.results
        self.must["step_counter"][0] = True
        for name in ("results_int", "results_float"):
            self.must[name][line, : bucket.rows] = True
        for name, column in ONE_SHOT.items():
            self.rows[name][:, column] = rows[name][:, column] != 0
        for kind, slot, entry, _ in rows["page_updates"].tolist():
            if slot:
                name = "full_table" if kind == table.FULL_TABLE else "window_table"
                self.may[name][slot, entry] = True
        for chunk in chunks:
            if chunk.slot:
                self._row(chunk)

    def _row(self, chunk: Chunk) -> None:
        slot, end = chunk.slot, chunk.start + chunk.count
        if chunk.admit:
            for name in ("request_state", "request_ints", "request_floats", "token_counts"):
                self.must[name][slot] = True
            self.must["snapshot_slots"][slot] = True
        if (
            chunk.snapshots
            or end // self.spec.snapshot_grid > chunk.start // self.spec.snapshot_grid
        ):
            self.may["snapshot_slots"][slot] = True
        self.must["request_state"][slot, table.LENGTH] = True
        self.must["request_state"][slot, table.GENERATED] |= chunk.sample
        self.may["request_state"][slot, table.LAST_TOKEN] |= chunk.sample
        self.may["token_counts"][slot, torch.tensor(chunk.tokens, dtype=torch.int64)] = True
        kept = self.may if chunk.start else self.must  # equal tokens may leave equal inputs
        for name in WINDOWS:
            ring = self.pools[name].shape[2]
            kept[name][:, slot, torch.arange(max(chunk.start, end - ring), end) % ring] = True
            old = torch.arange(max(0, chunk.start - 3), chunk.start) % ring
            self.may[name][:, slot, old] = True  # of a row that starts from a snapshot
        self._snapshots(chunk, end)
        self._written.append((slot, torch.arange(chunk.start, end)))

    def _snapshots(self, chunk: Chunk, end: int) -> None:
        grid = self.spec.snapshot_grid
        crossed = end // grid - chunk.start // grid
        waiting = list(chunk.snapshots)
        if not waiting and not chunk.admit:
            waiting = self.pools["snapshot_slots"][chunk.slot].tolist()
        for i, destination in enumerate(waiting[:crossed]):
            if destination:
                self.must["snapshot_lengths"][destination] = True
                boundary = (chunk.start // grid + 1 + i) * grid
                for name in WINDOWS:
                    entries = torch.arange(boundary - 3, boundary) % self.pools[name].shape[2]
                    self.must[name][:, destination, entries] = True

    def finish(self, result: Result) -> None:
        """After the step: add what only it can tell, the sampled tokens and where pages were."""
        for row, chunk in enumerate(self.chunks):
            if chunk.slot and chunk.sample:
                self.must["token_counts"][chunk.slot, result.ints[row, table.RESULT_HEADER]] = True
        page = self.spec.page_size
        for slot, positions in self._written:
            for kind in ("full", "window"):
                line = self.pools[f"{kind}_table"][slot]
                pages = line[positions // page % len(line)].long()
                self.must[f"kv_{kind}"].permute(1, 4, 0, 2, 3, 5)[pages, positions % page] = True
