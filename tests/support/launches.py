"""Cases and comparisons of Triton launches, for the interpreter and for a GPU."""

from __future__ import annotations

from torch import Tensor

from inkling_engine.kernels._cases import Case
from inkling_engine.kernels._op import Op

# Probabilities enter the second product of attention in bf16, and with many tokens each expert's
# row is rounded before they are summed, as spec 9.3 allows: the result is near the reference but
# is not its rounding.
ROUNDED_INSIDE = ("attention_decode", "attention_extend", "experts", "moe")
RELATIVE_L2 = 5e-3


def launch_cases(op: Op) -> list[Case]:
    """The op's cases but those in which rows start from slots that other rows write.

    A scheduler's source is the row's own slot or a snapshot, and one launch orders no more.
    """
    return [case for case in op.cases.cases() if not case.name.startswith("swapped")]


def assert_near(found: Tensor, wanted: Tensor) -> None:
    """Relative L2 distance within spec 9.3."""
    found, wanted = found.double(), wanted.double()
    distance = (found - wanted).norm() / wanted.norm().clamp_min(1e-30)
    assert float(distance) <= RELATIVE_L2, f"relative L2 {float(distance):.3g}"
