"""Recipes: engine tensors from both layouts, and tensor parallelism as a transform of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import Config, tensor_shapes, tiny_config, to_text_only
from support.recipes import assemble, assemble_all
from torch import Tensor

from inkling_engine.artifacts.errors import UsageError
from inkling_engine.artifacts.spec import LayerKind, ModelShape
from inkling_engine.compile.models.inkling import names, shard
from inkling_engine.compile.models.inkling.shape import from_config, preset
from inkling_engine.compile.recipes import source_shapes, take

EXAMPLES = settings(max_examples=25)


def numbered(config: Config) -> dict[str, Tensor]:
    """Checkpoint tensors all of whose values differ."""
    result, start = {}, 0
    for name, size in tensor_shapes(config).items():
        result[name] = torch.arange(start, start + math.prod(size)).float().view(size)
        start += math.prod(size)
    assert start < 1 << 24, "values must be exact in float32"
    return result


def engine_tensors(config: Config, tp: int = 1, rank: int = 0) -> dict[str, Tensor]:
    shape = from_config(config, {})
    recipes = names.recipes(shape, "float32", "original", tp, rank)
    return assemble_all(recipes, numbered(config))


def test_engine_tensors_are_the_fused_checkpoint_tensors() -> None:
    config = tiny_config()
    disk, engine = numbered(config), engine_tensors(config)
    layer = "model.llm.layers.1."
    rows = ("wq_du", "wk_dv", "wv_dv", "wr_du")
    fused = torch.cat([disk[f"{layer}attn.{name}.weight"] for name in rows])
    assert torch.equal(engine["layers.1.qkvr"], fused)
    convs = [disk[f"{layer}attn.{name}_sconv.weight"][:, 0] for name in "kv"]
    assert torch.equal(engine["layers.1.kv_conv"], torch.cat(convs))
    assert torch.equal(engine["layers.1.mlp_conv"], disk[layer + "mlp_sconv.weight"][:, 0])
    w13, shared = (
        disk[f"{layer}mlp.{name}w13_weight"] for name in ("experts.", "shared_experts.shared_")
    )
    halves = torch.cat([torch.cat([w[:, 0::2], w[:, 1::2]], 1) for w in (w13, shared)])
    assert torch.equal(engine["layers.1.experts_w13"], halves)
    down = torch.cat(
        [
            disk[layer + "mlp.experts.w2_weight"],
            disk[layer + "mlp.shared_experts.shared_w2_weight"],
        ]
    )
    assert torch.equal(engine["layers.1.experts_w2"], down)
    dense = disk["model.llm.layers.0.mlp.w13_dn.weight"]
    assert torch.equal(engine["layers.0.w13"], torch.cat([dense[0::2], dense[1::2]]))
    draft = disk["model.mtp.layers.2.transformer_block.attn.wo_ud.weight"]
    assert torch.equal(engine["drafts.2.o"], draft)
    assert torch.equal(engine["chain_norm"], disk["model.mtp.chain_norm.weight"])


def test_recipes_read_every_tensor_of_the_format_wholly() -> None:
    shape = from_config(tiny_config(), {})
    recipes = names.recipes(shape, "bfloat16", "original")
    assert source_shapes(recipes) == tensor_shapes(tiny_config())
    assert sum(math.prod(r.shape) for r in recipes) == sum(
        math.prod(size) for size in tensor_shapes(tiny_config()).values()
    )


def test_conv_taps_and_router_constants_stay_float32() -> None:
    recipes = names.recipes(from_config(tiny_config(), {}), "bfloat16", "original")
    roles = {r.name.rpartition(".")[2]: r.dtype for r in recipes}
    wide = {role for role, dtype in roles.items() if dtype == "float32"}
    convs = {"kv_conv", "attn_conv", "mlp_conv"}
    assert wide == convs | {"global_scale", "gate_bias", "gate_scale"}


@pytest.mark.parametrize("layout", ["hf", "hf-original-drafts"])
def test_both_layouts_make_the_same_engine_tensors(layout: names.Layout) -> None:
    config = tiny_config()
    original = numbered(config)
    renamed = {names.canonical(n): t for n, t in to_text_only(original).items()}
    if layout == "hf-original-drafts":
        renamed = {n: t for n, t in renamed.items() if not names.is_draft(n)}
        renamed |= {n: t for n, t in original.items() if names.is_draft(n)}
    assert names.detect(renamed) == layout
    recipes = names.recipes(from_config(config, {}), "float32", layout)
    found = assemble_all(recipes, renamed)
    expected = engine_tensors(config)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert source_shapes(recipes) == {n: tuple(t.shape) for n, t in renamed.items()}


def test_reading_halves_instead_of_pairs_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: gate and up taken as halves of the vendor's interleaved rows."""

    def halves(rows: names.Rows, width: int) -> tuple[int, int, int]:
        first = rows in ("all", "even", "first")
        return (0, width, 1) if first else (width, 2 * width, 1)

    right = engine_tensors(tiny_config())
    monkeypatch.setattr(names, "gate_up_rows", halves)
    with pytest.raises(AssertionError):
        test_engine_tensors_are_the_fused_checkpoint_tensors()
    wrong = engine_tensors(tiny_config())
    differing = {n.rpartition(".")[2] for n in right if not torch.equal(right[n], wrong[n])}
    assert differing == {"w13", "experts_w13"}


