"""One decoder block (spec section 2.1) over packed rows: the target's layers and the draft depths.

A block's tensors are found by its `Place`; what all blocks of one pass share (rows, pools, which
attention) is in `Blocks`. Shape suffixes: T tokens, H hidden, N query heads, D head width, C kv
channels or heads * D, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from inkling_engine.artifacts.spec import LayerKind, ModelShape
from inkling_engine.compile.models.inkling.calls import Calls
from inkling_engine.kernels._op import Op
from inkling_engine.kernels.attention_decode import attention_decode
from inkling_engine.kernels.attention_prologue import attention_prologue
from inkling_engine.kernels.boundary import boundary
from inkling_engine.kernels.experts import experts
from inkling_engine.kernels.linear import linear
from inkling_engine.kernels.moe import moe
from inkling_engine.kernels.router import router
from inkling_engine.kernels.swiglu import swiglu


class Rows(Protocol):
    """What a block needs of a pass's packed rows, resolved once (`StepMeta`, `DraftMeta`)."""

    @property
    def positions(self) -> Tensor: ...
    @property
    def token_rows(self) -> Tensor: ...
    @property
    def full_locations(self) -> Tensor: ...
    @property
    def window_locations(self) -> Tensor: ...
    @property
    def slots(self) -> Tensor: ...
    @property
    def sources(self) -> Tensor: ...
    @property
    def starts(self) -> Tensor: ...
    @property
    def lengths(self) -> Tensor: ...
    @property
    def destination_slots(self) -> Tensor: ...
    @property
    def destination_offsets(self) -> Tensor: ...


class Attention(NamedTuple):
    """The attention op of a pass, the KV position of each row's first token [R], and the op's last
    attributes: the first visible key and, of few tokens a row, the most of them."""

    op: Op
    lengths: Tensor
    bounds: tuple[int, ...]


class Place(NamedTuple):
    """Where a block's tensors lie: weights below `scope`; in the pools named after `family` ("" or
    "draft_") it is number `number`, among those of its attention kind `number_in_kind`."""

    scope: str
    kind: LayerKind
    family: str
    number: int
    number_in_kind: int


def exchange(pools: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Where ranks meet, in the order of the ops' arguments (`kernels/_exchange.py`)."""
    return pools["peers"], pools["exchange"], pools["step_counter"], pools["rank"]


@dataclass(frozen=True)
class Blocks:
    """What the blocks of one pass share; `world` ranks, whose collectives `calls` numbers; `log_floor` 0
    turns log scaling off. Without `attention` every row has at most one token."""

    shape: ModelShape
    weights: Mapping[str, Tensor]
    pools: Mapping[str, Tensor]
    rows: Rows
    attention: Attention | None
    log_floor: int
    world: int
    calls: Calls

    def run(
        self, h_TH: Tensor, x_TH: Tensor, place: Place, following: str, *, dense: bool
    ) -> tuple[Tensor, Tensor]:
        """The block on the stream `h_TH` and its normed rows `x_TH`; returns the stream after it, and
        that normed by the weight `following`."""
        a_TH = self._attention(x_TH, place)
        h_TH, y_TH = self._boundary(a_TH, h_TH, place, "attn", f"{place.scope}mlp_norm")
        m_TH = self._dense(y_TH, place) if dense else self._experts(y_TH, place)
        return self._boundary(m_TH, h_TH, place, "mlp", following)

    def _attention(self, x_TH: Tensor, place: Place) -> Tensor:
        w, s, rows, scope = self.weights, self.shape, self.rows, place.scope
        name = "window" if place.kind.window else "full"
        kv_pool, table = self.pools[f"kv_{place.family}{name}"], self.pools[f"{name}_table"]
        inputs = (
            linear(x_TH, w[f"{scope}qkvr"]),
            w[f"{scope}kv_conv"],
            w[f"{scope}q_norm"],
            w[f"{scope}k_norm"],
            kv_pool,
            self.pools[f"conv_kv_{place.family}{name}"],
            rows.positions,
            rows.token_rows,
            rows.window_locations if place.kind.window else rows.full_locations,
            *self._windows(),
        )
        bank, layer, window = w[f"{scope}rel_proj"], place.number_in_kind, place.kind.window
        heads = place.kind.heads // self.world
        scaling = (0 if window else self.log_floor, s.log_alpha, s.eps)
        if self.attention is None:
            o_TC = attention_decode(*inputs, bank, table, layer, heads, window, *scaling)
        else:
            q_TND, r_TNR = attention_prologue(*inputs, layer, heads, *scaling)
            attend, lengths, bounds = self.attention
            state = kv_pool, table, rows.slots, rows.starts, lengths
            o_TC = attend(q_TND, r_TNR, bank, *state, layer, window, *bounds)
        a_TH: Tensor = linear(o_TC, w[f"{scope}o"])
        return a_TH

    def _dense(self, y_TH: Tensor, place: Place) -> Tensor:
        w, scope = self.weights, place.scope
        activated = swiglu(linear(y_TH, w[f"{scope}w13"]), w[f"{scope}global_scale"])
        m_TH: Tensor = linear(activated, w[f"{scope}w2"])
        return m_TH

    def _experts(self, y_TH: Tensor, place: Place) -> Tensor:
        w, s, scope = self.weights, self.shape, place.scope
        gate = tuple(w[f"{scope}gate_{name}"] for name in ("weight", "bias", "scale"))
        w13, w2 = w[f"{scope}experts_w13"], w[f"{scope}experts_w2"]
        starts, sizes = self.rows.starts, (s.experts_per_token, s.shared_experts, s.route_scale)
        if y_TH.shape[0] == 1:
            m_TH: Tensor = moe(y_TH, *gate, w13, w2, starts, *sizes)
            return m_TH
        chosen_TK, weights_TK, places_TE = router(y_TH, *gate, starts, *sizes)
        m_TH = experts(y_TH, w13, w2, chosen_TK, weights_TK, places_TE, starts)
        return m_TH

    def _boundary(
        self, x_TH: Tensor, h_TH: Tensor, place: Place, stream: str, norm: str
    ) -> tuple[Tensor, Tensor]:
        hidden: tuple[Tensor, Tensor] = boundary(
            x_TH,
            h_TH,
            self.weights[f"{place.scope}{stream}_conv"],
            self.weights[norm],
            self.pools[f"conv_{place.family}{stream}"],
            self.rows.token_rows,
            *self._windows(),
            *exchange(self.pools),
            place.number,
            *self.calls.take(),
            self.shape.eps,
            self.world,
        )
        return hidden

    def _windows(self) -> tuple[Tensor, ...]:
        rows = self.rows
        return (
            rows.slots,
            rows.sources,
            rows.starts,
            rows.lengths,
            rows.destination_slots,
            rows.destination_offsets,
        )
