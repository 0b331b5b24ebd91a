"""Pools and weights of more than 2^31 elements: what lies beyond is read and written in its place.

A case's layer becomes the last of a pool so large that its offset needs 64 bits. Offsets of 32 bits
would wrap into an unmapped or foreign address.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.launches import assert_close, assert_near, launch_cases
from torch import Tensor
from torch.utils._pytree import tree_leaves

from inkling_engine.kernels._cases import Case, normal
from inkling_engine.kernels._op import Op
from inkling_engine.kernels.experts import experts
from inkling_engine.kernels.ops import OPS
from inkling_engine.kernels.router.cases import ROUTE_SCALE, Gate, gate_weights
from inkling_engine.kernels.router.reference import router

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
BEYOND = 2**31
POOLS = ("kv_pool", "conv_pool")
PAGED = [
    pytest.param(op, case, id=f"{op.name}-{case.name}")
    for op in OPS
    if set(POOLS) & set(re.findall(r"\w+", op.signature))
    for case in launch_cases(op)[1::4]
]


def parameters(op: Op) -> list[str]:
    """Names of an op's arguments."""
    inner = op.signature[1 : op.signature.index(") ->")]
    return [re.sub(r"\(.!\)", "", part).split()[-1] for part in inner.split(", ")]


def behind(idle: int, tensor: Tensor) -> Tensor:
    """`tensor` on the GPU behind `idle` more entries of its first dimension, all NaN."""
    large = torch.full(
        (idle + len(tensor), *tensor.shape[1:]), torch.nan, dtype=tensor.dtype, device="cuda"
    )
    large[idle:] = tensor
    return large


@pytest.mark.parametrize(("op", "case"), PAGED)
def test_a_layer_beyond_2_to_the_31(op: Op, case: Case) -> None:
    arguments = [a.clone() if isinstance(a, Tensor) else a for a in case.arguments]
    theirs = dict(zip(parameters(op), arguments, strict=True))
    layer, held = theirs["layer"], [name for name in POOLS if name in theirs]
    before = BEYOND // theirs[held[0]][0].numel() + 1
    ours: dict[str, Any] = {
        name: value.cuda() if isinstance(value, Tensor) else value for name, value in theirs.items()
    }
    for name in held:
        ours[name] = behind(before, theirs[name][layer][None])
    ours["layer"] = before
    wanted, found = op.reference(*theirs.values()), op.launch(*ours.values())
    for one, other in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        assert_close(one, other, case.tolerance)
    for name in held:
        assert_close(ours[name][before], theirs[name][layer], case.tolerance)
        assert ours[name][:before].isnan().all(), "written in a wrong place"


@pytest.mark.parametrize("tokens", [1, 5, 40, 300])
def test_experts_beyond_2_to_the_31(tokens: int) -> None:
    gate, width, routed = Gate(1024, 6, 2, 2), 512, BEYOND // (2 * 512 * 1024) + 8
    y = normal(tokens, gate.hidden, dtype=torch.bfloat16)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    chosen, weights, places = router(
        y, *gate_weights(gate, torch.bfloat16), starts, gate.top_k, gate.shared, ROUTE_SCALE
    )
    count = gate.routed + gate.shared
    w13 = normal(count, 2 * width, gate.hidden, dtype=torch.bfloat16, scale=gate.hidden**-0.5)
    w2 = normal(count, gate.hidden, width, dtype=torch.bfloat16, scale=width**-0.5)
    wanted = experts.reference(y, w13, w2, chosen, weights, places, starts)
    idle = routed - gate.routed  # experts that nobody chose, in front of the others
    large = [behind(idle, weight) for weight in (w13, w2)]
    assert large[0].numel() > BEYOND
    wide = torch.cat([torch.zeros(tokens, idle, dtype=places.dtype), places], dim=1)
    found = experts.launch(
        y.cuda(), *large, (chosen + idle).cuda(), weights.cuda(), wide.cuda(), starts.cuda()
    )
    assert_near(found.cpu(), wanted)