@pytest.mark.parametrize(
    ("disk", "canonical"),
    [
        ("model.llm.layers.0.attn.wq_du.weight", "model.llm.layers.0.attn.wq_du.weight"),
        ("language_model.model.llm.embed.weight", "model.llm.embed.weight"),
        ("model.language_model.llm.embed.weight", "model.llm.embed.weight"),
        ("model.language_model.layers.3.mlp.gate.weight", "model.layers.3.mlp.gate.weight"),
        ("language_model.model.layers.3.mlp.gate.weight", "model.layers.3.mlp.gate.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("mtp.layers.0.hidden_norm.weight", "model.mtp.layers.0.hidden_norm.weight"),
        ("layers.0.hnorm.weight", "model.mtp.layers.0.hnorm.weight"),
        (
            "mtp.layers.0.mtp_block.mlp.global_scale",
            "model.mtp.layers.0.mtp_block.mlp.global_scale",
        ),
        ("shared_post_norm.weight", "model.mtp.shared_post_norm.weight"),
    ],
)
def test_prefixes_of_exporters_are_stripped(disk: str, canonical: str) -> None:
    assert names.canonical(disk) == canonical


def test_towers_are_recognised() -> None:
    for name in (
        "model.visual.layers.norm_0.weight",
        "model.audio.encoder.weight",
        "model.vision_tower.final_norm.weight",
        "model.audio_tower.norm.weight",
        "language_model.model.visual.final_norm.weight",
    ):
        assert names.is_tower(names.canonical(name))
    assert not names.is_tower("model.llm.embed.weight")


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Small models that can be split four ways, kv heads fewer or more than ranks."""
    config = tiny_config()
    heads = draw(st.sampled_from([4, 8]))
    kv_heads = st.sampled_from([n for n in (1, 2, 4, 8) if heads % n == 0])
    config["text_config"] |= {
        "hidden_size": draw(st.integers(1, 6)),
        "num_hidden_layers": 2,
        "local_layer_ids": draw(st.sampled_from([[], [0], [1], [0, 1]])),
        "num_attention_heads": heads,
        "num_key_value_heads": draw(kv_heads),
        "swa_num_attention_heads": heads,
        "swa_num_key_value_heads": draw(kv_heads),
        "head_dim": draw(st.integers(1, 4)),
        "swa_head_dim": draw(st.integers(1, 4)),
        "d_rel": draw(st.integers(1, 3)),
        "dense_intermediate_size": 4 * draw(st.integers(1, 3)),
        "intermediate_size": 4 * draw(st.integers(1, 3)),
        "n_routed_experts": draw(st.integers(2, 4)),
        "n_shared_experts": draw(st.integers(1, 3)),
        "vocab_size": 4 * draw(st.integers(1, 4)),
        "unpadded_vocab_size": None,
    }
    return config


def joined(shares: list[Tensor], axis: int, sizes: list[tuple[int, int]]) -> Tensor:
    """Undo a split: `sizes` are (units of the whole tensor, unit size) of each section."""
    tp = len(shares)
    rank_sizes = [max(1, units // tp) * size for units, size in sizes]
    pieces = [torch.split(share, rank_sizes, axis) for share in shares]
    whole = []
    for i, (units, _) in enumerate(sizes):
        repeats = max(1, tp // units)
        for rank in range(tp):
            assert torch.equal(pieces[rank][i], pieces[rank - rank % repeats][i]), "replicas differ"
        whole.append(torch.cat([pieces[rank][i] for rank in range(0, tp, repeats)], axis))
    return torch.cat(whole, axis)


def sections(name: str, shape: ModelShape) -> tuple[int, list[tuple[int, int]]] | None:
    """Axis and sections of a split engine tensor, as spec 4.1 states them."""
    scope, _, role = name.rpartition(".")
    index = int(scope.split(".")[1]) if scope else 0
    is_local = index in (shape.drafts.local_depths if "drafts" in scope else shape.local_layers)
    kind: LayerKind = shape.local if is_local else shape.full
    query, kv = (kind.heads, kind.head_dim), (kind.kv_heads, kind.head_dim)
    table: dict[str, tuple[int, list[tuple[int, int]]]] = {
        "embed": (0, [(shape.vocab, 1)]),
        "head": (0, [(shape.vocab, 1)]),
        "qkvr": (0, [query, kv, kv, (kind.heads, shape.rel_dim)]),
        "kv_conv": (0, [kv, kv]),
        "o": (1, [query]),
        "w13": (0, [(shape.dense_width, 1)] * 2),
        "w2": (1, [(shape.dense_width, 1)]),
        "experts_w13": (1, [(shape.expert_width, 1)] * 2),
        "experts_w2": (2, [(shape.expert_width, 1)]),
    }
    return table.get(role)


@EXAMPLES
@given(config=configs(), tp=st.sampled_from([2, 4]))
def test_all_ranks_together_are_the_whole_model(config: Config, tp: int) -> None:
    shape = from_config(config, {})
    whole = engine_tensors(config)
    ranks = [engine_tensors(config, tp, rank) for rank in range(tp)]
    for name, tensor in whole.items():
        shares = [rank[name] for rank in ranks]
        cut = sections(name, shape)
        if cut is None:
            assert all(torch.equal(share, tensor) for share in shares), name
        else:
            assert torch.equal(joined(shares, *cut), tensor), name


def _gated(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    gate, up = (x @ w13.T).chunk(2, -1)
    return (gate.sigmoid() * gate * up) @ w2.T


def _mixed(x: Tensor, weights: dict[str, Tensor], scope: str, kind: LayerKind) -> Tensor:
    """A stand-in for attention: each query head gives its query plus key times value of its group."""
    sizes = [n * kind.head_dim for n in (kind.heads, kind.kv_heads, kind.kv_heads)]
    q, k, v, _ = (x @ weights[f"{scope}qkvr"].T).tensor_split(torch.tensor(sizes).cumsum(0), -1)
    kv = (k * v).view(len(x), kind.kv_heads, kind.head_dim)
    heads = kv.repeat_interleave(kind.heads // kind.kv_heads, 1).flatten(1)
    return (q + heads) @ weights[f"{scope}o"].T


def _parts(x: Tensor, weights: dict[str, Tensor], shape: ModelShape) -> list[Tensor]:
    """What the blocks' reductions are over: attention, dense MLPs, experts."""
    names = [name for name in weights if name.endswith("w13")]
    parts = [
        _gated(x, w13, w2)
        for name in names
        for w13, w2 in (
            zip(weights[name], weights[name.replace("w13", "w2")], strict=True)
            if "experts" in name
            else [(weights[name], weights[name.replace("w13", "w2")])]
        )
    ]
    layers = range(shape.layers)
    return parts + [_mixed(x, weights, f"layers.{i}.", shape.kind(i)) for i in layers]


@EXAMPLES
@given(config=configs(), tp=st.sampled_from([2, 4]), seed=st.integers(0, 99))
def test_the_ranks_products_add_up_to_the_whole_models(config: Config, tp: int, seed: int) -> None:
    """And the embedding's rows and the logits' columns lie one rank after another."""
    generator = torch.Generator().manual_seed(seed)
    disk = {n: torch.randn(s, generator=generator) for n, s in tensor_shapes(config).items()}
    shape = from_config(config, {})
    x = torch.randn(3, shape.hidden, generator=generator)
    whole, *ranks = (
        assemble_all(names.recipes(shape, "float32", "original", *split), disk)
        for split in ((1, 0), *((tp, rank) for rank in range(tp)))
    )
    shares = [_parts(x, weights, shard.rank_shape(shape, tp)) for weights in ranks]
    for expected, *given_parts in zip(_parts(x, whole, shape), *shares, strict=True):
        found = torch.stack(given_parts).sum(0)
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(torch.cat([weights["embed"] for weights in ranks]), whole["embed"])
    logits = torch.cat([x @ weights["head"].T for weights in ranks], -1)
    assert torch.allclose(logits, x @ whole["head"].T, rtol=1e-5, atol=1e-5)


@EXAMPLES
@given(config=configs(), tp=st.sampled_from([2, 4]))
def test_a_rank_has_the_block_shapes_of_its_own_model(config: Config, tp: int) -> None:
    shape = from_config(config, {})
    alone = names.recipes(shard.rank_shape(shape, tp), "float32", "original")
    share = names.recipes(shape, "float32", "original", tp, rank=tp - 1)
    pairs = [(a, b) for a, b in zip(alone, share, strict=True) if a.name not in ("embed", "head")]
    assert all((a.name, a.shape, a.dtype) == (b.name, b.shape, b.dtype) for a, b in pairs)


def test_every_query_head_finds_its_kv_head_on_its_rank() -> None:
    """4 ranks over 2 kv heads: query head i reads kv head i // group (spec 2.4)."""
    config = tiny_config()
    config["text_config"] |= {"num_attention_heads": 8, "num_key_value_heads": 2}
    whole = engine_tensors(config)["layers.5.qkvr"]
    for rank in range(4):
        share = engine_tensors(config, 4, rank)["layers.5.qkvr"]
        group_of = [head // 4 for head in (2 * rank, 2 * rank + 1)]
        assert group_of[0] == group_of[1]
        k = share[2 * 16 : 3 * 16]
        start = 8 * 16 + group_of[0] * 16
        assert torch.equal(k, whole[start : start + 16])


@pytest.mark.parametrize(
    ("tp", "reasons"),
    [
        (0, ["at least 1"]),
        (3, ["64 query heads of full layers", "8 kv heads of full layers"]),
        (128, ["query heads of window layers", "vocabulary rows"]),
    ],
)
def test_impossible_splits_are_refused_with_every_reason(tp: int, reasons: list[str]) -> None:
    shape = preset("inkling")
    assert shape is not None
    with pytest.raises(UsageError) as caught:
        names.recipes(shape, "bfloat16", "original", tp)
    assert caught.value.field == "--tp"
    assert all(reason in str(caught.value) for reason in reasons)


@pytest.mark.parametrize(
    ("name", "tp", "expected"),
    [
        ("inkling-small", 8, {"0.qkvr": 832, "5.qkvr": 832, "0.w13": 4096}),
        ("inkling", 8, {"0.qkvr": 1664, "5.qkvr": 1408, "0.w13": 6144}),
        ("inkling", 16, {"0.qkvr": 832, "5.qkvr": 832, "0.w13": 3072}),
    ],
)
def test_rank_shapes_are_the_specified_ones(name: str, tp: int, expected: dict[str, Any]) -> None:
    shape = preset(name)
    assert shape is not None
    rows = {r.name: r.shape[0] for r in names.recipes(shape, "bfloat16", "original", tp, tp - 1)}
    assert {key: rows[f"layers.{key}"] for key in expected} == expected
    assert rows["embed"] == 201_024 // tp


@EXAMPLES
@given(
    axis=st.integers(0, 2),
    cuts=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=3),
)
def test_taking_intervals_is_indexing(axis: int, cuts: list[tuple[int, int]]) -> None:
    config = tiny_config()
    config["text_config"] |= {"hidden_size": 10, "intermediate_size": 4}
    shape, tensors = from_config(config, {}), numbered(config)
    recipes = {r.name: r for r in names.recipes(shape, "float32", "original")}
    recipe = recipes["layers.1.experts_w13"]
    intervals = [(min(cut), max(cut)) for cut in cuts]
    found = assemble(take(recipe, axis, intervals), tensors)
    whole = assemble(recipe, tensors)
    pieces = [whole.narrow(axis, start, stop - start) for start, stop in intervals]
    assert torch.equal(found, torch.cat(pieces, axis))
