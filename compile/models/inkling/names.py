"""Disk <-> engine: the recipe of every engine tensor, from either published tensor layout.

`original` is the vendor's layout (`model.llm...`, gate and up rows interleaved), `hf` the names of
transformers' text class (`model.layers...`, gate and up apart), and `hf-original-drafts` the latter
with the vendor's draft tensors beside it. Names here are canonical; `canonical` strips the prefixes
that other exporters add. Whatever the layout, the engine tensors are the same (spec 3.1, 3.2).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from inkling_engine.artifacts.manifest import DType, Part, Recipe
from inkling_engine.artifacts.spec import LayerKind, ModelShape
from inkling_engine.compile.models.inkling import shard

Layout = Literal["original", "hf", "hf-original-drafts"]
Rows = Literal["all", "even", "odd", "first", "second"]


@dataclass(frozen=True)
class Naming:
    """How one layout spells a decoder block: tensors by role, and where gate and up rows are."""

    tensors: Mapping[str, str]
    gate_up: Mapping[str, tuple[tuple[str, Rows], tuple[str, Rows]]]


ORIGINAL: Final = Naming(
    tensors={
        "attn_norm": "attn_norm.weight",
        "q": "attn.wq_du.weight",
        "k": "attn.wk_dv.weight",
        "v": "attn.wv_dv.weight",
        "r": "attn.wr_du.weight",
        "k_conv": "attn.k_sconv.weight",
        "v_conv": "attn.v_sconv.weight",
        "q_norm": "attn.q_norm.weight",
        "k_norm": "attn.k_norm.weight",
        "rel_proj": "attn.rel_logits_proj.proj",
        "o": "attn.wo_ud.weight",
        "attn_conv": "attn_sconv.weight",
        "mlp_norm": "mlp_norm.weight",
        "mlp_conv": "mlp_sconv.weight",
        "dense_down": "mlp.w2_md.weight",
        "global_scale": "mlp.global_scale",
        "gate_weight": "mlp.gate.weight",
        "gate_bias": "mlp.gate.bias",
        "gate_scale": "mlp.gate.global_scale",
        "routed_down": "mlp.experts.w2_weight",
        "shared_down": "mlp.shared_experts.shared_w2_weight",
    },
    gate_up={
        "dense": (("mlp.w13_dn.weight", "even"), ("mlp.w13_dn.weight", "odd")),
        "routed": (("mlp.experts.w13_weight", "even"), ("mlp.experts.w13_weight", "odd")),
        "shared": (
            ("mlp.shared_experts.shared_w13_weight", "even"),
            ("mlp.shared_experts.shared_w13_weight", "odd"),
        ),
    },
)

HF: Final = Naming(
    tensors={
        "attn_norm": "input_layernorm.weight",
        "q": "self_attn.q_proj.weight",
        "k": "self_attn.k_proj.weight",
        "v": "self_attn.v_proj.weight",
        "r": "self_attn.r_proj.weight",
        "k_conv": "self_attn.k_sconv.conv1d.weight",
        "v_conv": "self_attn.v_sconv.conv1d.weight",
        "q_norm": "self_attn.q_norm.weight",
        "k_norm": "self_attn.k_norm.weight",
        "rel_proj": "self_attn.rel_logits_proj.proj",
        "o": "self_attn.o_proj.weight",
        "attn_conv": "attn_sconv.conv1d.weight",
        "mlp_norm": "post_attention_layernorm.weight",
        "mlp_conv": "mlp_sconv.conv1d.weight",
        "dense_down": "mlp.down_proj.weight",
        "global_scale": "mlp.global_scale",
        "gate_weight": "mlp.gate.weight",
        "gate_bias": "mlp.gate.e_score_correction_bias",
        "gate_scale": "mlp.gate.global_scale",
        "routed_down": "mlp.experts.down_proj",
        "shared_down": "mlp.shared_experts.down_proj",
    },
    gate_up={
        "dense": (("mlp.gate_proj.weight", "all"), ("mlp.up_proj.weight", "all")),
        "routed": (("mlp.experts.gate_up_proj", "first"), ("mlp.experts.gate_up_proj", "second")),
        "shared": (
            ("mlp.shared_experts.gate_proj", "all"),
            ("mlp.shared_experts.up_proj", "all"),
        ),
    },
)

TRUNK: Final = {
    "original": {
        "prefix": "model.llm.",
        "embed": "model.llm.embed.weight",
        "embed_norm": "model.llm.embed_norm.weight",
        "norm": "model.llm.norm.weight",
        "head": "model.llm.unembed.weight",
    },
    "hf": {
        "prefix": "model.",
        "embed": "model.embed_tokens.weight",
        "embed_norm": "model.embed_tokens.embed_norm.weight",
        "norm": "model.norm.weight",
        "head": "lm_head.weight",
    },
}
DRAFTS: Final = {
    "original": {
        "hidden_norm": "hidden_norm.weight",
        "embed_norm": "embed_norm.weight",
        "input_proj": "input_proj.weight",
        "block": "transformer_block.",
        "chain_norm": "model.mtp.chain_norm.weight",
    },
    "hf": {
        "hidden_norm": "hnorm.weight",
        "embed_norm": "enorm.weight",
        "input_proj": "eh_proj.weight",
        "block": "mtp_block.",
        "chain_norm": "model.mtp.shared_post_norm.weight",
    },
}
NAMINGS: Final = {"original": ORIGINAL, "hf": HF}
DRAFT_PREFIX: Final = "model.mtp."

_TOWER = re.compile(r"model\.(visual|audio|vision_tower|audio_tower)\.")
_HF_DRAFT = re.compile(r"(layers\.\d+\.(hnorm|enorm|eh_proj|mtp_block)\.|shared_post_norm\.)")


def recipes(
    shape: ModelShape, dtype: DType, layout: Layout, tp: int = 1, rank: int = 0
) -> tuple[Recipe, ...]:
    """The recipes of rank `rank`'s engine tensors out of `tp`, in the order of file and manifest.

    `dtype` is the activation dtype; convolutions, gate bias and scales are float32 in any case.
    Raises UsageError if the model cannot be split `tp` ways.
    """
    whole = (*_trunk(shape, dtype, layout), *_drafts(shape, dtype, layout))
    return shard.rank_recipes(whole, shape, tp, rank)


def canonical(name: str) -> str:
    """The name of a checkpoint tensor without the prefixes that exporters add (spec 3.2)."""
    name = re.sub(r"^(model\.)?language_model\.", r"\1", name)
    name = re.sub(r"^mtp\.", DRAFT_PREFIX, name)
    return DRAFT_PREFIX + name if _HF_DRAFT.match(name) else name


def is_tower(name: str) -> bool:
    """Whether the canonical `name` belongs to a media tower, which a text engine leaves out."""
    return _TOWER.match(name) is not None


def is_draft(name: str) -> bool:
    """Whether the canonical `name` belongs to the draft depths."""
    return name.startswith(DRAFT_PREFIX)


def detect(names: Iterable[str]) -> Layout:
    """The layout that canonical `names` follow."""
    names = tuple(names)
    if any(name.startswith(TRUNK["original"]["prefix"]) for name in names):
        return "original"
    drafts = [name.removeprefix(DRAFT_PREFIX) for name in names if is_draft(name)]
    return "hf" if all(map(_HF_DRAFT.match, drafts)) else "hf-original-drafts"


def head_and_embedding(layout: Layout) -> tuple[str, str]:
    """Names of the head and of the embedding that it may be tied to."""
    trunk = TRUNK["original" if layout == "original" else "hf"]
    return trunk["head"], trunk["embed"]


def _trunk(shape: ModelShape, dtype: DType, layout: Layout) -> Iterator[Recipe]:
    style = "original" if layout == "original" else "hf"
    disk = TRUNK[style]
    yield _whole("embed", dtype, disk["embed"], shape.vocab, shape.hidden)
    yield _whole("embed_norm", dtype, disk["embed_norm"], shape.hidden)
    yield _whole("norm", dtype, disk["norm"], shape.hidden)
    yield _whole("head", dtype, disk["head"], shape.vocab, shape.hidden)
    for i in range(shape.layers):
        block = _Block(f"layers.{i}.", f"{disk['prefix']}layers.{i}.", NAMINGS[style], shape, dtype)
        yield from block.attention(shape.kind(i))
        yield from block.dense() if shape.is_dense(i) else block.experts()


def _drafts(shape: ModelShape, dtype: DType, layout: Layout) -> Iterator[Recipe]:
    style = "hf" if layout == "hf" else "original"
    disk = DRAFTS[style]
    for d in range(shape.drafts.depths):
        engine, prefix = f"drafts.{d}.", f"{DRAFT_PREFIX}layers.{d}."
        for norm in ("hidden_norm", "embed_norm"):
            yield _whole(engine + norm, dtype, prefix + disk[norm], shape.hidden)
        width = 2 * shape.hidden
        yield _whole(engine + "input_proj", dtype, prefix + disk["input_proj"], shape.hidden, width)
        block = _Block(engine, prefix + disk["block"], NAMINGS[style], shape, dtype)
        yield from block.attention(shape.draft_kind(d))
        yield from block.dense()
    if shape.drafts.chain_norm:
        yield _whole("chain_norm", dtype, disk["chain_norm"], shape.hidden)


@dataclass(frozen=True)
class _Block:
    """One decoder block: engine names after `engine`, checkpoint names after `disk`."""

    engine: str
    disk: str
    naming: Naming
    shape: ModelShape
    dtype: DType

    def attention(self, kind: LayerKind) -> Iterator[Recipe]:
        """Both norms, attention and the four convolutions; k and v share one tensor each."""
        hidden, query = self.shape.hidden, kind.heads * kind.head_dim
        kv, relative = kind.kv_heads * kind.head_dim, kind.heads * self.shape.rel_dim
        yield self._whole("attn_norm", self.dtype, hidden)
        rows = (("q", query), ("k", kv), ("v", kv), ("r", relative))
        yield self._stack("qkvr", self.dtype, [self._part(role, n, hidden) for role, n in rows])
        taps = [self._taps("k_conv", kv), self._taps("v_conv", kv)]
        yield self._stack("kv_conv", "float32", taps)
        yield self._whole("q_norm", self.dtype, kind.head_dim)
        yield self._whole("k_norm", self.dtype, kind.head_dim)
        yield self._whole("rel_proj", self.dtype, self.shape.rel_dim, kind.extent)
        yield self._whole("o", self.dtype, hidden, query)
        yield self._stack("attn_conv", "float32", [self._taps("attn_conv", hidden)])
        yield self._whole("mlp_norm", self.dtype, hidden)
        yield self._stack("mlp_conv", "float32", [self._taps("mlp_conv", hidden)])

    def dense(self) -> Iterator[Recipe]:
        """A dense MLP: gate rows, then up rows."""
        hidden, width = self.shape.hidden, self.shape.dense_width
        yield self._stack("w13", self.dtype, self._gate_up("dense", (), width))
        yield self._stack("w2", self.dtype, [self._part("dense_down", hidden, width)])
        yield self._whole("global_scale", "float32", 1)

    def experts(self) -> Iterator[Recipe]:
        """Router and experts, the shared ones behind the routed ones."""
        shape, hidden, width = self.shape, self.shape.hidden, self.shape.expert_width
        routed, shared = shape.experts, shape.shared_experts
        yield self._whole("gate_weight", self.dtype, routed + shared, hidden)
        yield self._whole("gate_bias", "float32", routed)
        yield self._whole("gate_scale", "float32", 1)
        w13 = tuple(
            _moved(part, 0, offset)
            for source, count, offset in (("routed", routed, 0), ("shared", shared, routed))
            for part in _stacked(self._gate_up(source, (count,), width), 1)
        )
        size = (routed + shared, 2 * width, hidden)
        yield Recipe(name=f"{self.engine}experts_w13", dtype=self.dtype, shape=size, parts=w13)
        down = [
            self._part("routed_down", routed, hidden, width),
            self._part("shared_down", shared, hidden, width),
        ]
        yield self._stack("experts_w2", self.dtype, down)

    def _whole(self, role: str, dtype: DType, *size: int) -> Recipe:
        return _whole(self.engine + role, dtype, self.disk + self.naming.tensors[role], *size)

    def _stack(self, name: str, dtype: DType, parts: list[Part]) -> Recipe:
        placed = _stacked(parts, 0)
        rows = sum(part.shape[0] for part in placed)
        size = (rows, *placed[0].shape[1:])
        return Recipe(name=self.engine + name, dtype=dtype, shape=size, parts=tuple(placed))

    def _part(self, role: str, *size: int) -> Part:
        return _part(self.disk + self.naming.tensors[role], tuple((0, n, 1) for n in size), size)

    def _taps(self, role: str, channels: int) -> Part:
        """A depthwise convolution [channels, 1, kernel] as [channels, kernel]."""
        kernel = self.shape.conv_kernel
        source = ((0, channels, 1), (0, 1, 1), (0, kernel, 1))
        return _part(self.disk + self.naming.tensors[role], source, (channels, kernel))

    def _gate_up(self, mlp: str, leading: tuple[int, ...], width: int) -> list[Part]:
        """The gate rows and the up rows, [*leading, width, hidden] each."""
        hidden = self.shape.hidden
        outer = tuple((0, n, 1) for n in leading)
        return [
            _part(
                self.disk + tensor,
                (*outer, gate_up_rows(rows, width), (0, hidden, 1)),
                (*leading, width, hidden),
            )
            for tensor, rows in self.naming.gate_up[mlp]
        ]


def gate_up_rows(rows: Rows, width: int) -> tuple[int, int, int]:
    """(start, stop, step) of `width` gate or up rows in a tensor that holds them so."""
    return {
        "all": (0, width, 1),
        "even": (0, 2 * width, 2),
        "odd": (1, 2 * width, 2),
        "first": (0, width, 1),
        "second": (width, 2 * width, 1),
    }[rows]


def _whole(name: str, dtype: DType, tensor: str, *size: int) -> Recipe:
    part = _part(tensor, tuple((0, n, 1) for n in size), size)
    return Recipe(name=name, dtype=dtype, shape=size, parts=(part,))


def _part(tensor: str, source: tuple[tuple[int, int, int], ...], size: tuple[int, ...]) -> Part:
    return Part(tensor=tensor, source=source, offset=(0,) * len(size), shape=size)


def _stacked(parts: list[Part], axis: int) -> list[Part]:
    """`parts` one after another along `axis`."""
    starts = [sum(part.shape[axis] for part in parts[:i]) for i in range(len(parts))]
    return [_moved(part, axis, start) for part, start in zip(parts, starts, strict=True)]


def _moved(part: Part, axis: int, by: int) -> Part:
    offset = tuple(start + by * (i == axis) for i, start in enumerate(part.offset))
    return Part(tensor=part.tensor, source=part.source, offset=offset, shape=part.shape)
