"""Cases of router and experts, alone and together, at uniform routing over distinct weights.

Calls take turns over four layers' weights, and every call has rows of its own, so that no call
finds its experts, nor the shared ones, in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import mean
from typing import Any

import torch
from bench.peer import Peer
from bench.timing import Call, copies_for, nbytes
from bench.work import Case, Target, Work, assert_near, check_op
from torch import Tensor

from inkling_engine.kernels._op import Op
from inkling_engine.kernels.experts import experts
from inkling_engine.kernels.moe import moe
from inkling_engine.kernels.router import router

CUT_EITHER_WAY = 5e-3  # share of rows whose choice rounding of the logits may change


def cases(target: Target, rows: int) -> Iterator[Case]:
    """Router, experts with a given routing, and the block of both."""
    yield Case("router", "", rows, 0, partial(router_work, target, rows))
    yield Case("experts", "given routing", rows, 0, partial(experts_work, target, rows))
    yield Case(
        "moe" if rows == 1 else "experts", "block", rows, 0, partial(block_work, target, rows)
    )


def router_arguments(target: Target, y: Tensor, layer: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Arguments of the router for rows `y`."""
    s = target.shape
    starts = target.starts(len(y))
    return (y, *layer[:3], starts, s.experts_per_token, s.shared_experts, s.route_scale)


def expected_bytes(target: Target, rows: int) -> float:
    """About what a block moves: weights of the experts that uniform routing hits."""
    s = target.shape
    hit = s.experts * (1 - (1 - s.experts_per_token / s.experts) ** rows) + s.shared_experts
    return 6 * hit * s.expert_width * s.hidden


def inputs(target: Target, rows: int) -> list[tuple[Tensor, tuple[Tensor, ...]]]:
    """Rows and layer of each call."""
    layers = target.experts
    copies = copies_for(expected_bytes(target, rows), len(layers))
    hidden = target.shape.hidden
    return [(target.normal(rows, hidden), layers[i % len(layers)]) for i in range(copies)]


def router_work(target: Target, rows: int) -> Work:
    """The router alone."""
    calls = [router_arguments(target, y, layer) for y, layer in inputs(target, rows)]
    gate = calls[0][1]
    moved = nbytes(calls[0][0], gate) + rows * 8 * (gate.shape[0] - target.shape.experts)
    flops = 2.0 * rows * gate.numel()

    def check() -> None:
        found = router(*calls[0])
        with torch.device(target.device):
            wanted = router.reference(*calls[0])
        same = (found[0] == wanted[0]).all(-1)
        share = 1 - float(same.float().mean())
        assert share <= CUT_EITHER_WAY, f"experts of {share:.2%} of the rows differ"
        assert_near(found[1][same], wanted[1][same], "router weights")
        if bool(same.all()):
            for one, other in zip(found[2:], wanted[2:], strict=True):
                assert_near(one, other, "router grouping")

    return Work(moved, flops, {"ours": [partial(router, *call) for call in calls]}, check)


def experts_arguments(
    target: Target, y: Tensor, layer: tuple[Tensor, ...]
) -> tuple[tuple[Any, ...], Tensor]:
    """Arguments of the experts for rows `y`, and the experts [T, K] that the router chose.

    What the experts take of the router goes by the names in both schemas.
    """
    arguments = router_arguments(target, y, layer)
    results = zip(_schema(router).returns, router(*arguments), strict=True)
    named = {value.name: tensor for value, tensor in results}
    chosen = named["experts"]
    named |= {"chosen": chosen, "starts": arguments[4]}
    rest = (named[value.name] for value in _schema(experts).arguments[3:])
    return (y, *layer[3:], *rest), chosen


def _schema(op: Op) -> Any:
    return torch._C.parse_schema(f"inkling::{op.schema}")


def experts_work(target: Target, rows: int) -> Work:
    """The experts with a routing that is there already."""
    made = [experts_arguments(target, *pair) for pair in inputs(target, rows)]
    calls = [arguments for arguments, _ in made]
    moved, flops, hit = cost(target, rows, [chosen for _, chosen in made])
    sides = {"ours": [partial(experts, *call) for call in calls]}
    check = partial(check_op, experts, calls[0], target.device)
    return Work(moved, flops, sides, check, {"experts_hit": hit})


def block_work(target: Target, rows: int) -> Work:
    """Router and experts; with a peer its whole block and its routed experts alone."""
    pairs = inputs(target, rows)
    sides: dict[str, list[Call]] = {"ours": [partial(block, target, *pair) for pair in pairs]}
    made = [experts_arguments(target, *pair) for pair in pairs]
    moved, flops, hit = cost(target, rows, [chosen for _, chosen in made])
    gate = pairs[0][1][0]
    if target.peer is not None:
        sides |= peer_sides(target, target.peer, pairs)

    def check() -> None:
        y, layer = pairs[0]
        with torch.device(target.device):
            wanted = experts.reference(*made[0][0])
        assert_near(block(target, y, layer), wanted, "block")
        if target.peer is not None:
            routed, shared = sides["peer block"][0]()
            assert_near(
                (routed.float() + shared.float()).to(y.dtype), wanted, "peer block", tolerance=2e-2
            )

    moved += nbytes(gate)
    return Work(moved, flops + 2.0 * rows * gate.numel(), sides, check, {"experts_hit": hit})


def block(target: Target, y: Tensor, layer: tuple[Tensor, ...]) -> Tensor:
    """Router and experts in a row, in one op for one token as a step has them."""
    if len(y) == 1:
        _, *gate, starts, top, shared, scale = router_arguments(target, y, layer)
        one: Tensor = moe(y, *gate, *layer[3:], starts, top, shared, scale)
        return one
    out: Tensor = experts(*experts_arguments(target, y, layer)[0])
    return out


def peer_sides(
    target: Target, peer: Peer, pairs: list[tuple[Tensor, tuple[Tensor, ...]]]
) -> dict[str, list[Call]]:
    """The peer's block (its sum of routed and shared left out) and its routed experts alone."""
    s = target.shape
    states: dict[int, Any] = {}
    sides: dict[str, list[Call]] = {"peer block": [], "peer routed": []}
    for y, (gate, bias, scale, w13, w2) in pairs:
        key = id(gate)
        if key not in states:
            states[key] = peer.prepare_experts(gate, w13, w2, s.shared_experts)
        routing = (bias, scale, s.route_scale, s.experts_per_token)
        sides["peer block"].append(partial(peer.block, y, states[key], *routing))
        weights, ids, _ = peer.router(y, states[key], *routing)
        sides["peer routed"].append(partial(peer.routed, y, states[key], weights, ids))
    return sides


def cost(target: Target, rows: int, chosen: list[Tensor]) -> tuple[float, float, float]:
    """Bytes and operations of the experts, and the routed experts that a call hits on average."""
    s = target.shape
    hit = mean(len(each[:, : s.experts_per_token].unique()) for each in chosen)
    weights = 3 * s.expert_width * s.hidden
    slots = s.experts_per_token + s.shared_experts
    moved = 2 * (hit + s.shared_experts) * weights + 4 * rows * s.hidden
    return moved, 2.0 * rows * slots * weights, hit
