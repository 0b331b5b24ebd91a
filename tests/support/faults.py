"""Faults to plant in the eager step: each changes what one op is given or leaves behind.

The step looks its ops up by name in `model` and `steps`; a fault stands in front of one of them. So
the native kernels stay as they are, and tests that run the eager step meet the fault unprepared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from inkling_engine.compile import steps
from inkling_engine.compile.models.inkling import block, model
from inkling_engine.kernels import table
from inkling_engine.kernels._conv import window
from inkling_engine.kernels.step_metadata import StepMeta

Arguments = dict[str, Any]
Call = Callable[[Arguments], Any]
Change = Callable[[Call, Arguments], Any]
Plant = Callable[[pytest.MonkeyPatch], None]

PROLOGUE = ((block, "attention_prologue"), (block, "attention_decode"))
CONVOLVING = ((block, "boundary"), *PROLOGUE)
ATTENTION = (
    (block, "attention_decode"),
    (model, "attention_extend"),
    (model, "attention_verify"),
)
METADATA = ((steps, "step_metadata"),)
SAMPLE = ((steps, "sample"),)


def before(change: Change, *places: tuple[ModuleType, str]) -> Plant:
    """A fault that puts `change` in front of the ops at `places`; it gets the op, which takes
    arguments by name, and the arguments."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        for module, name in places:
            patch.setattr(module, name, _standing_in(getattr(module, name), change))

    return plant


def _standing_in(op: Any, change: Change) -> Callable[..., Any]:
    names = list(inspect.signature(op.reference).parameters)

    def call(arguments: Arguments) -> Any:
        return op(*(arguments[name] for name in names))

    return lambda *values: change(call, dict(zip(names, values, strict=True)))


def given(**changes: Callable[[Arguments], Any]) -> Change:
    """The op is given other values for the arguments named."""
    return lambda call, a: call(a | {name: value(a) for name, value in changes.items()})


def lagging_window(call: Call, a: Arguments) -> Any:
    """The window that is kept ends one input too early."""
    pool, begins = a["conv_pool"][a["layer"]], a["starts"].tolist()
    old = pool.clone()
    result = call(a)
    for row, slot in enumerate(a["slots"].tolist()):
        if slot and begins[row + 1] > begins[row]:
            past = window(old[a["sources"][row]], int(a["lengths"][row]))
            strip = torch.cat([past, a["x"][begins[row] : begins[row + 1]]])
            pool[slot, last_entries(a, row)] = strip[-4:-1]
    return result


def last_entries(a: Arguments, row: int) -> Tensor:
    """Ring entries of a row's last three inputs, oldest first."""
    end, ring = int(a["lengths"][row] + a["starts"].diff()[row]), int(a["conv_pool"].shape[2])
    return torch.arange(end - 3, end) % ring


def window_of_the_bucket(call: Call, a: Arguments) -> Any:
    """The last row's window holds the bucket's last inputs, padded ones too."""
    result, rows = call(a), a["slots"].nonzero().flatten()
    if len(rows) and len(a["x"]) >= 3:
        kept = a["conv_pool"][a["layer"], a["slots"][rows[-1]]]
        kept[last_entries(a, int(rows[-1]))] = a["x"][-3:]
    return result


def minus_one(call: Call, a: Arguments) -> Any:
    """Inert rows write through slot -1, which is the last one."""
    result = call(a)
    if not a["slots"].all():
        a["conv_pool"][a["layer"], -1] = 0
    return result


def reads_slot_0(call: Call, a: Arguments) -> Any:
    """Slot 0 enters arithmetic, multiplied by a mask."""
    hidden, normed = call(a)
    return hidden, normed + 0 * a["conv_pool"][a["layer"], 0].sum()


def reads_page_0(call: Call, a: Arguments) -> Any:
    """Page 0 enters arithmetic, multiplied by a mask."""
    return call(a) + 0 * a["kv_pool"][a["layer"], 0].sum()


def writes_padded_kv(call: Call, a: Arguments) -> Any:
    """Padded tokens write keys and values where their location says: in page 0."""
    result = call(a)
    if int(a["starts"][-1]) < len(a["qkvr"]):
        a["kv_pool"][a["layer"], 0, :, :, 0] = 1
    return result


def without_residual(a: Arguments) -> Tensor:
    """Taps that take the current token off the sum."""
    taps: Tensor = a["conv_weight"]
    return taps - torch.tensor([0.0, 0.0, 0.0, 1.0])


def from_the_chunk(a: Arguments) -> Tensor:
    """Positions counted from the start of each row's chunk."""
    starts: Tensor = a["lengths"][a["token_rows"].long()]
    return torch.sub(a["positions"], starts)


def shifted_by_row(a: Arguments) -> Tensor:
    """Lengths that grow with the row."""
    lengths: Tensor = a["lengths"]
    return lengths + torch.arange(len(lengths), dtype=torch.int32)


def everyones_counts(a: Arguments) -> Tensor:
    """Every request is charged with the tokens of all."""
    counts: Tensor = a["token_counts"]
    return counts.sum(0, keepdim=True, dtype=torch.int32).expand_as(counts).contiguous()


