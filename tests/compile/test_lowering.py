"""What Inductor is helped with while it lowers: the answers are those that it would have had."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._higher_order_ops.triton_kernel_wrap as wrap

from inkling_engine.compile.backends import patches


class Kernel:
    """A kernel with three kinds of parameters; equal to itself alone."""

    arg_names = ("x", "y", "count", "eps", "WIDTH")

    def __init__(self) -> None:
        self.params = [
            SimpleNamespace(name=name, is_constexpr=name.isupper()) for name in self.arg_names
        ]


KERNEL = Kernel()
BF16, F32 = torch.empty(1, dtype=torch.bfloat16), torch.empty(1)
BASE = {"x": BF16, "y": F32, "count": 32, "eps": 1e-6, "WIDTH": 64}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The analyses that were made; each finds that y is written."""
    made: list[dict[str, Any]] = []

    def identify(kernel: Any, arguments: dict[str, Any], descriptors: Any) -> list[str]:
        made.append(arguments)
        return ["y"]

    monkeypatch.setattr(wrap, "identify_mutated_tensors", identify, raising=False)
    return made


def analyse(kernel: Any = KERNEL, **changed: Any) -> list[str]:
    found: list[str] = vars(wrap)["identify_mutated_tensors"](kernel, BASE | changed, {})
    return found


def test_launches_of_one_kind_are_analysed_once(asked: list[dict[str, Any]]) -> None:
    before = vars(wrap)["identify_mutated_tensors"]
    with patches.for_lowering("x86-64-v2"):
        analyse().clear()  # the caller's own list
        for same in ({}, {"count": 48}, {"eps": 1.0}, {"x": torch.empty(9, dtype=BF16.dtype)}):
            assert analyse(**same) == ["y"]
        with_warps = SimpleNamespace(fn=KERNEL)  # as torch wraps a launch that names its warps
        assert analyse(with_warps) == ["y"]
        assert len(asked) == 1
    assert vars(wrap)["identify_mutated_tensors"] is before


@pytest.mark.parametrize(
    "changed",
    [{"x": F32}, {"count": 1}, {"count": 33}, {"count": 1 << 40}, {"WIDTH": 65}, {"WIDTH": True}],
    ids=lambda changed: "-".join(changed),
)
def test_another_kind_is_analysed_again(
    asked: list[dict[str, Any]], changed: dict[str, Any]
) -> None:
    with patches.for_lowering("x86-64-v2"):
        analyse(**({"WIDTH": 1} if changed == {"WIDTH": True} else {}))
        analyse(**changed)
    assert len(asked) == 2


def test_another_kernel_is_analysed_again(asked: list[dict[str, Any]]) -> None:
    with patches.for_lowering("x86-64-v2"):
        analyse()
        analyse(Kernel())
    assert len(asked) == 2


def test_host_code_is_for_the_target() -> None:
    """Also of a torch that knows no such setting; the build machine may have wider vectors."""

    def flags(compiler: str) -> tuple[list[str], list[str]]:
        return ["O3", "march=native"], [compiler]

    assert patches.flags_for("x86-64-v2", flags)("g++") == (["O3", "march=x86-64-v2"], ["g++"])
    with pytest.raises(AssertionError):
        patches.flags_for("x86-64-v2", lambda compiler: (["O3"], []))("g++")
