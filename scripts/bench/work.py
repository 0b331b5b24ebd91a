"""A case of a benchmark: what is called, the least it must move and compute, and its check."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import msgspec
import torch
from bench.peer import Peer
from bench.timing import Call, copies_for
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from inkling_engine.artifacts.spec import ModelShape, StepKind
from inkling_engine.compile.models.inkling.shape import preset
from inkling_engine.compile.models.inkling.shard import rank_shape
from inkling_engine.kernels._exchange import HEADER
from inkling_engine.kernels._op import Op

MOST_DECODE_ROWS: Final = 128
RELATIVE_L2: Final = {torch.bfloat16: 5e-3, torch.float32: 1e-3}  # spec 9.3


@dataclass(frozen=True)
class Work:
    """Sides to compare (calls on separate inputs each) over a floor of `moved` bytes, `flops`."""

    moved: float
    flops: float
    sides: Mapping[str, Sequence[Call]]
    check: Call
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """`op` at one shape; nothing is allocated before `make`."""

    op: str
    name: str
    rows: int
    context: int
    make: Callable[[], Work]


def one_rank(model: str, tp: int) -> ModelShape:
    """The preset `model` as one of `tp` ranks has it, its own part of the vocabulary included."""
    whole = preset(model)
    assert whole is not None, f"no preset {model}"
    rows = whole.vocab // tp
    real = min(whole.real_vocab, rows)
    return msgspec.structs.replace(rank_shape(whole, tp), vocab=rows, real_vocab=real)


@dataclass
class Target:
    """Shapes of one rank out of `tp` of `model`, and the device that its tensors are made on."""

    model: str
    tp: int
    device: str
    peer: Peer | None = None
    own_only: bool = False

    @cached_property
    def whole(self) -> ModelShape:
        """The whole model's shape."""
        return one_rank(self.model, 1)

    @cached_property
    def shape(self) -> ModelShape:
        """One rank's shape, all of whose vocabulary counts as real."""
        shape = one_rank(self.model, self.tp)
        return msgspec.structs.replace(shape, real_vocab=shape.vocab, eos_tokens=())

    @cached_property
    def experts(self) -> list[tuple[Tensor, ...]]:
        """(gate weight, gate bias, gate scale, w13, w2) of four layers."""
        s = self.shape
        count = s.experts + s.shared_experts
        return [
            (
                self.normal(count, s.hidden, scale=s.hidden**-0.5),
                self.normal(s.experts, scale=1e-3, dtype=torch.float32),
                torch.full((1,), 1.25, device=self.device),
                self.normal(count, 2 * s.expert_width, s.hidden, scale=s.hidden**-0.5),
                self.normal(count, s.hidden, s.expert_width, scale=s.expert_width**-0.5),
            )
            for _ in range(copies_for(1e9, least=4))
        ]

    def normal(self, *size: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Random normal values."""
        return torch.empty(size, dtype=dtype, device=self.device).normal_().mul_(scale)

    def near_one(self, *size: int) -> Tensor:
        """Values of a norm's weight."""
        return 1 + self.normal(*size, scale=0.1)

    def starts(self, tokens: int) -> Tensor:
        """Starts of a step's rows: one token each in a decode step, else one row of all."""
        step = 1 if kind_of(tokens) == "decode" else tokens
        return torch.arange(0, tokens + 1, step, dtype=torch.int32, device=self.device)


def kind_of(tokens: int) -> StepKind:
    """The kind of step that has so many tokens in this benchmark."""
    return "decode" if tokens <= MOST_DECODE_ROWS else "extend"


def check_op(op: Op, arguments: Sequence[Any], device: str, *, unequal: float = 0.0) -> None:
    """Assert that a call gives what the op's reference gives on `device`, fp32 within.

    Floats are held to a relative L2 distance, mutated arguments where either side changed them, but
    for what candidates publish: each implementation reads its own alone. A share of `unequal` integers may differ: a tie may be cut either way.
    """

    def there(tensor: Tensor) -> Tensor:
        return tensor.to(device, copy=True)

    ours = tree_map_only(Tensor, torch.clone, tuple(arguments))
    theirs = tree_map_only(Tensor, there, tuple(arguments))
    found = op(*ours)
    with torch.device(device):
        wanted = op.reference(*theirs)
    for one, other in zip(_tensors(found), _tensors(wanted), strict=True):
        assert_near(one.to(device), other, f"{op.name} result", unequal)
    own_format = op.name in ("candidates", "draft_candidates")
    for original, own, other in zip(*map(_tensors, (arguments, ours, theirs)), strict=True):
        if own_format and original.dtype == torch.int64 and original.numel() > HEADER:
            continue
        before, one = original.to(device), own.to(device)
        changed = (one != before) | (other != before)
        if bool(changed.any()):
            assert_near(one[changed], other[changed], f"{op.name} mutation", unequal)


def assert_near(
    found: Tensor, wanted: Tensor, what: str, unequal: float = 0.0, tolerance: float = 0.0
) -> None:
    """Relative L2 distance within `tolerance`, or spec 9.3 if 0; integers equal but for `unequal`."""
    assert found.shape == wanted.shape, f"{what}: {found.shape}, not {wanted.shape}"
    if not found.is_floating_point():
        share = float((found != wanted).float().mean()) if found.numel() else 0.0
        assert share <= unequal, f"{what}: {share:.2%} of the integers differ"
        return
    tolerance = tolerance or RELATIVE_L2[found.dtype]
    distance = (found.float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-30)
    assert float(distance) <= tolerance, f"{what}: relative L2 {float(distance):.3g}"


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
