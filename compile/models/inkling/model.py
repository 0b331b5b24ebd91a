"""Inkling's text decoder (spec section 2) over packed tokens, as a sequence of ops.

Shape suffixes: T tokens of the step, R rows (requests), H hidden, N query heads, D head width,
C kv channels (k then v), E experts, V vocabulary. Everything that depends on the rows (positions,
windows, pages, snapshot destinations) was resolved once, in `meta`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from inkling_engine.artifacts.spec import ModelShape, StepKind
from inkling_engine.kernels.attention_decode import attention_decode
from inkling_engine.kernels.attention_extend import attention_extend
from inkling_engine.kernels.attention_prologue import attention_prologue
from inkling_engine.kernels.boundary import boundary
from inkling_engine.kernels.embed_norm import embed_norm
from inkling_engine.kernels.experts import experts
from inkling_engine.kernels.head import head
from inkling_engine.kernels.linear import linear
from inkling_engine.kernels.moe import moe
from inkling_engine.kernels.rmsnorm import rmsnorm
from inkling_engine.kernels.router import router
from inkling_engine.kernels.step_metadata import StepMeta
from inkling_engine.kernels.swiglu import swiglu


@dataclass(frozen=True)
class Decoder:
    """One rank's decoder: weights and pools by name, the step's metadata, `world` ranks."""

    shape: ModelShape
    weights: Mapping[str, Tensor]
    pools: Mapping[str, Tensor]
    meta: StepMeta
    world: int

    def logits(self, kind: StepKind) -> Tensor:
        """Logits [R, V] float32 after each row's last token; V: `EngineSpec.rank_vocab`."""
        w, s = self.weights, self.shape
        peers, rank = self.pools["peers"], self.pools["rank"]
        h_TH = embed_norm(
            self.meta.tokens, w["embed"], w["embed_norm"], peers, rank, s.eps, self.world
        )
        x_TH = rmsnorm(h_TH, w["layers.0.attn_norm"], s.eps)
        for i in range(s.layers):
            a_TH = self._attention(x_TH, i, kind)
            h_TH, y_TH = self._boundary(a_TH, h_TH, i, "attn", f"layers.{i}.mlp_norm")
            m_TH = self._dense(y_TH, i) if s.is_dense(i) else self._experts(y_TH, i)
            following = f"layers.{i + 1}.attn_norm" if i + 1 < s.layers else "norm"
            h_TH, x_TH = self._boundary(m_TH, h_TH, i, "mlp", following)
        meta = self.meta
        scale = 1.0 / s.mup
        vocab = min(s.real_vocab, w["head"].shape[0])
        logits_RV: Tensor = head(x_TH, w["head"], meta.sample_rows, meta.emits, scale, vocab)
        return logits_RV

    def _attention(self, x_TH: Tensor, i: int, kind: StepKind) -> Tensor:
        w, s, meta = self.weights, self.shape, self.meta
        local, geometry, layer = s.is_local(i), s.kind(i), s.index_in_kind(i)
        name = "window" if local else "full"
        kv_pool, table = self.pools[f"kv_{name}"], self.pools[f"{name}_table"]
        prologue = (
            linear(x_TH, w[f"layers.{i}.qkvr"]),
            w[f"layers.{i}.kv_conv"],
            w[f"layers.{i}.q_norm"],
            w[f"layers.{i}.k_norm"],
            kv_pool,
            self.pools[f"conv_kv_{name}"],
            meta.positions,
            meta.token_rows,
            meta.window_locations if local else meta.full_locations,
            *self._rows(),
        )
        bank, heads = w[f"layers.{i}.rel_proj"], geometry.heads // self.world
        scaling = (0 if local else s.log_floor, s.log_alpha, s.eps)
        if kind == "decode":
            sizes = (layer, heads, geometry.window, *scaling)
            o_TC = attention_decode(*prologue, bank, table, *sizes)
        else:
            q_TND, r_TN16 = attention_prologue(*prologue, layer, heads, *scaling)
            state = kv_pool, table, meta.slots, meta.starts, meta.lengths
            o_TC = attention_extend(q_TND, r_TN16, bank, *state, layer, geometry.window)
        a_TH: Tensor = linear(o_TC, w[f"layers.{i}.o"])
        return a_TH

    def _dense(self, y_TH: Tensor, i: int) -> Tensor:
        w = self.weights
        gate_up = linear(y_TH, w[f"layers.{i}.w13"])
        activated = swiglu(gate_up, w[f"layers.{i}.global_scale"])
        m_TH: Tensor = linear(activated, w[f"layers.{i}.w2"])
        return m_TH

    def _experts(self, y_TH: Tensor, i: int) -> Tensor:
        w, s = self.weights, self.shape
        gate = tuple(w[f"layers.{i}.gate_{name}"] for name in ("weight", "bias", "scale"))
        w13, w2 = w[f"layers.{i}.experts_w13"], w[f"layers.{i}.experts_w2"]
        starts, sizes = self.meta.starts, (s.experts_per_token, s.shared_experts, s.route_scale)
        if y_TH.shape[0] == 1:
            m_TH: Tensor = moe(y_TH, *gate, w13, w2, starts, *sizes)
            return m_TH
        chosen_TK, weights_TK, places_TE = router(y_TH, *gate, starts, *sizes)
        m_TH = experts(y_TH, w13, w2, chosen_TK, weights_TK, places_TE, starts)
        return m_TH

    def _boundary(
        self, x_TH: Tensor, h_TH: Tensor, i: int, stream: str, norm: str
    ) -> tuple[Tensor, Tensor]:
        hidden: tuple[Tensor, Tensor] = boundary(
            x_TH,
            h_TH,
            self.weights[f"layers.{i}.{stream}_conv"],
            self.weights[norm],
            self.pools[f"conv_{stream}"],
            self.meta.token_rows,
            *self._rows(),
            self.pools["peers"],
            self.pools["rank"],
            i,
            self.shape.eps,
            self.world,
        )
        return hidden

    def _rows(self) -> tuple[Tensor, ...]:
        meta = self.meta
        return (
            meta.slots,
            meta.sources,
            meta.starts,
            meta.lengths,
            meta.destination_slots,
            meta.destination_offsets,
        )
