"""Every op against its reference, on all of its cases: values, mutation, shapes, schema.

The reference is the specification. Mutated arguments are compared whole: what the reference leaves
alone must keep its bytes, and so must every argument that the schema does not declare as written.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from inkling_engine.kernels._cases import Case
from inkling_engine.kernels._exchange import HEADER
from inkling_engine.kernels._op import Op
from inkling_engine.kernels.ops import OPS

pytestmark = pytest.mark.usefixtures("native_library")

OP_CASES: dict[str, list[Case]] = {op.name: op.cases.cases() for op in OPS}
CASES = [
    pytest.param(op, case, id=f"{op.name}-{case.name}") for op in OPS for case in OP_CASES[op.name]
]
NO_ACTIVATIONS = {
    "step_metadata",
    "gather_logits",
    "sample",
    "candidates",
    "resample",
    "commit",
    "draft_metadata",
    "draft_sample",
    "draft_candidates",
}
OWN_FORMAT = {"candidates", "draft_candidates"}  # ranks exchange what only the same code reads
OPS_BY_NAME = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def clone(arguments: Any) -> Any:
    """The arguments with every tensor copied."""
    return tree_map_only(Tensor, torch.clone, arguments)


def tensors(values: Any) -> list[Tensor]:
    """The tensors among an op's arguments or results."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def written(op: Op) -> list[bool]:
    """For every argument whether the schema declares it as written."""
    schema = getattr(torch.ops.inkling, op.name).default._schema
    return [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]


def raw(tensor: Tensor) -> Tensor:
    """The tensor's bytes [..., element size]."""
    return tensor.contiguous().unsqueeze(-1).view(torch.uint8)


def assert_close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Integers equal; floats within tolerance * max(1, max|wanted|), NaN and infinities alike.

    Where the reference rounds once to bf16, the same value all but always rounds the same way: a
    missing or a second rounding shows in many elements.
    """
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    if not wanted.is_floating_point():
        assert torch.equal(found, wanted)
        return
    if wanted.dtype == torch.bfloat16:
        different = (found != wanted) & ~wanted.isnan()
        assert int(different.sum()) <= max(1, wanted.numel() // 100), "rounded otherwise"
    found, wanted = found.double(), wanted.double()
    finite = wanted[wanted.isfinite()].abs()
    scale = max(1.0, float(finite.max())) if len(finite) else 1.0
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance * scale, equal_nan=True)


@pytest.mark.parametrize(("op", "case"), CASES)
def test_native_matches_reference(op: Op, case: Case) -> None:
    theirs, ours = clone(case.arguments), clone(case.arguments)
    wanted = op.reference(*theirs)
    found = op(*ours)
    assert len(tensors(found)) == len(tensors(wanted))
    for one, other in zip(tensors(found), tensors(wanted), strict=True):
        assert_close(one, other, case.tolerance)
    schema = getattr(torch.ops.inkling, op.name).default._schema
    names = [argument.name for argument in schema.arguments]
    for name, before, reference, native, mutable in zip(
        names, case.arguments, theirs, ours, written(op), strict=True
    ):
        if not isinstance(before, Tensor):
            continue
        if name == "exchange" and op.name in OWN_FORMAT:
            before, reference, native = (t[:HEADER] for t in (before, reference, native))
        kept = (raw(reference) == raw(before)).all(-1)
        assert mutable or kept.all(), "the reference writes an argument that its schema does not"
        assert torch.equal(raw(native)[kept], raw(before)[kept]), (
            "bytes outside the mutation changed"
        )
        assert_close(native[~kept], reference[~kept], case.tolerance)


@OPS_BY_NAME
def test_every_declared_mutation_happens(op: Op) -> None:
    changed = [False] * len(written(op))
    for case in OP_CASES[op.name]:
        ours = clone(case.arguments)
        op(*ours)
        for i, (before, after) in enumerate(zip(case.arguments, ours, strict=True)):
            changed[i] |= isinstance(before, Tensor) and not torch.equal(raw(before), raw(after))
    assert changed == written(op)


@pytest.mark.parametrize(("op", "case"), CASES)
def test_fake_matches_native(op: Op, case: Case) -> None:
    real = tensors(op(*clone(case.arguments)))
    mode = FakeTensorMode()
    fake = tensors(op(*tree_map_only(Tensor, mode.from_tensor, case.arguments)))
    assert [(t.shape, t.dtype, t.stride()) for t in fake] == [
        (t.shape, t.dtype, t.stride()) for t in real
    ]


@OPS_BY_NAME
def test_schema_holds(op: Op) -> None:
    overload = getattr(torch.ops.inkling, op.name).default
    utilities = ("test_schema", "test_faketensor")
    for case in OP_CASES[op.name][:2]:  # every case's mutation and shapes are checked above
        torch.library.opcheck(overload, clone(case.arguments), test_utils=utilities)


@OPS_BY_NAME
def test_op_has_cases_in_every_dtype(op: Op) -> None:
    cases = OP_CASES[op.name]
    assert cases and len({case.name for case in cases}) == len(cases)
    leaves = [leaf for case in cases for leaf in tensors(case.arguments)]
    assert op.name in NO_ACTIVATIONS or {torch.float32, torch.bfloat16} <= {t.dtype for t in leaves}


def test_a_wrong_result_is_seen() -> None:
    """The comparison itself: values, dtype, NaN and shape."""
    right = torch.tensor([1.0, 2.0, torch.nan])
    assert_close(right + 1e-7, right, tolerance=1e-6)
    for wrong in (right + 1e-3, right.nan_to_num(), right.double(), right[:2]):
        with pytest.raises(AssertionError):
            assert_close(wrong, right, tolerance=1e-6)
