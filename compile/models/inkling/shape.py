"""`config.json` -> `ModelShape`, for both published dialects, and the presets.

The dialect is decided by the presence of `dense_intermediate_size`: with it `intermediate_size` is
the expert width, without it the dense width (spec 1.2). It says nothing about how the tensors of
the checkpoint are named. `text_config` may be nested or be the whole file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from inkling_engine.artifacts.errors import UsageError
from inkling_engine.artifacts.spec import DraftShape, LayerKind, ModelShape
from inkling_engine.compile.folder import CONFIG, read_json, require_folder
from inkling_engine.compile.models.inkling.config import (
    INERT,
    INERT_TOP,
    Section,
    agreed,
    check_model_type,
    indices,
    refuse,
)

PRESETS: Final = ("inkling", "inkling-small", "inkling-tiny")
TINY: Final = Path(__file__).parent / "tiny"
GENERATION_CONFIG: Final = "generation_config.json"
QUANTIZATION: Final = "hf_quant_config.json"

MOST_LAYERS: Final = 4096
"""Each layer's tensors are listed before one of them is looked for: a mistyped number would take
all memory. No model comes near it."""
LAYER_TYPES: Final = {"hybrid_sliding": True, "hybrid": False}
MLP_TYPES: Final = {"dense": True, "sparse": False}


def preset(name: str) -> ModelShape | None:
    """The shape of a published model, None if `name` is not one of PRESETS."""
    if name == "inkling":
        return _published(hidden=6144, layers=66, heads=64, local_kv_heads=16, expert_width=3072)
    if name == "inkling-small":
        return _published(hidden=4096, layers=42, heads=32, local_kv_heads=8, expert_width=2048)
    return read_config(TINY) if name == "inkling-tiny" else None


def first_layers(shape: ModelShape, layers: int) -> ModelShape:
    """A model of the first `layers` layers; drafts as they are."""
    local = tuple(i for i in shape.local_layers if i < layers)
    dense = min(shape.dense_layers, layers)
    return msgspec.structs.replace(shape, layers=layers, local_layers=local, dense_layers=dense)


def read_config(folder: Path) -> ModelShape:
    """The shape of the checkpoint in `folder`. Raises UsageError naming the key at fault."""
    require_folder(folder, PRESETS)
    config, generation = folder / CONFIG, folder / GENERATION_CONFIG
    if (folder / QUANTIZATION).exists():
        raise _quantised(QUANTIZATION, read_json(folder / QUANTIZATION).get("quantization"))
    return from_config(read_json(config), read_json(generation) if generation.exists() else {})


def from_config(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelShape:
    """The shape that `config` (and the stop ids that `generation`, if it names any) state."""
    check_model_type(config)
    nested = config.get("text_config")
    if nested is not None and not isinstance(nested, dict):
        raise refuse("config.json text_config", nested, "an object")
    top = Section("", config)
    text = top if nested is None else Section("text_config", nested)
    drafts = {} if config.get("mtp_config") is None else config["mtp_config"]
    if not isinstance(drafts, dict):
        raise refuse("config.json mtp_config", drafts, "an object")
    mtp = Section("mtp_config", drafts)
    check_model_type(text.values, text.name)
    for section in (top, text):
        _refuse_quantised(section)
    shape = _shape(text, mtp, _eos_tokens(top, generation))
    top.read |= {"text_config", "mtp_config", "eos_token_id"}
    text.read.add("eos_token_id")
    top.refuse_rest(INERT | INERT_TOP)
    text.refuse_rest(INERT | (INERT_TOP if text is top else frozenset()))
    mtp.refuse_rest(frozenset())
    _check(shape)
    return shape


def ties_embeddings(config: Mapping[str, Any]) -> bool | None:
    """What the configuration says about `tie_word_embeddings`, None if nothing."""
    key = "tie_word_embeddings"
    nested = Section("text_config", config.get("text_config") or {})
    tied: bool | None = agreed(nested.given(key) + Section("", config).given(key))
    return tied


def _shape(text: Section, mtp: Section, eos_tokens: tuple[int, ...]) -> ModelShape:
    layers = text.integer("num_hidden_layers", maximum=MOST_LAYERS)
    full, local = _kinds(text)
    dense_width, expert_width = _widths(text)
    floor = text.integer("log_scaling_n_floor", minimum=0, default=0)
    vocab = text.integer("vocab_size")
    return ModelShape(
        hidden=text.integer("hidden_size"),
        layers=layers,
        local_layers=_local_layers(text, layers),
        full=full,
        local=local,
        rel_dim=text.integer("d_rel"),
        log_floor=floor,
        log_alpha=_log_alpha(text, floor),
        dense_layers=_dense_layers(text, layers),
        dense_width=dense_width,
        experts=text.integer("n_routed_experts", "num_local_experts"),
        experts_per_token=text.integer("num_experts_per_tok"),
        shared_experts=text.integer("n_shared_experts"),
        expert_width=expert_width,
        route_scale=text.real("route_scale"),
        conv_kernel=_conv_kernel(text),
        vocab=vocab,
        real_vocab=text.integer("unpadded_vocab_size", default=vocab),
        mup=text.real("logits_mup_width_multiplier", "embedding_multiplier"),
        eps=text.real("rms_norm_eps"),
        max_context=text.integer("model_max_length", "max_position_embeddings"),
        eos_tokens=eos_tokens,
        drafts=_drafts(text, mtp, local.window),
    )


def _kinds(text: Section) -> tuple[LayerKind, LayerKind]:
    """Full and local geometry; absent `swa_*` keys mean the full values."""
    heads = text.integer("num_attention_heads")
    kv_heads = text.integer("num_key_value_heads")
    head_dim = text.integer("head_dim")
    window = text.integer("sliding_window_size", "sliding_window")
    extent = text.integer("rel_extent")
    full = LayerKind(heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=0, extent=extent)
    local = LayerKind(
        heads=text.integer("swa_num_attention_heads", default=heads),
        kv_heads=text.integer("swa_num_key_value_heads", default=kv_heads),
        head_dim=text.integer("swa_head_dim", default=head_dim),
        window=window,
        extent=window,
    )
    return full, local


def _widths(text: Section) -> tuple[int, int]:
    """(dense, expert) MLP width under the dialect that the keys reveal."""
    if text.given("dense_intermediate_size"):
        dense = text.integer("dense_intermediate_size")
        return dense, text.integer("intermediate_size", "moe_intermediate_size")
    return text.integer("intermediate_size"), text.integer("moe_intermediate_size")


def _log_alpha(text: Section, floor: int) -> float:
    """0 without a floor, so that an unused alpha does not tell two equal models apart."""
    text.given("log_scaling_alpha")
    return text.real("log_scaling_alpha") if floor else 0.0


def _conv_kernel(text: Section) -> int:
    kernel = text.integer("sconv_kernel_size", "conv_kernel_size", default=4)
    if kernel != 4:
        raise refuse(text.label("sconv_kernel_size"), kernel, "4, the only kernel implemented")
    return kernel


def _local_layers(text: Section, layers: int) -> tuple[int, ...]:
    """Layers with a sliding window; without any key, all but every sixth."""
    given = indices(text.given("local_layer_ids"), layers)
    given += [
        (label, tuple(i for i, local in enumerate(flags) if local))
        for label, flags in _flags(text, "layer_types", layers, LAYER_TYPES)
    ]
    found = agreed(given)
    if found is None:
        return tuple(i for i in range(layers) if (i + 1) % 6)
    return tuple(found)


def _dense_layers(text: Section, layers: int) -> int:
    """How many leading layers have a dense MLP."""
    given = text.given("dense_mlp_idx")
    for label, flags in _flags(text, "mlp_layer_types", layers, MLP_TYPES):
        if any(flags[sum(flags) :]):
            raise refuse(label, "dense after sparse", "all dense layers first")
        given.append((label, sum(flags)))
    found = agreed(given)
    if type(found) is not int or not 0 <= found <= layers:
        raise refuse(text.label("dense_mlp_idx"), found, f"a whole number from 0 to {layers}")
    return found


def _flags(
    text: Section, key: str, layers: int, meanings: Mapping[str, bool]
) -> list[tuple[str, list[bool]]]:
    """The list of layer type names under `key` as flags: at most one (label, flags)."""
    given = text.given(key)
    for label, value in given:
        names = tuple(meanings)  # what cannot be a key is no name either
        valid = isinstance(value, list) and len(value) == layers
        if not valid or any(name not in names for name in value):
            raise refuse(label, value, f"{layers} names out of {', '.join(meanings)}")
    return [(label, [meanings[name] for name in value]) for label, value in given]


def _drafts(text: Section, mtp: Section, window: int) -> DraftShape:
    """The draft depths, stated in `mtp_config`, in the text configuration, or in both."""
    keys = mtp.given("num_nextn_predict_layers", "n_layers") + text.given("num_mtp_layers")
    depths = agreed(keys) or 0
    if type(depths) is not int or not 0 <= depths <= MOST_LAYERS:
        raise refuse(keys[0][0], depths, f"a whole number from 0 to {MOST_LAYERS}")
    local = mtp.given("local_layer_ids") + text.given("mtp_local_layer_ids")
    chain = agreed(mtp.given("chain_hidden_post_norm") + text.given("chain_hidden_post_norm"))
    for label, extent in mtp.given("local_extent"):
        if extent != window:
            raise refuse(label, extent, f"the window {window}, the only extent implemented")
    if not depths:
        return DraftShape(depths=0, local_depths=(), chain_norm=False)
    if chain not in (None, True, False):
        raise refuse(mtp.label("chain_hidden_post_norm"), chain, "true or false")
    return DraftShape(
        depths=depths, local_depths=agreed(indices(local, depths)) or (), chain_norm=bool(chain)
    )


def _eos_tokens(top: Section, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end generation: the generation configuration's, else the top level's.

    A nested `eos_token_id` is ignored: saved files fill it with a class default (spec 1.1).
    """
    given = Section("generation", generation).given("eos_token_id") or top.given("eos_token_id")
    if not given:
        return ()
    label, value = given[0]
    tokens = value if isinstance(value, list) else [value]
    if any(type(token) is not int or token < 0 for token in tokens):
        raise refuse(label, value, "a token id or a list of them")
    return tuple(dict.fromkeys(tokens))


