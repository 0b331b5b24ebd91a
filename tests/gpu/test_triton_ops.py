"""Every op's Triton launches on the GPU against the reference on the CPU, on all of its cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.launches import assert_close, launch_cases
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from inkling_engine.kernels._cases import Case
from inkling_engine.kernels._op import Op
from inkling_engine.kernels.ops import OPS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CASES = [
    pytest.param(op, case, id=f"{op.name}-{case.name}") for op in OPS for case in launch_cases(op)
]


def tensors(values: Any) -> list[Tensor]:
    """The tensors among an op's arguments or results."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize(("op", "case"), CASES)
def test_launch_matches_reference(op: Op, case: Case) -> None:
    theirs = tree_map_only(Tensor, torch.clone, case.arguments)
    ours = tree_map_only(Tensor, lambda tensor: tensor.cuda(), case.arguments)
    wanted, found = op.reference(*theirs), op.launch(*ours)
    for one, other in zip(tensors(found), tensors(wanted), strict=True):
        assert_close(one, other, case.tolerance)
    names = [a.name for a in getattr(torch.ops.inkling, op.name).default._schema.arguments]
    for name, one, other in zip(names, ours, theirs, strict=True):
        if isinstance(one, Tensor) and name != "exchange":  # see test_exchange
            assert_close(one, other, case.tolerance)
