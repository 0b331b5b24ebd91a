"""Whole rounds by the table's ops and the draft ops, with a drafter that is the target itself.

A row's target hidden state is a function of its tokens, so that whatever a draft phase gathers or
keeps can be told from the tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from support.rounds import BIAS_IDS, PAGE, SLOTS, STOP_IDS, VOCAB, Batch, Fed, history, model
from torch import Tensor

from inkling_engine.kernels import table
from inkling_engine.kernels._cases import normal
from inkling_engine.kernels.draft_commit import draft_commit
from inkling_engine.kernels.draft_gather import draft_gather
from inkling_engine.kernels.draft_metadata import DraftMeta, draft_metadata
from inkling_engine.kernels.draft_sample import draft_sample
from inkling_engine.kernels.step_metadata import StepMeta

HIDDEN = 4


def hidden_state(tokens: Sequence[int]) -> Tensor:
    """The target's hidden state [H] of the last of `tokens`."""
    return normal(HIDDEN, seed=hash((5, *tokens)))


@dataclass
class DraftBatch(Batch):
    """A batch that drafts after each step; `known` are its requests' tokens, roots included, `read` the
    token that each depth has read in each row last."""

    known: list[list[int]] = field(init=False)
    read: list[dict[tuple[int, int], int]] = field(init=False)
    stash: Tensor = field(init=False)
    recent: Tensor = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.known = [history(draw) for draw in self.draws]
        self.read = [self.final_rows(known) for known in self.known]
        self.stash = torch.full((SLOTS, self.drafts, HIDDEN), torch.nan)
        self.recent = torch.full((SLOTS, self.drafts), 10**6, dtype=torch.int32)
        for slot, draw in enumerate(self.draws, start=1):
            self._keep(slot, self.known[slot - 1][: draw.length])

    def final_rows(self, tokens: list[int]) -> dict[tuple[int, int], int]:
        """What each depth has read where `tokens` are known, of (depth, row)."""
        depths = range(self.drafts)
        rows = ((depth, row) for depth in depths for row in range(len(tokens) - 1 - depth))
        return {(depth, row): tokens[row + 1 + depth] for depth, row in rows}

    def _keep(self, slot: int, tokens: list[int]) -> None:
        """Let a slot remember `tokens` as a draft phase leaves them."""
        oldest = max(0, len(tokens) - self.drafts)
        for position in range(oldest, len(tokens)):
            entry = slot, position % self.drafts
            self.stash[entry] = hidden_state(tokens[: position + 1])
            if position > oldest:
                self.recent[entry] = tokens[position]

    def round(self, verify: bool = True, fed: Fed | None = None) -> None:
        """A step and its draft phase; all that is told by the tokens is checked."""
        meta = self.step(self.drafts if verify else 0, self.known, fed)
        hidden = torch.full((len(meta.tokens), HIDDEN), torch.nan)
        for row, slot in enumerate(meta.slots.tolist()):
            begin, end = meta.starts[row : row + 2].tolist()
            tokens = self.known[slot - 1][: int(meta.lengths[row])] if slot else []
            for t in range(begin, end):
                tokens.append(int(meta.tokens[t]))
                hidden[t] = hidden_state(tokens)
            if slot:
                state = self.tables["request_state"][slot]
                tokens = tokens[: int(state[table.LENGTH])]
                sampled = bool(meta.emits[begin if verify else row])
                self.known[slot - 1] = [*tokens, *[int(state[table.LAST_TOKEN])] * sampled]
        self._draft(meta, hidden, 1 + self.drafts if verify else 0)

    def _draft(self, meta: StepMeta, hidden: Tensor, most: int) -> None:
        t, drafts = self.tables, self.drafts
        tables = t["request_state"], t["full_table"], t["window_table"], self.recent
        rows = meta.slots, meta.sources, meta.starts, meta.lengths
        destinations = meta.destination_slots, meta.destination_offsets
        sizes = PAGE, drafts, most
        phase = DraftMeta(
            *draft_metadata(*tables, meta.tokens, *rows, *destinations, meta.emits, *sizes)
        )
        which = phase.token_rows, phase.hidden_rows, phase.sources, phase.starts
        gathered = draft_gather(hidden, self.stash, *which)
        guesses: list[list[int]] = [[] for _ in meta.slots]
        lines = t["token_counts"], t["request_state"], t["request_ints"], t["request_floats"]
        for depth in range(drafts):
            logits = torch.full((len(meta.slots), VOCAB), torch.nan)
            for row in phase.emits.nonzero().flatten().tolist():
                slot = int(phase.slots[row])
                tokens = [*self.known[slot - 1], *guesses[row]]
                logits[row] = model(self.draws[slot - 1], tokens)
            where = phase.slots, phase.starts, phase.lengths, phase.emits
            limits = depth, drafts, STOP_IDS, BIAS_IDS
            draft_sample(logits, *lines, t["draft_tokens"], phase.ids, *where, *limits)
            for row in phase.emits.nonzero().flatten().tolist():
                guesses[row].append(int(t["draft_tokens"][int(phase.slots[row]), depth]))
        self._check(phase, gathered, guesses)
        kept = t["request_state"], self.stash, self.recent, t["request_ints"]
        rows = phase.slots, phase.starts, phase.lengths, phase.destination_slots
        draft_commit(
            *kept, gathered, phase.ids, *rows, phase.destination_offsets, phase.emits, drafts
        )
        self._check_kept(phase)

    def _check(self, phase: DraftMeta, gathered: Tensor, guesses: list[list[int]]) -> None:
        """Every row's hidden state, place, and the token of every depth."""
        for row, slot in enumerate(phase.slots.tolist()):
            begin, end = phase.starts[row : row + 2].tolist()
            if slot == 0:
                assert begin == end
                continue
            known = self.known[slot - 1]
            told = [*known, *guesses[row], *[0] * (2 * self.drafts + 1)]
            if self.draws[slot - 1].broken == len(known) - 1:
                told[len(known)] = 0
            length = int(self.tables["request_state"][slot, table.LENGTH])
            first = length - (end - begin)
            assert (int(phase.lengths[row]), int(phase.kv_lengths[row])) == (
                first,
                first + self.drafts,
            )
            for i in range(begin, end):
                position = first + i - begin
                assert torch.equal(gathered[i], hidden_state(known[: position + 1])), "hidden state"
                assert (int(phase.positions[i]), int(phase.token_rows[i])) == (position, row)
                self._check_place(phase, i, slot, position + self.drafts)
                ids = phase.ids[i + row * self.drafts :][: self.drafts].tolist()
                assert ids == told[position + 1 :][: self.drafts], "ids"
                self.read[slot - 1] |= {(d, position): token for d, token in enumerate(ids)}
            final = self.final_rows(known[: length + 1])
            assert final.items() <= self.read[slot - 1].items(), "a row has read a wrong draft"
            finished = int(self.tables["request_state"][slot, table.FINISH]) != 0
            assert bool(phase.emits[row]) == (len(known) > length and not finished)
            assert int(phase.frontier_rows[row]) == (end - 1) * int(phase.emits[row])

    def _check_place(self, phase: DraftMeta, i: int, slot: int, position: int) -> None:
        for kind in ("full", "window"):
            line = self.tables[f"{kind}_table"][slot].tolist()
            page = line[position // PAGE % len(line)]
            found = int(getattr(phase, f"{kind}_locations")[i])
            assert found == page * PAGE + position % PAGE, "location"

    def _check_kept(self, phase: DraftMeta) -> None:
        """Stash and recent tokens of slots and of snapshots that were reached."""
        for row, slot in enumerate(phase.slots.tolist()):
            if slot == 0:
                continue
            state, known = self.tables["request_state"][slot], self.known[slot - 1]
            length = int(state[table.LENGTH])
            assert int(state[table.DRAFTS]) == self.drafts * int(phase.emits[row])
            self.check_memory(slot, known[:length])
            for target in phase.destination_slots[row].tolist():
                if target:
                    boundary = int(self.tables["snapshot_lengths"][target])
                    assert length >= boundary > 0
                    self.check_memory(target, known[:boundary])

    def check_memory(self, slot: int, tokens: list[int]) -> None:
        """Assert that a slot or snapshot remembers the end of `tokens`."""
        oldest = max(0, len(tokens) - self.drafts)
        for position in range(oldest, len(tokens)):
            entry = slot, position % self.drafts
            assert torch.equal(self.stash[entry], hidden_state(tokens[: position + 1])), "stash"
            remembered = int(self.recent[entry]) == tokens[position]
            assert position == oldest or remembered, "recent token"
