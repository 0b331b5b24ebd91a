"""The exported step is a pure list of our ops; planted faults are refused by export or by a gate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from support.checkpoints import appendix_a_config
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from inkling_engine.artifacts.errors import FailedError
from inkling_engine.artifacts.spec import Bucket, EngineSpec, ModelShape
from inkling_engine.compile import export
from inkling_engine.compile.backends import aoti
from inkling_engine.compile.export import Inputs, export_step, program_inputs
from inkling_engine.compile.models.inkling.shape import from_config, preset
from inkling_engine.compile.options import BuildOptions, make_spec
from inkling_engine.compile.pools import destinations
from inkling_engine.compile.steps import step
from inkling_engine.compile.weights import step_weights
from inkling_engine.kernels.ops import OPS
from inkling_engine.kernels.state import DTYPES, Layout

SHAPE = from_config(appendix_a_config(), {})
Tensors = Mapping[str, Tensor]
Fault = Callable[[Tensors, Tensors, Callable[[], Tensor]], Tensor]


class Exported(NamedTuple):
    """What `export_step` gave, and the inputs that it was asked for."""

    program: torch.export.ExportedProgram
    ops: tuple[str, ...]
    inputs: Inputs


def two_layers() -> ModelShape:
    return msgspec.structs.replace(SHAPE, layers=2, local_layers=(0,), dense_layers=1)


def spec_of(shape: ModelShape = SHAPE, **given: Any) -> EngineSpec:
    sizes = {"page_size": 8, "snapshot_grid": 16, "max_running": 2} | given
    options = BuildOptions(model="toy", decode_buckets="2", extend_buckets="40x2", **sizes)
    return make_spec(options, "toy", shape, "cpu")


SPEC, TWO_LAYERS = spec_of(), spec_of(two_layers())
DECODE, EXTEND = SPEC.buckets


@cache
def exported(bucket: Bucket, spec: EngineSpec = SPEC) -> Exported:
    inputs = program_inputs(spec, bucket, step_weights(spec))
    return Exported(*export_step(spec, bucket, inputs), inputs)


def export_faulty() -> torch.export.ExportedProgram:
    """Export whatever step is planted now, of two layers."""
    inputs = program_inputs(TWO_LAYERS, DECODE, step_weights(TWO_LAYERS))
    return export_step(TWO_LAYERS, DECODE, inputs)[0]


def calls(program: torch.export.ExportedProgram, name: str) -> list[dict[str, Any]]:
    """Arguments by name of every call of the op `name`, in order."""
    op = getattr(torch.ops.inkling, name).default
    names = [argument.name for argument in op._schema.arguments]
    nodes = [node for node in program.graph.nodes if node.target == op]
    return [dict(zip(names, node.args, strict=True)) for node in nodes]


def output_of(node: Node, op: str) -> int:
    """Which output of the program's one call of `op` the node is."""
    source, index = node.args
    assert node.target.__name__ == "getitem" and isinstance(source, Node)  # type: ignore[union-attr]
    assert str(source.target) == f"inkling.{op}.default"
    assert isinstance(index, int)
    return index


@pytest.mark.parametrize("bucket", SPEC.buckets, ids=lambda bucket: bucket.kind)
def test_a_step_is_a_list_of_our_ops_each_the_right_number_of_times(bucket: Bucket) -> None:
    _, ops, _ = exported(bucket)
    names = [op.partition("(")[0] for op in ops]
    layers, dense = SHAPE.layers, SHAPE.dense_layers
    assert Counter(names) == {
        "step_metadata": 1,
        "embed_norm": 1,
        "rmsnorm": 1,
        "linear": 2 * layers + 2 * dense,
        **({} if bucket.kind == "decode" else {"attention_prologue": layers}),
        f"attention_{bucket.kind}": layers,
        "boundary": 2 * layers,
        "swiglu": dense,
        "router": layers - dense,
        "experts": layers - dense,
        "head": 1,
        "sample": 1,
        "commit": 1,
    }
    assert names[0] == "step_metadata"
    assert names[-3:] == ["head", "sample", "commit"]
    assert set(names) <= {op.name for op in OPS}


