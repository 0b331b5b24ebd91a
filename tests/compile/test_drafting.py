"""Engines that draft: options, buckets, pools, the bill, the weights that are read, the programs."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints import appendix_a_config, tiny_config

from inkling_engine.artifacts.errors import UsageError
from inkling_engine.artifacts.layout import program_name
from inkling_engine.artifacts.spec import Bucket, DraftShape, EngineSpec, ModelShape
from inkling_engine.compile.backends import aoti
from inkling_engine.compile.export import Inputs, export_step, program_inputs
from inkling_engine.compile.golden import record
from inkling_engine.compile.memory import memory_bill
from inkling_engine.compile.models.inkling.shape import from_config, preset
from inkling_engine.compile.options import BuildOptions, make_spec
from inkling_engine.compile.plan import make_plan
from inkling_engine.compile.pools import destinations, entry_bytes, pool_entries, row_entries
from inkling_engine.compile.program import workspace
from inkling_engine.compile.weights import step_weights
from inkling_engine.kernels import table
from inkling_engine.kernels.ops import OPS
from inkling_engine.kernels.state import random_weight

SHAPE = from_config(tiny_config(), {})  # depths 0 and 1 local, 2 full, a chain norm
NO_CHAIN = from_config(appendix_a_config(), {})  # depth 0 local, 1 full
DRAFT_POOLS = (
    *("kv_draft_full", "conv_kv_draft_full", "kv_draft_window", "conv_kv_draft_window"),
    *("conv_draft_attn", "conv_draft_mlp", "draft_hidden", "recent_tokens"),
)


def spec_of(shape: ModelShape = SHAPE, device: str = "cpu", **given: Any) -> EngineSpec:
    sizes: dict[str, Any] = {"page_size": 4, "snapshot_grid": 8, "max_running": 4}
    sizes |= {"decode_buckets": "1,4", "extend_buckets": "16x4", "max_context": 64} | given
    return make_spec(BuildOptions(model="toy", **sizes), "toy", shape, device)


def shapes(spec: EngineSpec) -> dict[str, tuple[int, ...]]:
    return {entry.name: entry.shape for entry in pool_entries(spec)}


def test_decode_buckets_become_verify_buckets() -> None:
    one, four, extend = spec_of(spec_depth=2).buckets
    assert one == Bucket(kind="verify", rows=1, tokens=3, drafts=2)
    assert four == Bucket(kind="verify", rows=4, tokens=12, drafts=2)
    assert extend == spec_of().buckets[-1]
    assert [program_name(b) for b in (one, four)] == ["verify-r0001-k02", "verify-r0004-k02"]


@pytest.mark.parametrize(
    ("shape", "given", "field", "expected"),
    [
        (SHAPE, {"spec_depth": 4}, "--spec-depth", "0 to 3"),
        (SHAPE, {"spec_depth": -1}, "--spec-depth", "0 to 3"),
        (SHAPE, {"spec_depth": 3, "page_size": 3, "snapshot_grid": 3}, "--spec-depth", "grid 3"),
        (SHAPE, {"draft_vocab": 64}, "draft_vocab", "--spec-depth"),
        (SHAPE, {"spec_depth": 1, "draft_vocab": 0}, "draft_vocab", "1 to 151"),
        (SHAPE, {"spec_depth": 1, "draft_vocab": 152}, "draft_vocab", "1 to 151"),
    ],
)
def test_what_cannot_be_drafted_is_refused(
    shape: ModelShape, given: dict[str, Any], field: str, expected: str
) -> None:
    with pytest.raises(UsageError) as caught:
        spec_of(shape, **given)
    assert caught.value.field == field and expected in caught.value.expected


def test_a_model_without_depths_says_so() -> None:
    bare = msgspec.structs.replace(
        SHAPE, drafts=DraftShape(depths=0, local_depths=(), chain_norm=False)
    )
    assert spec_of(bare).spec_depth == 0
    with pytest.raises(UsageError, match="--spec-depth: found 1; .* no draft depths"):
        spec_of(bare, spec_depth=1)


def test_the_draft_vocabulary() -> None:
    """All that is real or the first ids of it, however many ranks; 0 without drafting."""
    assert spec_of().draft_vocab == 0
    assert spec_of(spec_depth=1).draft_vocab == SHAPE.real_vocab
    assert spec_of(spec_depth=1, draft_vocab=64).draft_vocab == 64
    assert spec_of(spec_depth=1, tp=2).draft_vocab == SHAPE.real_vocab
    assert make_plan(BuildOptions(model="inkling-tiny", spec_depth=4)).spec.draft_vocab == 2040


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_pools_of_an_engine_that_drafts(drafts: int) -> None:
    spec, plain = spec_of(spec_depth=drafts), spec_of()
    found, before = shapes(spec), shapes(plain)
    assert set(found) == set(before) | set(DRAFT_POOLS)
    slots, rows, top = spec.pools.slots, 4, spec.limits.top_logprobs
    full, local = max(0, drafts - 2), min(2, drafts)
    heads, dim = SHAPE.full.kv_heads, SHAPE.full.head_dim
    assert found["kv_draft_full"] == (full, spec.pools.full_pages, 2, heads, 4, dim)
    assert found["conv_kv_draft_full"] == (full, slots, 3 + drafts, 2 * heads * dim)
    heads, dim = SHAPE.local.kv_heads, SHAPE.local.head_dim
    assert found["kv_draft_window"] == (local, spec.pools.window_pages, 2, heads, 4, dim)
    assert found["conv_kv_draft_window"] == (local, slots, 3 + drafts, 2 * heads * dim)
    for name in ("conv_draft_attn", "conv_draft_mlp"):
        assert found[name] == (drafts, slots, 3 + drafts, SHAPE.hidden)
    assert found["draft_hidden"] == (slots, drafts, SHAPE.hidden)
    assert found["recent_tokens"] == (slots, drafts)
    assert found["draft_tokens"] == (1 + spec.max_running, drafts)
    assert before["draft_tokens"] == (1 + spec.max_running, 1)
    for name in ("conv_kv_full", "conv_kv_window", "conv_attn", "conv_mlp"):
        assert (found[name][2], before[name][2]) == (3 + drafts, 3)
    line = (1 + drafts) * (1 + top)
    assert found["results_int"][1:] == (rows, table.RESULT_HEADER + line)
    assert found["results_float"][1:] == (rows, line)
    assert before["results_int"][1:] == (rows, table.RESULT_HEADER + 1 + top)
    assert destinations(spec, spec.buckets[1]) == 1


def test_tables_reach_as_far_ahead_as_draft_kv() -> None:
    plain, drafting = spec_of().pools, spec_of(spec_depth=3).pools
    assert (plain.table_width, drafting.table_width) == (16, 17)
    assert drafting.full_pages == 1 + 4 * 17


@pytest.mark.parametrize("drafts", [1, 2, 3])
@pytest.mark.parametrize(("page", "chunk"), [(1, 1), (1, 7), (4, 1), (4, 2), (4, 7), (8, 16)])
def test_a_ring_holds_window_chunk_and_drafts_at_any_alignment(
    page: int, chunk: int, drafts: int
) -> None:
    """A chunk, or a round, and the draft KV ahead of it."""
    sizes: dict[str, Any] = {"page_size": page, "snapshot_grid": 16}
    sizes |= {"extend_buckets": f"{chunk}x1"}
    ring = spec_of(spec_depth=drafts, max_context=1024, **sizes).pools.window_ring
    window, written = SHAPE.local.window, max(chunk, 1 + drafts) + drafts
    pages = {
        len({p // page for p in range(max(0, start - window + 1), start + written)})
        for start in range(3 * page * window)
    }
    assert ring == max(pages)


@pytest.mark.parametrize("page", [1, 2, 4, 64])
@pytest.mark.parametrize("drafts", [1, 3])
def test_a_replay_takes_the_page_lines_of_a_first_chunk_and_of_a_round(
    page: int, drafts: int
) -> None:
    spec = spec_of(spec_depth=drafts, page_size=page, snapshot_grid=64)
    for bucket in spec.buckets:
        entries, _ = row_entries(spec, bucket)
        lines = next(entry.shape[0] for entry in entries if entry.name == "page_updates")
        share = bucket.tokens // bucket.rows + drafts
        assert lines >= 2 * bucket.rows * -(-share // page)


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_the_bill_counts_the_depths_of_a_round(drafts: int) -> None:
    spec = spec_of(spec_depth=drafts)
    bill, sizes = memory_bill(spec), {e.name: entry_bytes(e) for e in pool_entries(spec)}
    tokens = spec.pools.full_pages * spec.page_size
    assert bill.draft_kv_per_token * tokens == sizes["kv_draft_full"]
    kept = [e for e in pool_entries(spec) if e.name.startswith(("conv_", "draft_hidden", "recent"))]
    assert {e.shape[0 if e.name in ("draft_hidden", "recent_tokens") else 1] for e in kept} == {
        spec.pools.slots
    }
    each = sum(entry_bytes(entry) for entry in kept) // spec.pools.slots
    assert bill.snapshots == spec.pools.snapshots * each
    pages = sizes["kv_draft_window"] // spec.pools.window_pages
    in_window = bill.kv_window_pages_per_request * pages * spec.pools.window_pages
    assert bill.conv_per_request + bill.draft_state_per_request == each + (
        in_window // sizes["kv_window"]
    )
    assert bill.pools == sum(sizes.values())
    assert bill.total > memory_bill(spec_of()).total


def test_pages_are_reduced_by_what_their_draft_kv_takes() -> None:
    plan = make_plan(BuildOptions(model="inkling-small", tp=8, spec_depth=8), 90 * 10**9)
    assert plan.bill.fits
    token = plan.bill.kv_full_per_token + plan.bill.draft_kv_per_token
    assert 0 <= plan.bill.device_memory - plan.bill.total < token * plan.spec.page_size


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_only_the_weights_of_the_depths_that_run_are_read(drafts: int) -> None:
    names = {entry.name for entry in step_weights(spec_of(spec_depth=drafts))}
    depths = {name.split(".")[1] for name in names if name.startswith("drafts.")}
    assert depths == set(map(str, range(drafts)))
    assert ("chain_norm" in names) == (drafts > 0)


@cache
def exported(shape: ModelShape, kind: str, **given: Any) -> tuple[Any, tuple[str, ...], Inputs]:
    spec = spec_of(shape, **given)
    bucket = next(bucket for bucket in spec.buckets if bucket.kind == kind and bucket.rows == 4)
    inputs = program_inputs(spec, bucket, step_weights(spec))
    return *export_step(spec, bucket, inputs), inputs


@pytest.mark.parametrize("shape", [SHAPE, NO_CHAIN], ids=["chain norm", "no chain norm"])
@pytest.mark.parametrize("kind", ["verify", "extend"])
def test_a_round_is_one_program_of_our_ops(shape: ModelShape, kind: str) -> None:
    program, ops, inputs = exported(shape, kind, spec_depth=2)
    names, layers, dense = [op.partition("(")[0] for op in ops], shape.layers, shape.dense_layers
    attention = Counter({f"attention_{kind}": layers + 2})
    assert Counter(names) == attention + Counter(
        {
            "step_metadata": 1,
            "embed_norm": 1,
            "rmsnorm": 1 + 2,
            "linear": 2 * layers + 2 * dense + 5 * 2,
            "attention_prologue": layers + 2,
            "boundary": 2 * (layers + 2),
            "swiglu": dense + 2,
            "router": layers - dense,
            "experts": layers - dense,
            "head": 1 + 2,
            "sample": 1,
            "commit": 1,
            "draft_metadata": 1,
            "draft_gather": 1,
            "draft_input": 2,
            "draft_sample": 2,
            "draft_commit": 1,
        }
    )
    assert set(names) <= {op.name for op in OPS}
    assert names.index("commit") < names.index("draft_metadata") < names.index("draft_gather")
    assert names[-1] == "draft_commit"
    empty = {f"pools.{entry.name}" for entry in inputs.pools if not math.prod(entry.shape)}
    pairs = zip(program.graph.nodes, inputs.names, strict=False)
    unused = {name for node, name in pairs if not node.users}
    assert unused <= empty, "state that no step keeps, or a weight that none reads"
    (output,) = program.graph_signature.user_outputs
    (node,) = (node for node in program.graph.nodes if node.name == output)
    assert node.meta["val"].shape == (12 if kind == "verify" else 4, shape.real_vocab)


def test_attributes_of_the_depths_come_from_the_shape() -> None:
    _, ops, _ = exported(SHAPE, "verify", spec_depth=3, draft_vocab=64)
    drafting = ops[ops.index(next(op for op in ops if op.startswith("draft_metadata"))) :]
    listed = [op for op in drafting if op.startswith("attention")]
    window = SHAPE.local.window
    assert [op for op in listed if "prologue" not in op] == [
        f"attention_verify(layer=0, window={window}, first=3, most=6)",
        f"attention_verify(layer=1, window={window}, first=3, most=6)",
        "attention_verify(layer=0, window=0, first=3, most=6)",
    ]
    assert all("log_floor=0," in op for op in listed if "prologue" in op)
    assert drafting[0] == "draft_metadata(page_size=4, drafts=3, most=4)"
    heads = [op for op in drafting if op.startswith("head")]
    assert heads == [f"head(scale={1 / SHAPE.mup}, vocab=64)"] * 3
    depths = [op.partition("depth=")[2][0] for op in drafting if op.startswith("draft_input")]
    assert depths == ["0", "1", "2"]
    _, ops, _ = exported(SHAPE, "extend", spec_depth=3)
    assert "draft_metadata(page_size=4, drafts=3, most=0)" in ops
    assert ops.count("attention_extend(layer=0, window=0, first=3)") == 1


@pytest.mark.parametrize("kind", ["verify", "extend"])
def test_the_gates_find_no_copy_in_a_round(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Drafts are written among the tokens that the next depth reads. The C++ is not compiled."""
    options = aoti.options
    only = {"aot_inductor.package_cpp_only": True}
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(aoti, "options", lambda spec: options(spec) | only)
    small = msgspec.structs.replace(SHAPE, layers=2, local_layers=(0,))
    program, _, _ = exported(small, kind, spec_depth=2)
    aoti.compile_program(program, spec_of(small, spec_depth=2), tmp_path / "round.pt2", 0)


def test_the_workspace_has_room_for_the_draft_phase() -> None:
    shape = preset("inkling-small")
    assert shape is not None
    for drafts in (1, 8):
        spec = make_spec(BuildOptions(model="s", tp=8, spec_depth=drafts), "s", shape, "cuda")
        for bucket in spec.buckets:
            samples = bucket.tokens if bucket.kind == "verify" else bucket.rows
            phase = bucket.tokens + bucket.rows * drafts
            most = 4 * max(samples * shape.real_vocab, phase * 2 * shape.hidden)
            assert workspace(spec, bucket) >= most


def test_golden_answers_are_those_of_the_engine_without_drafting(tmp_path: Path) -> None:
    plain = spec_of(max_running=1, decode_buckets="1", extend_buckets="16x1")
    drafting = spec_of(max_running=1, decode_buckets="1", extend_buckets="16x1", spec_depth=3)
    weights = {entry.name: random_weight(entry, seed=3) for entry in step_weights(drafting)}
    save_file(weights, tmp_path / "rank0.safetensors")
    with torch.no_grad():
        found = [record(spec, tmp_path / "rank0.safetensors", None) for spec in (plain, drafting)]
    assert found[0] == found[1]
    assert math.prod(map(len, found)) > 0
