"""The weight lines of the memory bill, computed from the recipes.

The convention is the published file's: a rank's tensors as they are split, vocabulary rows as the
file has them (201,024, the unreal ones included), gate bias and gate scale in f32, every other
tensor, convolutions and dense scales included, in the activation dtype. What the engine adds to
that is a line of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal

from inkling_engine.artifacts.manifest import Recipe
from inkling_engine.artifacts.spec import Frozen, ModelShape
from inkling_engine.compile.models.inkling.names import recipes
from inkling_engine.compile.recipes import ITEM_BYTES, nbytes

ALIGNMENT: Final = 256  # bytes; every tensor of an arena starts at a multiple of it
WIDENED: Final = ("kv_conv", "attn_conv", "mlp_conv", "global_scale")


class WeightBill(Frozen):
    """Bytes of one rank's weights.

    `text_decoder` and `drafts` follow the convention above. Beside each, `_fp32` is what keeping
    its convolutions and dense scales in f32 adds, `_padding` what starting every tensor at a
    multiple of ALIGNMENT adds. `unreal_vocabulary` adds nothing: it is the part of `text_decoder`
    that holds embedding and head rows beyond the real vocabulary.
    """

    text_decoder: int
    text_decoder_fp32: int
    text_decoder_padding: int
    drafts: int
    drafts_fp32: int
    drafts_padding: int
    unreal_vocabulary: int

    @property
    def file(self) -> int:
        """Payload of the rank's weight file."""
        return self.text_decoder + self.text_decoder_fp32 + self.drafts + self.drafts_fp32

    @property
    def total(self) -> int:
        """What the weights take on the device."""
        return self.file + self.text_decoder_padding + self.drafts_padding


def weight_bill(
    shape: ModelShape, dtype: Literal["float32", "bfloat16"], tp: int, rank: int = 0
) -> WeightBill:
    """The bill of rank `rank` out of `tp`. Raises UsageError if the model cannot be split so."""
    tensors = recipes(shape, dtype, "original", tp, rank)
    trunk = _lines([recipe for recipe in tensors if not is_draft(recipe)], dtype)
    drafts = _lines([recipe for recipe in tensors if is_draft(recipe)], dtype)
    return WeightBill(
        text_decoder=trunk[0],
        text_decoder_fp32=trunk[1],
        text_decoder_padding=trunk[2],
        drafts=drafts[0],
        drafts_fp32=drafts[1],
        drafts_padding=drafts[2],
        unreal_vocabulary=_unreal_rows(shape, tp, rank) * 2 * shape.hidden * ITEM_BYTES[dtype],
    )


def parameters(shape: ModelShape) -> tuple[int, int]:
    """Parameters of the text decoder and of the draft depths (spec 1.3)."""
    counts = [(is_draft(r), math.prod(r.shape)) for r in recipes(shape, "bfloat16", "original")]
    return sum(n for draft, n in counts if not draft), sum(n for draft, n in counts if draft)


def is_draft(recipe: Recipe) -> bool:
    """Whether the engine tensor belongs to the draft depths."""
    return recipe.name.startswith("drafts.") or recipe.name == "chain_norm"


def _lines(tensors: Sequence[Recipe], dtype: str) -> tuple[int, int, int]:
    """(bytes under the convention, what f32 adds, what alignment adds) of `tensors`."""
    actual = sum(map(nbytes, tensors))
    widened = sum(nbytes(recipe) for recipe in tensors if recipe.name.endswith(WIDENED))
    stated = actual - widened + widened * ITEM_BYTES[dtype] // ITEM_BYTES["float32"]
    return stated, actual - stated, sum(-nbytes(recipe) % ALIGNMENT for recipe in tensors)


def _unreal_rows(shape: ModelShape, tp: int, rank: int) -> int:
    """How many of the rank's vocabulary rows are beyond the real vocabulary."""
    rows = shape.vocab // tp
    return min(rows, max(0, (rank + 1) * rows - shape.real_vocab))