def _refuse_quantised(section: Section) -> None:
    for label, value in section.given("quantization_config", "compression_config"):
        raise _quantised(label, value)


def _quantised(label: str, value: Any) -> UsageError:
    """The refusal of a quantised checkpoint, by the name of its method if it states one."""
    stated = value if isinstance(value, dict) else {}
    method = stated.get("quant_algo") or stated.get("quant_method") or "a quantised checkpoint"
    return refuse(label, method, "bf16 or f32 weights", "use the unquantised release of the model")


def _check(shape: ModelShape) -> None:
    """Refuse numbers that are fine one by one but not together."""
    labels = ("num_key_value_heads", "swa_num_key_value_heads")
    for kind, label in zip((shape.full, shape.local), labels, strict=True):
        if kind.heads % kind.kv_heads:
            raise refuse(label, kind.kv_heads, f"a divisor of the {kind.heads} query heads")
    if shape.real_vocab > shape.vocab:
        raise refuse("unpadded_vocab_size", shape.real_vocab, f"at most vocab_size {shape.vocab}")
    if shape.experts_per_token > shape.experts:
        raise refuse("num_experts_per_tok", shape.experts_per_token, f"at most {shape.experts}")
    if beyond := [token for token in shape.eos_tokens if token >= shape.real_vocab]:
        raise refuse("eos_token_id", beyond, f"ids below the vocabulary's {shape.real_vocab}")


def _published(
    *, hidden: int, layers: int, heads: int, local_kv_heads: int, expert_width: int
) -> ModelShape:
    """A published model: the columns of spec 1.1, with what they have in common filled in."""
    full = LayerKind(heads=heads, kv_heads=8, head_dim=128, window=0, extent=1024)
    return ModelShape(
        hidden=hidden,
        layers=layers,
        local_layers=tuple(i for i in range(layers) if (i + 1) % 6),
        full=full,
        local=LayerKind(heads=heads, kv_heads=local_kv_heads, head_dim=128, window=512, extent=512),
        rel_dim=16,
        log_floor=128_000,
        log_alpha=0.1,
        dense_layers=2,
        dense_width=8 * expert_width,
        experts=256,
        experts_per_token=6,
        shared_experts=2,
        expert_width=expert_width,
        route_scale=8.0,
        conv_kernel=4,
        vocab=201_024,
        real_vocab=200_058,
        mup=hidden / 256,
        eps=1e-6,
        max_context=1_048_576,
        eos_tokens=(200_006,),
        drafts=DraftShape(depths=8, local_depths=(0, 2, 4, 5, 6, 7), chain_norm=False),
    )