def biased_weights(call: Call, a: Arguments) -> Any:
    """The bias that chooses experts is part of their weights too."""
    experts, weights, places = call(a)
    live, bias = int(a["starts"][-1]), torch.cat([a["gate_bias"], torch.zeros(a["shared"])])
    logits = a["y"][:live] @ a["gate_weight"].T + bias
    chosen = torch.nn.functional.logsigmoid(logits.gather(1, experts[:live].long())).softmax(-1)
    weights[:live] = chosen * a["route_scale"] * a["gate_scale"]
    return experts, weights, places


def all_tokens_live(a: Arguments) -> Tensor:
    """Row boundaries that count padded tokens to the last row."""
    starts: Tensor = a["starts"].clone()
    starts[-1] = len(a["y"])
    return starts


def clamped_bank(a: Arguments) -> Tensor:
    """A bank whose last distance stands for all beyond it."""
    bank = a["rel_proj"]
    longest = a["page_table"].shape[1] * a["kv_pool"].shape[4]
    return torch.cat([bank, bank[:, -1:].expand(-1, longest)], dim=1)


def size_dependent(call: Call, a: Arguments) -> Any:
    """More than four rows are summed in another order."""
    return a["x"] @ a["weight"].T if len(a["x"]) > 4 else call(a)


def keeping(name: str, column: int) -> Change:
    """The column of one-shot lines is as it was before the step."""

    def change(call: Call, a: Arguments) -> Any:
        kept = a[name][:, column].clone()
        result = call(a)
        a[name][:, column] = kept
        return result

    return change


def keeping_counts(call: Call, a: Arguments) -> Any:
    """Admission leaves the token counts of the slot's last request."""
    admitted = a["admit_ints"][:, table.ADMIT_SLOT].unique().long()
    kept = a["token_counts"][admitted].clone()
    result = call(a)
    a["token_counts"][admitted] = kept
    return result


def keeping_destinations(call: Call, a: Arguments) -> Any:
    """A destination stays on its slot's list after its boundary."""
    meta = StepMeta(*call(a))
    for slot, captured in zip(meta.slots.tolist(), meta.destination_slots.tolist(), strict=True):
        if captured[0]:
            a["snapshot_slots"][slot, 0] = captured[0]
    return meta


def early_offsets(call: Call, a: Arguments) -> Any:
    """A snapshot is taken one token before its boundary."""
    meta = StepMeta(*call(a))
    return meta._replace(destination_offsets=(meta.destination_offsets - 1).clamp(min=0))


def flat_grid(call: Call, a: Arguments) -> Any:
    """One grid lies over the packed tokens of all rows."""
    meta, grid = StepMeta(*call(a)), a["snapshot_grid"]
    shift = (meta.starts[:-1] % grid)[:, None]
    return meta._replace(destination_offsets=(meta.destination_offsets - shift).clamp(min=0))


def no_scatter_in_decode(call: Call, a: Arguments) -> Any:
    """Steps of one token a row have no snapshot scatter."""
    meta = StepMeta(*call(a))
    if len(meta.tokens) == len(meta.slots):
        meta.destination_slots.zero_()
    return meta


def no_scatter_in_extend(call: Call, a: Arguments) -> Any:
    """Steps with room for prompts have no snapshot scatter."""
    meta = StepMeta(*call(a))
    if len(meta.tokens) > len(meta.slots):
        meta.destination_slots.zero_()
    return meta


def snapshot_in_place(call: Call, a: Arguments) -> Any:
    """A row that starts from a snapshot goes on in the snapshot's slot too."""
    result, pool = call(a), a["conv_pool"][a["layer"]]
    for slot, source in zip(a["slots"].tolist(), a["sources"].tolist(), strict=True):
        if slot:
            pool[source] = pool[slot]
    return result


def forgotten_tokens(a: Arguments) -> Tensor:
    """Admission lines that say that nothing was generated before."""
    lines: Tensor = a["admit_ints"]
    lines[:, table.ADMIT_GENERATED] = 0
    return lines


def unfinished(a: Arguments) -> Tensor:
    """Request state in which nothing has ended."""
    a["request_state"][:, table.FINISH] = 0
    state: Tensor = a["request_state"]
    return state


def no_minimum(a: Arguments) -> Tensor:
    """Request integers without a least number of tokens."""
    ints: Tensor = a["request_ints"].clone()
    ints[:, table.MIN_TOKENS] = 0
    return ints


def processed_logprobs(call: Call, a: Arguments) -> Any:
    """Log-probabilities are those of the tempered distribution."""
    tokens, _, top_tokens, _ = call(a)
    cooled = call(a | {"logits": a["logits"] / 0.7})
    return tokens, cooled[1], top_tokens, cooled[3]


def stale_results(call: Call, a: Arguments) -> Any:
    """Result lines of inert rows keep what they held."""
    line = int(a["step_counter"][0]) % len(a["results_int"])
    inert = (a["slots"] == 0).nonzero().flatten()
    kept = a["results_int"][line, inert].clone()
    call(a)
    a["results_int"][line, inert] = kept
