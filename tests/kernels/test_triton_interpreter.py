"""Every op's Triton launches in the interpreter, against the reference, on all of the op's cases.

Triton decides when it is imported whether it interprets, so a child process runs some ops. Run this
file with op names (TRITON_INTERPRET=1) to see the seconds of each case.
"""

from __future__ import annotations

import sys
import time
from importlib import import_module

import pytest
import torch
from kernels.test_ops import assert_close, clone, raw, tensors
from support.launches import ROUNDED_INSIDE, assert_near, interpreted, launch_cases
from torch import Tensor

from inkling_engine.kernels import _triton
from inkling_engine.kernels._cases import Case
from inkling_engine.kernels._op import Op
from inkling_engine.kernels.ops import OPS

pytest.importorskip("triton", reason="needs Triton")

GROUPS = (
    ("experts", "moe", "router", "swiglu", "rmsnorm", "embed_norm"),
    ("sample", "commit", "step_metadata", "linear", "head", "gather_logits"),
    ("candidates", "resample", "draft_candidates"),
    ("attention_decode", "attention_extend", "attention_verify"),
    ("attention_prologue", "boundary"),
    ("draft_metadata", "draft_gather", "draft_input", "draft_sample", "draft_commit"),
)
IN_BLOCKS, BLOCK = "--in-blocks", 32  # tokens, or ids, of a block
# cases of several blocks: those whose first argument has more than so many of an axis
LONGER = {"experts": (0, 64), "candidates": (1, BLOCK)}


def test_the_groups_hold_every_op_once() -> None:
    assert sorted(name for group in GROUPS for name in group) == sorted(op.name for op in OPS)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group[0])
def test_launches_match_the_references(group: tuple[str, ...]) -> None:
    """The child's last line counts what it compared, so that it cannot pass by running nothing."""
    cases = sum(len(launch_cases(op)) for op in OPS if op.name in group)
    assert interpreted(__file__, *group).splitlines()[-1] == f"{cases} cases"


@pytest.mark.parametrize("name", LONGER)
def test_launches_go_on_behind_a_block(name: str) -> None:
    """More tokens than a program of `group` looks at at once, more ids than a chunk has: the cases have
    fewer of either."""
    (op,) = (op for op in OPS if op.name == name)
    longer = [case for case in launch_cases(op) if is_longer(op, case)]
    assert longer
    assert interpreted(__file__, IN_BLOCKS, name).splitlines()[-1] == f"{len(longer)} cases"


def is_longer(op: Op, case: Case) -> bool:
    """Whether it takes several blocks."""
    axis, size = LONGER[op.name]
    return bool(case.arguments[0].shape[axis] > size)


def compare(op: Op, case: Case) -> None:
    """Results equal, written arguments equal, and nothing else written."""
    theirs, ours = clone(case.arguments), clone(case.arguments)
    wanted, found = op.reference(*theirs), op.launch(*ours)
    for one, other in zip(tensors(found), tensors(wanted), strict=True):
        if op.name in ROUNDED_INSIDE and other.dtype == torch.bfloat16:
            assert_near(one, other)
        else:
            assert_close(one, other, case.tolerance)
    names = [a.name for a in getattr(torch.ops.inkling, op.name).default._schema.arguments]
    for name, before, reference, launched in zip(names, case.arguments, theirs, ours, strict=True):
        if isinstance(before, Tensor) and name != "exchange":  # see test_exchange_launches
            compare_argument(before, reference, launched, case.tolerance)


def compare_argument(before: Tensor, reference: Tensor, found: Tensor, tolerance: float) -> None:
    """What the reference leaves alone keeps its bytes; what it writes is close."""
    kept = (raw(reference) == raw(before)).all(-1)
    assert torch.equal(raw(found)[kept], raw(before)[kept]), "bytes outside the mutation changed"
    assert_close(found[~kept], reference[~kept], tolerance)


def main(names: list[str]) -> None:
    """Compare the named ops on all of their cases."""
    assert _triton.INTERPRETED
    from support.interpreter import repair_interpreter

    repair_interpreter()
    if IN_BLOCKS in names:
        for name, size in (("experts", "SCAN_BLOCK"), ("candidates", "CHUNK")):
            module = import_module(f"inkling_engine.kernels.{name}.triton_kernel")
            assert hasattr(module, size)
            setattr(module, size, BLOCK)
    compared = 0
    for op in [op for op in OPS if op.name in names]:
        for case in launch_cases(op):
            if IN_BLOCKS in names and not is_longer(op, case):
                continue
            start = time.perf_counter()
            compare(op, case)
            print(f"{op.name} {case.name} {time.perf_counter() - start:.2f} s", flush=True)
            compared += 1
    print(compared, "cases")


if __name__ == "__main__":
    main(sys.argv[1:])
