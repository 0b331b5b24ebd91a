"""Inkling's text decoder (spec section 2) over packed tokens, as a sequence of ops.

Shape suffixes: T tokens of the step, S sampled rows, H hidden, C a rank's vocabulary. Everything that
depends on the rows (positions, windows, pages, snapshot destinations) was resolved once, in `meta`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from inkling_engine.artifacts.spec import Bucket, ModelShape
from inkling_engine.compile.models.inkling.block import Attention, Blocks, Place, exchange
from inkling_engine.compile.models.inkling.calls import Calls
from inkling_engine.kernels.attention_extend import attention_extend
from inkling_engine.kernels.attention_verify import attention_verify
from inkling_engine.kernels.embed_norm import embed_norm
from inkling_engine.kernels.head import head
from inkling_engine.kernels.rmsnorm import rmsnorm
from inkling_engine.kernels.step_metadata import StepMeta


@dataclass(frozen=True)
class Decoder:
    """One rank's decoder: weights and pools by name, the step's metadata, `world` ranks and the numbers
    of their collectives."""

    shape: ModelShape
    weights: Mapping[str, Tensor]
    pools: Mapping[str, Tensor]
    meta: StepMeta
    world: int
    calls: Calls

    def hidden(self, bucket: Bucket) -> Tensor:
        """The tokens' hidden rows [T, H] after the final norm."""
        w, s, meta = self.weights, self.shape, self.meta
        table, norm, ranks = w["embed"], w["embed_norm"], exchange(self.pools)
        h_TH = embed_norm(meta.tokens, table, norm, *ranks, *self.calls.take(), s.eps, self.world)
        x_TH: Tensor = rmsnorm(h_TH, w["layers.0.attn_norm"], s.eps)
        attention = {
            "decode": None,
            "extend": Attention(attention_extend, meta.lengths, (0,)),
            "verify": Attention(attention_verify, meta.lengths, (0, 1 + bucket.drafts)),
        }[bucket.kind]
        blocks = Blocks(s, w, self.pools, meta, attention, s.log_floor, self.world, self.calls)
        for i in range(s.layers):
            place = Place(f"layers.{i}.", s.kind(i), "", i, s.index_in_kind(i))
            following = f"layers.{i + 1}.attn_norm" if i + 1 < s.layers else "norm"
            h_TH, x_TH = blocks.run(h_TH, x_TH, place, following, dense=s.is_dense(i))
        return x_TH

    def logits(self, x_TH: Tensor) -> Tensor:
        """Logits [S, C] float32 after each sampled token: this rank's columns, or as many as the real
        vocabulary has."""
        w, s, meta = self.weights, self.shape, self.meta
        columns = min(s.real_vocab, w["head"].shape[0])
        rows = meta.sample_rows, meta.emits
        logits_SC: Tensor = head(x_TH, w["head"], *rows, 1.0 / s.mup, columns)
        return logits_SC
