"""The kernel benchmark's cases at the tiny model's shapes, with native ops in place of launches.

Every op has cases, each case's inputs are valid and pass its own check, and the check notices a
wrong result: what is timed on a GPU has been compared with the reference there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor
from torch.utils._pytree import tree_leaves

from inkling_engine.kernels._op import Op
from inkling_engine.kernels.ops import OPS

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import bench_kernels
from bench import attention_ops, timing, token_ops
from bench.work import Case, Target

pytestmark = pytest.mark.usefixtures("native_library")
ROWS = (1, 5, 130)
TARGET = Target("inkling-tiny", 2, "cpu", own_only=True)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts that the tiny model has, and two copies of each call."""
    monkeypatch.setattr(timing, "MOST_COPIES", 2)
    monkeypatch.setattr(token_ops, "CONTEXT", 70)
    monkeypatch.setattr(attention_ops, "CONTEXTS", (40, 300))
    monkeypatch.setattr(attention_ops, "EXTEND_END", 320)
    monkeypatch.setattr(attention_ops, "LONG", 200)


def cases(op: str) -> list[Case]:
    """The cases of one op."""
    return [case for case in bench_kernels.all_cases(TARGET, ROWS) if case.op == op]


OP_NAMES = pytest.mark.parametrize("op", [op.name for op in OPS])


@OP_NAMES
def test_cases_are_valid_and_pass_their_check(op: str) -> None:
    found = cases(op)
    assert found, f"{op} is not timed"
    for case in found:
        work = case.make()
        work.check()
        assert work.moved > 0
        for call in work.sides["ours"]:
            call()


@OP_NAMES
def test_a_wrong_result_fails_the_check(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = Op.__call__

    def wrong(self: Op, *arguments: Any) -> Any:
        results = genuine(self, *arguments)
        tensors = [leaf for leaf in tree_leaves((results, arguments)) if isinstance(leaf, Tensor)]
        tensors[0].add_(1)
        return results

    for case in cases(op):
        work = case.make()
        monkeypatch.setattr(Op, "__call__", wrong)
        with pytest.raises((AssertionError, RuntimeError)):
            work.check()
        monkeypatch.setattr(Op, "__call__", genuine)


def test_shapes_are_those_of_one_rank_of_inkling_small() -> None:
    shape = Target("inkling-small", 8, "cpu").shape
    sizes = {name: size(shape) for name, size in token_ops.MATRICES.items()}
    assert sizes["qkvr"] == (832, 4096)
    assert sizes["o"] == (4096, 512)
    assert sizes["dense w13"] == (4096, 4096)
    assert sizes["dense w2"] == (4096, 2048)
    assert (shape.vocab, shape.expert_width) == (25128, 256)


def test_floor_is_the_longer_of_bytes_and_operations() -> None:
    ceilings = timing.Ceilings(bandwidth=2e12, arithmetic=1e12)
    assert ceilings.floor_us(4e6, 1e6) == pytest.approx(2.0)
    assert ceilings.floor_us(4e6, 5e6) == pytest.approx(5.0)


def test_idle_time_is_what_nothing_covers() -> None:
    spans = [(10.0, 12.0), (11.0, 20.0), (13.0, 14.0), (23.0, 25.0), (25.0, 26.0)]
    events = [SimpleNamespace(time_range=SimpleNamespace(start=a, end=b)) for a, b in spans]
    assert timing.idle_before(events) == ([0.0, 0.0, 0.0, 3.0, 0.0], 16.0)
