"""The twin gate: native ops pass it, planted faults do not; reduced models are small and run."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.checkpoints import appendix_a_config
from torch import Tensor

from inkling_engine.artifacts.errors import FailedError
from inkling_engine.artifacts.spec import Bucket, EngineSpec, ModelShape
from inkling_engine.compile.export import Inputs, StepModule, program_inputs
from inkling_engine.compile.models.inkling import block
from inkling_engine.compile.models.inkling.shape import from_config, preset
from inkling_engine.compile.options import BuildOptions, make_spec
from inkling_engine.compile.pools import destinations
from inkling_engine.compile.script import STEPS, script
from inkling_engine.compile.twin import is_small, prove, reduced
from inkling_engine.compile.weights import step_weights, weight_entries
from inkling_engine.kernels import table
from inkling_engine.kernels.boundary import boundary

pytestmark = pytest.mark.usefixtures("native_library")

SHAPE = from_config(appendix_a_config(), {})
Named = dict[str, Tensor]
After = Callable[[Named, Tensor], None]


def spec_of(shape: ModelShape = SHAPE, device: str = "cpu", **given: Any) -> EngineSpec:
    sizes: dict[str, Any] = {"page_size": 8, "snapshot_grid": 16, "max_running": 4}
    sizes |= {"decode_buckets": "1,4", "extend_buckets": "40x4"} | given
    return make_spec(BuildOptions(model="toy", **sizes), "toy", shape, device)


SPEC = spec_of()
DECODE, EXTEND = SPEC.buckets[1:]
DRAFTING = spec_of(spec_depth=2)
VERIFY, DRAFTING_EXTEND = DRAFTING.buckets[1:]


class Uncompiled:
    """The step over native ops in place of a program; `after` may spoil pools, row inputs (by
    name) and logits."""

    def __init__(self, spec: EngineSpec, bucket: Bucket, after: After | None = None) -> None:
        self.inputs: Inputs = program_inputs(spec, bucket, step_weights(spec))
        self.module = StepModule(spec, bucket, self.inputs)
        self.after, self.running = after, False

    def __call__(self, flat: list[Tensor]) -> list[Tensor]:
        first, second = len(self.inputs.weights), len(self.inputs.weights + self.inputs.pools)
        weights, pools, rows = flat[:first], flat[first:second], flat[second:]
        self.running = True
        with torch.no_grad():
            logits = self.module(weights, pools, rows)
        self.running = False
        if self.after:
            named = dict(
                zip((name.partition(".")[2] for name in self.inputs.names), flat, strict=True)
            )
            self.after(named, logits)
        return [logits]


def check(bucket: Bucket = EXTEND, after: After | None = None, spec: EngineSpec = SPEC) -> None:
    run = Uncompiled(spec, bucket, after)
    prove(spec, bucket, run.inputs, run)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_native_ops_pass(dtype: str) -> None:
    spec = spec_of(dtype=dtype, extend_buckets="16x1,40x4")
    for bucket in spec.buckets:
        check(bucket, spec=spec)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("drafts", [1, 2])
def test_native_ops_pass_with_drafting(drafts: int, dtype: str) -> None:
    spec = spec_of(dtype=dtype, spec_depth=drafts)
    for bucket in spec.buckets:
        check(bucket, spec=spec)


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("tp", [2, 4])
def test_one_rank_of_several_passes(tp: int, drafts: int) -> None:
    """Without the others; prompts hold tokens of every rank."""
    spec = spec_of(tp=tp, spec_depth=drafts)
    for bucket in spec.buckets[1:]:
        check(bucket, spec=spec)


def test_faults_of_one_rank_of_several_are_found() -> None:
    """The first rank is proved alone, without what the others would add."""
    spec = spec_of(tp=2)
    for after in (_wrong_logit, _late_window, _lost_length, _other_token):
        with pytest.raises(FailedError):
            check(spec.buckets[-1], after, spec)


def test_a_context_shorter_than_a_bucket_passes() -> None:
    spec = spec_of(max_context=16, extend_buckets="64x1,64x4")
    for bucket in spec.buckets:
        check(bucket, spec=spec)


def test_noise_below_the_tolerance_passes() -> None:
    def noise(state: Named, logits: Tensor) -> None:
        logits += 1e-6

    check(after=noise)


def _wrong_logit(state: Named, logits: Tensor) -> None:
    logits[-2, 3] += 0.01


def _wrong_slot(state: Named, logits: Tensor) -> None:
    state["conv_mlp"][1, 1], state["conv_mlp"][1, 2] = (
        state["conv_mlp"][1, 2].clone(),
        state["conv_mlp"][1, 1].clone(),
    )


def _late_window(state: Named, logits: Tensor) -> None:
    window = state["conv_attn"][3, 1]
    window.copy_(window.roll(1, 0))


def _lost_kv(state: Named, logits: Tensor) -> None:
    page = int(state["full_table"][1, 0])
    state["kv_full"][0, page, 1, :, 0] = 0


def _lost_snapshot(state: Named, logits: Tensor) -> None:
    state["conv_attn"][:, 1 + SPEC.max_running :] = 0


def _lost_length(state: Named, logits: Tensor) -> None:
    state["request_state"][1, table.LENGTH] -= 1


def _finished(state: Named, logits: Tensor) -> None:
    state["request_state"][1, table.FINISH] = 1


def _repeated_update(state: Named, logits: Tensor) -> None:
    state["page_updates"][0, 1] = 1


def _standing_counter(state: Named, logits: Tensor) -> None:
    state["step_counter"][1] += 1


def _other_token(state: Named, logits: Tensor) -> None:
    line = int(state["step_counter"][0] - 1) % SPEC.pools.results
    state["results_int"][line, :, table.RESULT_HEADER] += 1


def _not_a_number(state: Named, logits: Tensor) -> None:
    state["kv_window"][0, 1, 0, 0, 0, 0] = float("nan")


FAULTS: dict[str, tuple[After, str]] = {
    "wrong logit": (_wrong_logit, "logits"),
    "state in another slot": (_wrong_slot, "pool conv_mlp"),
    "conv window off by one": (_late_window, "pool conv_attn"),
    "keys and values lost": (_lost_kv, "pool kv_full"),
    "snapshot lost": (_lost_snapshot, "pool conv_attn"),
    "length lost": (_lost_length, "pool request_state"),
    "finished too early": (_finished, "pool request_state"),
    "one-shot line left": (_repeated_update, "row input page_updates"),
    "counter": (_standing_counter, "pool step_counter"),
    "another token": (_other_token, "row"),
    "not a number": (_not_a_number, "pool kv_window"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_named(fault: str) -> None:
    after, where = FAULTS[fault]
    with pytest.raises(FailedError, match=f"gate twin: found step . {where}") as caught:
        check(after=after)
    assert "\n" not in str(caught.value)


def test_decode_faults_are_found_too() -> None:
    for after in (_wrong_logit, _late_window, _lost_length, _other_token):
        with pytest.raises(FailedError):
            check(DECODE, after)


@pytest.mark.parametrize(("op", "argument"), [("boundary", 10), ("attention_prologue", 13)])
def test_an_op_without_its_snapshot_scatter_is_found(
    op: str, argument: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real = Uncompiled(SPEC, EXTEND), getattr(block, op)

    def faulty(*arguments: Any) -> Any:
        if run.running:
            nowhere = torch.zeros_like(arguments[argument])
            arguments = (*arguments[:argument], nowhere, *arguments[argument + 1 :])
        return real(*arguments)

    monkeypatch.setattr(block, op, faulty)
    with pytest.raises(FailedError, match="pool conv_"):
        prove(SPEC, EXTEND, run.inputs, run)


def test_a_window_read_from_another_slot_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run, real = Uncompiled(SPEC, DECODE), boundary

    def faulty(*arguments: Any) -> Any:
        if run.running:
            arguments = (*arguments[:7], arguments[7].roll(1), *arguments[8:])
        return real(*arguments)

    monkeypatch.setattr(block, "boundary", faulty)
    with pytest.raises(FailedError, match="step 2"):
        prove(SPEC, DECODE, run.inputs, run)


def test_bfloat16_programs_must_be_equal_to_the_bit() -> None:
    spec = spec_of(dtype="bf16")

    def one_ulp(state: Named, logits: Tensor) -> None:
        state["conv_mlp"][0, 1, 0, :1].view(torch.int16).add_(1)

    with pytest.raises(FailedError, match="pool conv_mlp"):
        check(EXTEND, one_ulp, spec)


def _lost_draft_kv(state: Named, logits: Tensor) -> None:
    page = int(state["window_table"][1, 0])
    state["kv_draft_window"][0, page, 1, :, DRAFTING.spec_depth] += 1


def _late_draft_window(state: Named, logits: Tensor) -> None:
    window = state["conv_draft_mlp"][1, 1]
    window.copy_(window.roll(1, 0))


def _other_draft(state: Named, logits: Tensor) -> None:
    state["draft_tokens"][2, -1] += 1


def _lost_hidden(state: Named, logits: Tensor) -> None:
    state["draft_hidden"][1] = 0


def _lost_tokens(state: Named, logits: Tensor) -> None:
    state["recent_tokens"][2] += 1


def _no_drafts(state: Named, logits: Tensor) -> None:
    state["request_state"][1, table.DRAFTS] = 0


def _one_more_accepted(state: Named, logits: Tensor) -> None:
    state["request_state"][2, table.LENGTH] += 1


def _other_accepted(state: Named, logits: Tensor) -> None:
    line = int(state["step_counter"][0] - 1) % DRAFTING.pools.results
    state["results_int"][line, 2, table.RESULT_HEADER] += 1


DRAFT_FAULTS: dict[str, tuple[After, str]] = {
    "keys and values of a depth": (_lost_draft_kv, "pool kv_draft_window"),
    "a depth's window": (_late_draft_window, "pool conv_draft_mlp"),
    "another draft": (_other_draft, "pool draft_tokens"),
    "the target's last rows": (_lost_hidden, "pool draft_hidden"),
    "the last tokens": (_lost_tokens, "pool recent_tokens"),
    "drafts that do not count": (_no_drafts, "pool request_state"),
    "a token too many": (_one_more_accepted, "pool request_state"),
    "another token": (_other_accepted, "row 2"),
}


@pytest.mark.parametrize("bucket", [VERIFY, DRAFTING_EXTEND], ids=lambda bucket: bucket.kind)
@pytest.mark.parametrize("fault", DRAFT_FAULTS)
def test_a_fault_of_drafting_is_found_and_named(fault: str, bucket: Bucket) -> None:
    after, where = DRAFT_FAULTS[fault]
    with pytest.raises(FailedError, match=f"gate twin: found step . {where}"):
        check(bucket, after, DRAFTING)


@pytest.mark.parametrize("drafts", [1, 2])
def test_a_script_of_rounds_has_every_number_of_right_guesses(drafts: int) -> None:
    """As planted, it comes out; rounds begin before the grid too and cross it."""
    spec = spec_of(spec_depth=drafts, max_running=8, decode_buckets="9")
    bucket, crossed = spec.buckets[0], 0
    first, *rounds = script(spec, bucket)
    assert [chunk.guesses for chunk in first] == [None] * 8
    for chunks in rounds:
        assert {chunk.guesses.right for chunk in chunks if chunk.guesses} == set(range(drafts + 1))
        assert all(len(c.guesses.tokens) == drafts for c in chunks[1:] if c.guesses)
    for before, after in pairwise(rounds):
        for chunk, following in zip(before, after, strict=True):
            assert chunk.guesses and following.start == chunk.start + 1 + chunk.guesses.right
            crossed += chunk.start // spec.snapshot_grid < following.start // spec.snapshot_grid
    assert crossed > 0


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize("tokens", [16, 100])
def test_a_script_fills_a_bucket_within_every_limit(rows: int, tokens: int) -> None:
    spec = spec_of(max_context=128, max_running=8, extend_buckets=f"{tokens}x{rows}")
    bucket = spec.buckets[-1]
    steps = script(spec, bucket)
    assert len(steps) == STEPS
    lengths: dict[int, int] = {}
    for chunks in steps:
        assert 1 <= len(chunks) <= max(1, rows - 1)
        assert sum(chunk.count for chunk in chunks) <= tokens
        assert len({chunk.slot for chunk in chunks}) == len(chunks)
        given = [slot for chunk in chunks for slot in chunk.snapshots]
        assert len(set(given)) == len(given)
        assert all(spec.max_running < slot < spec.pools.slots for slot in given)
        assert all(len(chunk.snapshots) <= destinations(spec, bucket) for chunk in chunks)
        for chunk in chunks:
            assert chunk.start == lengths.get(chunk.slot, 0)
            assert chunk.admit == (chunk.start == 0)
            lengths[chunk.slot] = chunk.start + chunk.count
            assert 1 <= chunk.slot <= spec.max_running
    assert max(lengths.values()) <= spec.max_context
    assert any(not chunk.tokens for chunk in steps[-1]), "some row goes on from its own token"
    assert any(chunk.sample for chunk in steps[-1])


@pytest.mark.parametrize("name", ["inkling-small", "inkling"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("drafts", "tp"), [(0, 1), (8, 1), (8, 8)])
def test_a_reduced_model_is_small_and_the_same_in_all_but_widths(
    name: str, device: str, drafts: int, tp: int
) -> None:
    shape = preset(name)
    assert shape is not None
    options = BuildOptions(model=name, spec_depth=drafts, tp=tp, max_running=16)
    spec = make_spec(options, name, shape, device)
    assert not is_small(spec, step_weights(spec))
    small = reduced(spec)
    assert is_small(small, step_weights(small))
    assert (small.buckets, small.tp) == (spec.buckets, tp)
    assert (small.dtype, small.page_size, small.snapshot_grid) == (
        spec.dtype,
        spec.page_size,
        spec.snapshot_grid,
    )
    for field in ("layers", "local_layers", "dense_layers", "experts_per_token", "shared_experts"):
        assert getattr(small.shape, field) == getattr(spec.shape, field)
    assert [e.name for e in weight_entries(small)] == [e.name for e in weight_entries(spec)]
    assert small.spec_depth == drafts and small.draft_vocab <= small.shape.real_vocab


@pytest.mark.parametrize(("drafts", "tp"), [(0, 1), (8, 1), (8, 8)])
def test_the_reduced_step_of_a_published_model_passes(drafts: int, tp: int) -> None:
    shape = preset("inkling-small")
    assert shape is not None
    sizes: dict[str, Any] = {"decode_buckets": "4", "extend_buckets": "16x4", "max_running": 4}
    small = reduced(
        make_spec(BuildOptions(model="s", spec_depth=drafts, tp=tp, **sizes), "s", shape, "cpu")
    )
    for bucket in small.buckets:
        check(bucket, spec=small)