def test_attributes_come_from_the_shape_and_are_listed() -> None:
    _, ops, _ = exported(EXTEND)
    listed = [op for op in ops if op.startswith("attention_extend")]
    assert listed == [
        f"attention_extend(layer={SHAPE.index_in_kind(i)}, window={SHAPE.kind(i).window}, first=0)"
        for i in range(SHAPE.layers)
    ]
    prologues = [op for op in ops if op.startswith("attention_prologue")]
    floors = [int(op.partition("log_floor=")[2].partition(",")[0]) for op in prologues]
    assert floors == [0 if SHAPE.is_local(i) else SHAPE.log_floor for i in range(SHAPE.layers)]
    assert ops[0] == "step_metadata(page_size=8, snapshot_grid=16, destinations=3, drafts=0)"
    assert f"head(scale={1 / SHAPE.mup}, vocab={SHAPE.real_vocab})" in ops
    boundaries = [op for op in ops if op.startswith("boundary")]
    calls = 2 + 2 * SHAPE.layers
    assert boundaries == [
        f"boundary(layer={i // 2}, call={1 + i}, calls={calls}, eps=1e-06, world=1)"
        for i in range(2 * SHAPE.layers)
    ]


@pytest.mark.parametrize("grid", [8, 16, 64])
@pytest.mark.parametrize("kind", ["decode", "extend"])
def test_the_snapshot_scatter_is_in_every_program(grid: int, kind: str) -> None:
    spec = spec_of(snapshot_grid=grid)
    bucket = next(bucket for bucket in spec.buckets if bucket.kind == kind)
    program, ops, _ = exported(bucket, spec)
    assert f"destinations={destinations(spec, bucket)}," in ops[0]
    attention = "attention_decode" if kind == "decode" else "attention_prologue"
    scattering = calls(program, attention) + calls(program, "boundary")
    assert len(scattering) == 3 * SHAPE.layers
    for call in scattering:
        assert output_of(call["destination_slots"], "step_metadata") == 9
        assert output_of(call["destination_offsets"], "step_metadata") == 10


@pytest.mark.parametrize("bucket", SPEC.buckets, ids=lambda bucket: bucket.kind)
def test_inputs_are_the_manifests_tensors_and_nothing_else(bucket: Bucket) -> None:
    program, _, inputs = exported(bucket)
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    entries: list[Layout] = [*inputs.weights, *inputs.pools, *inputs.rows]
    assert len(placeholders) == len(inputs.names) == len(entries) == len(set(inputs.names))
    for node, entry in zip(placeholders, entries, strict=True):
        value = node.meta["val"]
        assert isinstance(value, FakeTensor)
        assert (tuple(value.shape), value.dtype) == (entry.shape, DTYPES[entry.dtype]), entry.name
    kinds = {spec.kind.name for spec in program.graph_signature.input_specs}
    assert kinds == {"USER_INPUT"}
    assert not (program.constants or program.state_dict)


def test_the_logits_are_the_only_output() -> None:
    program, _, _ = exported(DECODE)
    (output,) = program.graph_signature.user_outputs
    (node,) = (node for node in program.graph.nodes if node.name == output)
    assert str(node.target) == "inkling.head.default"
    assert tuple(node.meta["val"].shape) == (DECODE.rows, SHAPE.real_vocab)


def test_every_pool_reaches_the_program() -> None:
    """An unused input would mean state that no step keeps."""
    for bucket in SPEC.buckets:
        program, _, inputs = exported(bucket)
        placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
        pairs = zip(placeholders, inputs.names, strict=True)
        assert [name for node, name in pairs if not node.users] == []


def test_buckets_of_a_kind_differ_only_in_sizes() -> None:
    spec = spec_of()
    other = Bucket(kind="extend", rows=1, tokens=16)
    first, second = (exported(bucket, spec)[1] for bucket in (EXTEND, other))
    assert first[1:] == second[1:]


def test_a_published_model_exports_without_its_weights() -> None:
    shape = preset("inkling-small")
    assert shape is not None
    options = BuildOptions(model="inkling-small", decode_buckets="1", extend_buckets="64")
    spec = make_spec(options, "inkling-small", shape, "cpu")
    _, ops, _ = exported(spec.buckets[0], spec)
    assert sum(op.startswith("moe") for op in ops) == 40


