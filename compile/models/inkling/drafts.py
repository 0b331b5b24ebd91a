"""The chained draft depths (spec 6.1) over the rows that end at each request's new frontier.

All depths run over the same rows; row p of depth d reads the previous depth's output at p (the
target's hidden row for the first) and token x[p + 1 + d], and its last row's logits are draft d + 1.
Log scaling is off. Draft KV of row p lies at position p + K, so the keys begin at K. Shape suffixes:
T draft rows, R requests, H hidden, V the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from inkling_engine.artifacts.spec import EngineSpec
from inkling_engine.compile.models.inkling.block import Attention, Blocks, Place, exchange
from inkling_engine.compile.models.inkling.calls import Calls
from inkling_engine.kernels._draft_rows import behind
from inkling_engine.kernels.attention_extend import attention_extend
from inkling_engine.kernels.attention_verify import attention_verify
from inkling_engine.kernels.draft_input import draft_input
from inkling_engine.kernels.draft_metadata import DraftMeta
from inkling_engine.kernels.head import head
from inkling_engine.kernels.linear import linear
from inkling_engine.kernels.rmsnorm import rmsnorm


@dataclass(frozen=True)
class DraftDecoder:
    """One rank's draft depths: weights and pools by name, the phase's metadata, the `most` tokens that
    a row of the step had (0: any number), the numbers of the collectives."""

    spec: EngineSpec
    weights: Mapping[str, Tensor]
    pools: Mapping[str, Tensor]
    meta: DraftMeta
    most: int
    calls: Calls

    def logits(self, hidden_TH: Tensor) -> Iterator[Tensor]:
        """Logits [R, C] float32 of each depth in turn, from the target's hidden rows: this rank's
        columns, or as many as the draft vocabulary has. A depth reads the draft that was chosen from the logits before it."""
        spec, w, meta = self.spec, self.weights, self.meta
        attention = self._attention()
        blocks = Blocks(spec.shape, w, self.pools, meta, attention, 0, spec.tp, self.calls)
        for depth in range(spec.spec_depth):
            hidden_TH = self._depth(blocks, hidden_TH, depth)
            logits_RC: Tensor = head(
                hidden_TH,
                w["head"],
                meta.frontier_rows,
                meta.emits,
                1.0 / spec.shape.mup,
                min(spec.draft_vocab, w["head"].shape[0]),
            )
            yield logits_RC

    def _attention(self) -> Attention:
        first, meta = self.spec.spec_depth, self.meta
        if not self.most:
            return Attention(attention_extend, meta.kv_lengths, (first,))
        most = self.most + behind(first, self.most)
        return Attention(attention_verify, meta.kv_lengths, (first, most))

    def _depth(self, blocks: Blocks, hidden_TH: Tensor, depth: int) -> Tensor:
        w, shape, scope = self.weights, self.spec.shape, f"drafts.{depth}."
        h_TH = linear(self._input(hidden_TH, depth), w[f"{scope}input_proj"])
        x_TH = rmsnorm(h_TH, w[f"{scope}attn_norm"], shape.eps)
        index = shape.draft_index_in_kind(depth)
        place = Place(scope, shape.draft_kind(depth), "draft_", depth, index)
        chain = shape.drafts.chain_norm
        following = "chain_norm" if chain else f"{scope}mlp_norm"  # a norm that nothing reads
        h_TH, x_TH = blocks.run(h_TH, x_TH, place, following, dense=True)
        return x_TH if chain else h_TH

    def _input(self, hidden_TH: Tensor, depth: int) -> Tensor:
        spec, w, meta, scope = self.spec, self.weights, self.meta, f"drafts.{depth}."
        z_TH: Tensor = draft_input(
            hidden_TH,
            meta.ids,
            w["embed"],
            w["embed_norm"],
            w[f"{scope}hidden_norm"],
            w[f"{scope}embed_norm"],
            meta.token_rows,
            meta.starts,
            *exchange(self.pools),
            depth,
            spec.spec_depth,
            *self.calls.take(),
            spec.shape.eps,
            spec.tp,
            spec.draft_embed_norm,
        )
        return z_TH
