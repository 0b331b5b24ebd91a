"""Cases and comparisons of Triton launches, for the interpreter and for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from inkling_engine.kernels._cases import Case
from inkling_engine.kernels._op import Op

# Probabilities enter the second product of attention in bf16, and with many tokens each expert's
# row is rounded before they are summed, as spec 9.3 allows: the result is near the reference but
# is not its rounding.
ROUNDED_INSIDE = ("attention_decode", "attention_extend", "attention_verify", "experts", "moe")
RELATIVE_L2 = 5e-3
# Products are summed in another order than the reference's, and exp and log differ by an ulp.
LOOSER = 8.0


def launch_cases(op: Op) -> list[Case]:
    """The op's cases but those in which rows start from slots that other rows write.

    A scheduler's source is the row's own slot or a snapshot, and one launch orders no more.
    """
    return [case for case in op.cases.cases() if not case.name.startswith("swapped")]


def interpreted(file: str, *arguments: str) -> str:
    """What `file`, a test module, prints as a program in whose process Triton interprets; it may not
    fail. Triton decides when it is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    tests = str(Path(__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join([*filter(None, sys.path), tests])
    command = [sys.executable, file, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def assert_near(found: Tensor, wanted: Tensor) -> None:
    """Relative L2 distance within spec 9.3."""
    found, wanted = found.double(), wanted.double()
    distance = (found - wanted).norm() / wanted.norm().clamp_min(1e-30)
    assert float(distance) <= RELATIVE_L2, f"relative L2 {float(distance):.3g}"


def assert_close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Integers equal; floats within the case's tolerance, NaN alike."""
    found = found.cpu()
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    if not wanted.is_floating_point():
        assert torch.equal(found, wanted)
        return
    found, wanted = found.double(), wanted.double()
    finite = wanted[wanted.isfinite()].abs()
    scale = max(1.0, float(finite.max())) if len(finite) else 1.0
    limit = LOOSER * tolerance * scale
    torch.testing.assert_close(found, wanted, rtol=0, atol=limit, equal_nan=True)