def test_one_rank_of_eight_of_a_published_model_exports() -> None:
    shape = preset("inkling-small")
    assert shape is not None
    options = BuildOptions(model="small", tp=8, decode_buckets="2", extend_buckets="64x2")
    spec = make_spec(options, "inkling-small", shape, "cpu")
    program, ops, inputs = exported(spec.buckets[0], spec)
    shapes = {entry.name: entry.shape for entry in (*inputs.weights, *inputs.pools)}
    assert shapes["embed"] == shapes["head"] == (25128, shape.hidden)
    assert shapes["token_counts"] == (1 + spec.max_running, shape.real_vocab)
    assert {a["heads"] for a in calls(program, "attention_decode")} == {
        kind.heads // 8 for kind in (shape.full, shape.local)
    }
    assert f"head(scale={1 / shape.mup}, vocab=25128)" in ops
    total = 3 + 2 * shape.layers
    exchanging = ("embed_norm", "boundary", "candidates", "gather_logits")
    made = [calls(program, op) for op in exchanging]
    numbers = [(a["call"], a["calls"], a["world"]) for arguments in made for a in arguments]
    assert numbers == [(call, total, 8) for call in range(total)]
    (output,) = program.graph_signature.user_outputs
    (node,) = (node for node in program.graph.nodes if node.name == output)
    assert tuple(node.meta["val"].shape) == (2, 25128)


def _aten(weights: Tensors, pools: Tensors, run: Callable[[], Tensor]) -> Tensor:
    return run() * 2


def _index_put(weights: Tensors, pools: Tensors, run: Callable[[], Tensor]) -> Tensor:
    pool = pools["conv_attn"][0].view(-1)
    pool.index_put_((pools["step_counter"],), weights["embed"][0, :4])
    return run()


def _saved_alias(weights: Tensors, pools: Tensors, run: Callable[[], Tensor]) -> Tensor:
    saved = pools["kv_full"][0] + 0
    return run() + saved.mean()


FAULTS: dict[str, Fault] = {"aten": _aten, "index_put": _index_put, "saved_alias": _saved_alias}
GATES = {"index_put": "gate temporaries", "saved_alias": "gate re-inplacing"}


def plant(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Make the exported step a faulty one."""

    def faulty(
        spec: EngineSpec, bucket: Bucket, weights: Tensors, pools: Tensors, rows: Tensors
    ) -> Tensor:
        return fault(weights, pools, lambda: step(spec, bucket, weights, pools, rows))

    monkeypatch.setattr(export, "step", faulty)


@pytest.mark.parametrize("fault", FAULTS)
def test_export_refuses_whatever_is_not_an_op_of_ours(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, FAULTS[fault])
    with pytest.raises(AssertionError, match="not an op of ours: aten"):
        export_faulty()


def test_export_refuses_a_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = torch.ones(SHAPE.hidden)

    def faulty(
        spec: EngineSpec, bucket: Bucket, weights: Tensors, pools: Tensors, rows: Tensors
    ) -> Tensor:
        return step(spec, bucket, {**weights, "norm": norm}, pools, rows)

    monkeypatch.setattr(export, "step", faulty)
    with pytest.raises(AssertionError, match="constants in the exported step"):
        export_faulty()


def test_export_refuses_a_number_that_depends_on_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(weights: Tensors, pools: Tensors, run: Callable[[], Tensor]) -> Tensor:
        return run().narrow(0, 0, int(pools["step_counter"][0]))

    plant(monkeypatch, fault)
    with pytest.raises(Exception, match="data-dependent|not an op of ours"):
        export_faulty()


@pytest.mark.parametrize("fault", [None, *GATES])
def test_the_gates_refuse_what_would_copy(
    fault: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With export's own check out of the way. The C++ is generated and packed, not compiled."""
    options = aoti.options
    only = {"aot_inductor.package_cpp_only": True}
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(aoti, "options", lambda spec: options(spec) | only)
    monkeypatch.setattr(export, "_op_list", lambda program: ())
    if fault:
        plant(monkeypatch, FAULTS[fault])
    program, package = export_faulty(), tmp_path / "step.pt2"
    if not fault:
        aoti.compile_program(program, TWO_LAYERS, package, 0)
        assert package.exists()
        return
    with pytest.raises(FailedError, match=f"{GATES[fault]}: found"):
        aoti.compile_program(program, TWO_LAYERS, package, 0)
    assert not package.exists()


def test_program_options_follow_the_spec() -> None:
    found = aoti.options(spec_of(arch="x86-64-v2"))
    assert (found["cpp.march"], found["cpp.threads"], found["freezing"]) == ("x86-64-v2", 1, False)
    assert found["cpp.vec_isa_ok"] is False
