"""What a build is asked for: frozen values whose canonical JSON is the engine's identity.

A `ModelShape` is the model's mathematics in numbers, an `EngineSpec` adds everything else that
shapes the programs. Unknown keys are refused by the decoder; adding a field changes the digest.
"""

from __future__ import annotations

from typing import Literal, dataclass_transform

import msgspec


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Frozen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every stored value: immutable, keyword-only, unknown keys refused."""


class LayerKind(Frozen):
    """Attention geometry of one kind of layer. `window` 0 means full attention."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int
    extent: int


class DraftShape(Frozen):
    """The checkpoint's chained draft depths (spec 6.1)."""

    depths: int
    local_depths: tuple[int, ...]
    chain_norm: bool


class ModelShape(Frozen):
    """Inkling's text decoder in numbers; names follow the field, not one config dialect."""

    hidden: int
    layers: int
    local_layers: tuple[int, ...]
    full: LayerKind
    local: LayerKind
    rel_dim: int
    log_floor: int
    log_alpha: float
    dense_layers: int
    dense_width: int
    experts: int
    experts_per_token: int
    shared_experts: int
    expert_width: int
    route_scale: float
    conv_kernel: int
    vocab: int
    real_vocab: int
    mup: float
    eps: float
    max_context: int
    eos_tokens: tuple[int, ...]
    drafts: DraftShape

    def is_local(self, layer: int) -> bool:
        """Whether `layer` attends to a sliding window."""
        return layer in self.local_layers

    def kind(self, layer: int) -> LayerKind:
        """Attention geometry of `layer`."""
        return self.local if self.is_local(layer) else self.full

    def is_dense(self, layer: int) -> bool:
        """Whether `layer` has a dense MLP instead of experts."""
        return layer < self.dense_layers

    def index_in_kind(self, layer: int) -> int:
        """Position of `layer` among the layers of its kind: the first index of its pools."""
        return sum(self.is_local(i) == self.is_local(layer) for i in range(layer))

    def count(self, *, local: bool) -> int:
        """Number of layers of one kind."""
        return sum(self.is_local(i) == local for i in range(self.layers))

    def draft_kind(self, depth: int) -> LayerKind:
        """Attention geometry of draft depth `depth`, counted from 0."""
        return self.local if depth in self.drafts.local_depths else self.full

    def draft_index_in_kind(self, depth: int) -> int:
        """Position of draft depth `depth` among the depths of its kind."""
        local = self.drafts.local_depths
        return sum((i in local) == (depth in local) for i in range(depth))


StepKind = Literal["decode", "extend", "verify"]


class Bucket(Frozen):
    """One program's static shape: `rows` requests over `tokens` tokens.

    `drafts` is the most guessed tokens that a row has checked beside its last sampled one; above 0 in
    `verify` programs alone.
    """

    kind: StepKind
    rows: int
    tokens: int
    drafts: int = 0


class SamplingLimits(Frozen):
    """Widths of the request table's sampling columns: how many ids each list may hold."""

    stop_ids: int = 8
    bias_ids: int = 32
    top_logprobs: int = 20


class PoolSizes(Frozen):
    """How much state the engine holds. Slot 0 and page 0 are the reserved inert ones and count."""

    slots: int
    snapshots: int
    full_pages: int
    window_pages: int
    table_width: int
    window_ring: int
    results: int


class EngineSpec(Frozen):
    """Everything that shapes an engine's programs and weights.

    `spec_depth` is the number of drafts a round (0: no drafting), chosen among the first `draft_vocab`
    ids; `draft_embed_norm` says whether the draft depths see embeddings after the backbone's norm.
    """

    model: str
    shape: ModelShape
    tp: int
    device: Literal["cpu", "cuda"]
    arch: str
    dtype: Literal["float32", "bfloat16"]
    max_context: int
    max_running: int
    page_size: int
    snapshot_grid: int
    spec_depth: int
    buckets: tuple[Bucket, ...]
    pools: PoolSizes
    threads: int = 1
    limits: SamplingLimits = SamplingLimits()
    draft_embed_norm: bool = True
    draft_vocab: int = 0

    @property
    def conv_ring(self) -> int:
        """Convolution inputs that a slot keeps: those that the next token needs, and one a draft."""
        return self.shape.conv_kernel - 1 + self.spec_depth

    @property
    def longest_chunk(self) -> int:
        """Most prompt tokens of one row in a step."""
        extends = (bucket.tokens for bucket in self.buckets if bucket.kind == "extend")
        return max(extends, default=1)
