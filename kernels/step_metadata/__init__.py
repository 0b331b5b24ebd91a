"""What all layers of a step need of its rows, derived once from the request table.

`step_metadata(...)` first applies the host's one-shot lines (admissions, page updates, snapshot
destinations; each is inert by slot 0 and its slot is zeroed once applied), then resolves R rows of
at most T tokens. int32 unless stated; columns are those of `kernels/table.py`:

* written: request_state [lines, 8], request_ints [lines, I], request_floats [lines, F] f32,
  token_counts [lines, V], full_table [lines, width], window_table [lines, ring], snapshot_slots
  [lines, Gmax], snapshot_lengths [slots], admit_ints [R, 4 + I], page_updates [U, 4] (table, slot,
  index, page), snapshot_updates [R, 1 + Gmax] (slot, destinations)
* read: draft_tokens [lines, max(drafts, 1)]; row_slots, row_counts, row_sources (0: the own slot),
  row_flags [R]; token_ids [T], packed by row_counts; admit_floats [R, F] f32
* returned (`StepMeta`): tokens, positions, token_rows [T], full_locations, window_locations [T] i64
  (page * page_size + offset), slots, sources [R], starts [R + 1], lengths [R], destination_slots,
  destination_offsets [R, destinations], sample_rows (last token of an emitting row), emits [R]

A row is inert (zeros, no tokens) when its slot or count is 0 or its request has finished. Fed tokens
enter token_counts, tokens taken from the table (FROM_TABLE) were counted when they were sampled. The
j-th multiple of snapshot_grid in (length, length + n] takes the j-th waiting entry of
snapshot_slots; more of them than `destinations` is an assertion.

A verify step (`drafts` > 0) has one given token a row. A sampling row fed from the table has
LAST_TOKEN and then its DRAFTS draft tokens, at most `drafts` and no more than MAX_TOKENS leaves room
for behind one sampled token. sample_rows and emits are [T]: every token of a sampling row is sampled
after, entry t being token t. How far the row will get is not known yet: destinations stay on the
slot's list and snapshot_lengths as it is until `commit`; an offset is given for a boundary that has
no destination, too.
"""

from torch import Tensor

from inkling_engine.kernels._op import define
from inkling_engine.kernels.step_metadata import reference
from inkling_engine.kernels.step_metadata.reference import StepMeta

__all__ = ["StepMeta", "step_metadata"]


def _fake(*arguments: Tensor | int) -> tuple[Tensor, ...]:
    row_slots, token_ids, (destinations, drafts) = arguments[9], arguments[13], arguments[-2:]
    assert isinstance(row_slots, Tensor) and isinstance(token_ids, Tensor)
    assert isinstance(destinations, int) and isinstance(drafts, int)
    tokens, rows = token_ids.shape[0], row_slots.shape[0]
    meta = reference.empty_meta(row_slots, tokens, rows, destinations, drafts)
    return tuple(meta)


step_metadata = define(
    "step_metadata",
    "(Tensor(a!) request_state, Tensor(b!) request_ints, Tensor(c!) request_floats,"
    " Tensor(d!) token_counts, Tensor(e!) full_table, Tensor(f!) window_table,"
    " Tensor(g!) snapshot_slots, Tensor(h!) snapshot_lengths, Tensor draft_tokens,"
    " Tensor row_slots, Tensor row_counts, Tensor row_sources, Tensor row_flags, Tensor token_ids,"
    " Tensor(i!) admit_ints, Tensor admit_floats, Tensor(j!) page_updates,"
    " Tensor(k!) snapshot_updates, int page_size, int snapshot_grid, int destinations, int drafts)"
    " -> (Tensor tokens, Tensor positions, Tensor token_rows, Tensor full_locations,"
    " Tensor window_locations, Tensor slots, Tensor sources, Tensor starts, Tensor lengths,"
    " Tensor destination_slots, Tensor destination_offsets, Tensor sample_rows, Tensor emits)",
    reference.step_metadata,
    _fake,
)
