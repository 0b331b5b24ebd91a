"""The best of a list's keys, found bit by bit, against sorting; a child process interprets the kernel."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from __future__ import annotations

import pytest
import torch
from support.launches import interpreted

pytest.importorskip("triton", reason="needs Triton")

import triton
import triton.language as tl

from inkling_engine.kernels._sampling_triton import NOTHING
from inkling_engine.kernels.candidates.lists_triton import highest

LANES, ROUNDS, GOALS = 32, 40, (1, 2, 8, 32)
LEAST = -(2**63) + 1  # what NOTHING is


@triton.jit
def highest_kernel(keys, taken, LANES: tl.constexpr, GOAL: tl.constexpr):
    lane = tl.arange(0, LANES)
    tl.store(taken + lane, highest(tl.load(keys + lane), GOAL).to(tl.int32))


def test_as_many_as_wanted_are_the_highest() -> None:
    assert interpreted(__file__).split() == [str(ROUNDS * len(GOALS) * 3)]


def draws(seed: int) -> list[torch.Tensor]:
    """Keys side by side around zero, anywhere, and fewer than there are lanes."""
    torch.manual_seed(seed)
    near = torch.randperm(LANES) - int(torch.randint(LANES, ()))
    far = torch.randint(-(2**62), 2**62, (LANES,)) * 2 + torch.arange(LANES) % 2
    few = torch.where(torch.rand(LANES) < 0.5, torch.tensor(LEAST), far)
    return [near, far, few]


def main() -> None:
    """Compare with the sorted keys, and print how often."""
    assert NOTHING.value == LEAST
    compared = 0
    for seed in range(ROUNDS):
        for keys in draws(seed):
            for goal in GOALS:
                taken = torch.zeros(LANES, dtype=torch.int32)
                highest_kernel[(1,)](keys, taken, LANES=LANES, GOAL=goal)
                wanted = sorted(set(keys.tolist()) - {LEAST}, reverse=True)[:goal]
                assert sorted(keys[taken != 0].tolist(), reverse=True) == wanted, (seed, goal)
                compared += 1
    print(compared)


if __name__ == "__main__":
    main()
