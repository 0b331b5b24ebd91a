"""config.json -> ModelShape: presets, dialects, defaults, and refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.checkpoints import Config, tiny_config

from inkling_engine.artifacts.errors import CorruptError, UsageError
from inkling_engine.artifacts.spec import DraftShape, LayerKind, ModelShape
from inkling_engine.compile.models.inkling import shape as shapes
from inkling_engine.compile.models.inkling.sizes import parameters, weight_bill


def shape_of(config: Config, generation: Config | None = None) -> ModelShape:
    return shapes.from_config(config, generation or {})


def preset(name: str) -> ModelShape:
    found = shapes.preset(name)
    assert found is not None
    return found


def changed(section: str, key: str, value: Any) -> Config:
    config = tiny_config()
    (config[section] if section else config)[key] = value
    return config


def without(*keys: str) -> Config:
    config = tiny_config()
    for key in keys:
        del config["text_config"][key]
    return config


def second_dialect(config: Config) -> Config:
    """The same configuration as transformers saves it."""
    text, mtp = dict(config["text_config"]), config["mtp_config"]
    layers, local, dense = (
        text.pop("num_hidden_layers"),
        text.pop("local_layer_ids"),
        text.pop("dense_mlp_idx"),
    )
    text |= {
        "num_hidden_layers": layers,
        "layer_types": ["hybrid_sliding" if i in local else "hybrid" for i in range(layers)],
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
        "moe_intermediate_size": text.pop("intermediate_size"),
        "intermediate_size": text.pop("dense_intermediate_size"),
        "conv_kernel_size": text.pop("sconv_kernel_size"),
        "max_position_embeddings": text.pop("model_max_length"),
        "num_mtp_layers": mtp["num_nextn_predict_layers"],
        "mtp_local_layer_ids": mtp["local_layer_ids"],
        "chain_hidden_post_norm": mtp["chain_hidden_post_norm"],
        "mtp_hidden_states_first": True,
        "number_of_conv_states": 4,
        "rms_norm_eps_moe_gate": 1e-6,
    }
    return {"model_type": "inkling_mm_model", "text_config": text}


@pytest.mark.parametrize(
    ("name", "text", "drafts"),
    [
        ("inkling", 947_025_564_226, 5_260_445_704),
        ("inkling-small", 263_655_199_274, 2_231_912_456),
    ],
)
def test_presets_have_the_published_parameter_counts(name: str, text: int, drafts: int) -> None:
    assert parameters(preset(name)) == (text, drafts)


def test_presets_have_the_published_bytes() -> None:
    """BF16 payload of the release less its towers' bf16 tensors (spec 1.3)."""
    towers = {"inkling": 83_743_232 + 7_870_464, "inkling-small": 64_080_384 + 5_246_976}
    payload = {"inkling": 1_904_755_280_148, "inkling-small": 531_912_898_740}
    for name, total in payload.items():
        bill = weight_bill(preset(name), "bfloat16", 1)
        assert bill.text_decoder + bill.drafts + 2 * towers[name] == total


def test_small_at_eight_ranks_has_the_stated_bytes() -> None:
    bill = weight_bill(preset("inkling-small"), "bfloat16", 8)
    assert bill.text_decoder == 65_991_558_308
    assert bill.drafts == 1_028_575_248
    convs = 2 * (344_064 // 8 + 1_376_256) + 2 * (65_536 // 8 + 262_144)
    assert bill.text_decoder_fp32 + bill.drafts_fp32 == convs + 2 * (2 + 8)
    assert bill.total - bill.file == bill.text_decoder_padding + bill.drafts_padding
    last = weight_bill(preset("inkling-small"), "bfloat16", 8, rank=7)
    assert (bill.unreal_vocabulary, last.unreal_vocabulary) == (0, 2 * 966 * 4096 * 2)


def test_an_unknown_name_is_no_preset() -> None:
    assert shapes.preset("inkling-huge") is None
    assert all(shapes.preset(name) for name in shapes.PRESETS)


def test_presets_are_the_published_values() -> None:
    small = preset("inkling-small")
    assert small.full == LayerKind(heads=32, kv_heads=8, head_dim=128, window=0, extent=1024)
    assert small.local == LayerKind(heads=32, kv_heads=8, head_dim=128, window=512, extent=512)
    assert [i for i in range(42) if not small.is_local(i)] == [5, 11, 17, 23, 29, 35, 41]
    assert (small.mup, small.eos_tokens, small.dense_width) == (16.0, (200_006,), 16_384)
    big = preset("inkling")
    assert (big.count(local=False), big.local.kv_heads, big.mup) == (11, 16, 24.0)
    assert big.drafts == DraftShape(depths=8, local_depths=(0, 2, 4, 5, 6, 7), chain_norm=False)


def test_the_packaged_model_is_read_from_its_folder() -> None:
    tiny = preset("inkling-tiny")
    assert (tiny.hidden, tiny.dense_width, tiny.expert_width) == (192, 256, 96)
    assert (tiny.vocab, tiny.real_vocab, tiny.eos_tokens) == (2048, 2040, (2,))
    assert tiny.drafts == DraftShape(depths=4, local_depths=(0, 1, 2, 3), chain_norm=True)


def test_both_dialects_give_the_same_shape() -> None:
    expected = shape_of(tiny_config())
    assert (expected.dense_width, expected.expert_width) == (96, 24)
    nested = second_dialect(tiny_config())
    assert shape_of(nested) == expected
    assert shape_of({**nested["text_config"], "model_type": "inkling_text"}) == expected
    flat = tiny_config()
    assert shape_of({**flat["text_config"], "mtp_config": flat["mtp_config"]}) == expected


def test_both_dialects_in_one_file_must_agree() -> None:
    both = tiny_config()
    saved = second_dialect(tiny_config())["text_config"]
    both["text_config"] = saved | {"local_layer_ids": [0, 1, 2, 3, 4], "dense_mlp_idx": 1}
    assert shape_of(both) == shape_of(tiny_config())


@pytest.mark.parametrize(
    ("key", "value", "other"),
    [
        ("layer_types", ["hybrid"] * 6, "local_layer_ids"),
        ("mlp_layer_types", ["sparse"] * 6, "dense_mlp_idx"),
        ("conv_kernel_size", 3, "sconv_kernel_size"),
        ("max_position_embeddings", 512, "model_max_length"),
        ("moe_intermediate_size", 25, "intermediate_size"),
        ("num_mtp_layers", 2, "num_nextn_predict_layers"),
        ("mtp_local_layer_ids", [0], "local_layer_ids"),
        ("chain_hidden_post_norm", False, "chain_hidden_post_norm"),
        ("num_local_experts", 4, "n_routed_experts"),
    ],
)
def test_contradictory_names_of_a_fact_are_refused(key: str, value: Any, other: str) -> None:
    with pytest.raises(UsageError) as caught:
        shape_of(changed("text_config", key, value))
    assert key in caught.value.field and other in caught.value.field


def test_transformers_saves_what_we_read(tmp_path: Path) -> None:
    """Its own configuration class, fed the vendor's dialect, saves the other one."""
    transformers = pytest.importorskip("transformers")
    config = transformers.InklingConfig(**tiny_config())
    config.save_pretrained(tmp_path / "whole")
    config.text_config.save_pretrained(tmp_path / "text")
    expected = shape_of(tiny_config())
    for folder in ("whole", "text"):
        found = shapes.read_config(tmp_path / folder)
        assert msgspec.structs.replace(found, eos_tokens=()) == expected


def test_absent_window_geometry_falls_back_to_the_full_one() -> None:
    shape = shape_of(without("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim"))
    assert shape.local == LayerKind(heads=4, kv_heads=1, head_dim=16, window=8, extent=8)


@pytest.mark.parametrize(
    ("ids", "local"),
    [(None, (0, 1, 2, 3, 4)), ([], ()), ([4, 0], (0, 4))],
)
def test_local_layers(ids: list[int] | None, local: tuple[int, ...]) -> None:
    assert shape_of(changed("text_config", "local_layer_ids", ids)).local_layers == local
    assert shape_of(without("local_layer_ids")).local_layers == (0, 1, 2, 3, 4)


def test_without_a_floor_there_is_no_log_scaling() -> None:
    for config in (
        changed("text_config", "log_scaling_n_floor", None),
        without("log_scaling_n_floor"),
    ):
        assert (shape_of(config).log_floor, shape_of(config).log_alpha) == (0, 0.0)


@pytest.mark.parametrize(
    ("mtp", "expected"),
    [
        (None, DraftShape(depths=0, local_depths=(), chain_norm=False)),
        ({}, DraftShape(depths=0, local_depths=(), chain_norm=False)),
        ({"n_layers": 2}, DraftShape(depths=2, local_depths=(), chain_norm=False)),
        (
            {"num_nextn_predict_layers": 2, "local_layer_ids": [1], "local_extent": 8},
            DraftShape(depths=2, local_depths=(1,), chain_norm=False),
        ),
    ],
)
def test_draft_depths(mtp: Config | None, expected: DraftShape) -> None:
    assert shape_of(changed("", "mtp_config", mtp)).drafts == expected


def test_stop_ids_come_from_generation_then_from_the_top_level() -> None:
    config = changed("text_config", "eos_token_id", 2)
    assert shape_of(config).eos_tokens == ()
    config["eos_token_id"] = 6
    assert shape_of(config).eos_tokens == (6,)
    assert shape_of(config, {"eos_token_id": [9, 6, 9]}).eos_tokens == (9, 6)
    with pytest.raises(UsageError, match="eos_token_id"):
        shape_of(config, {"eos_token_id": 155})


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("text_config", "final_logit_softcapping", 30.0),
        ("text_config", "gate_activation", "softmax"),
        ("text_config", "q_bias", True),
        ("text_config", "o_bias", True),
        ("text_config", "sconv_kernel_size", 3),
        ("text_config", "use_sconv", False),
        ("text_config", "shared_expert_sink", False),
        ("text_config", "mtp_hidden_states_first", False),
        ("text_config", "hidden_act", "gelu"),
        ("text_config", "rope_theta", 10000.0),
        ("text_config", "hidden_size", 0),
        ("text_config", "hidden_size", "64"),
        ("text_config", "num_hidden_layers", True),
        ("text_config", "num_hidden_layers", 1_000_000),
        ("text_config", "route_scale", -1.0),
        ("text_config", "local_layer_ids", [6]),
        ("text_config", "local_layer_ids", [1, 1]),
        ("text_config", "layer_types", ["hybrid"] * 5),
        ("text_config", "layer_types", ["linear_attention"] * 6),
        ("text_config", "layer_types", [["hybrid"]] * 6),
        ("text_config", "mlp_layer_types", [{}] * 6),
        ("text_config", "dense_mlp_idx", 7),
        ("text_config", "unpadded_vocab_size", 161),
        ("text_config", "num_experts_per_tok", 9),
        ("text_config", "num_key_value_heads", 3),
        ("text_config", "quantization_config", {"quant_method": "modelopt"}),
        ("text_config", "model_type", "inkling2_text"),
        ("mtp_config", "local_layer_ids", [3]),
        ("mtp_config", "local_extent", 9),
        ("mtp_config", "surprise", 1),
        ("mtp_config", "num_nextn_predict_layers", -1),
        ("mtp_config", "num_nextn_predict_layers", 1_000_000),
        ("mtp_config", "chain_hidden_post_norm", "yes"),
        ("", "model_type", "inkling2_loop"),
        ("", "text_config", "none"),
        ("", "mtp_config", [1]),
        ("", "mtp_config", False),
        ("", "quantization_config", {"quant_algo": "NVFP4"}),
        ("", "surprise", 1),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(section: str, key: str, value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        shape_of(changed(section, key, value))
    assert key in caught.value.field
    assert "\n" not in str(caught.value)


def test_dense_layers_must_come_first() -> None:
    config = second_dialect(tiny_config())
    config["text_config"]["mlp_layer_types"] = ["dense", "sparse", "dense"] + ["sparse"] * 3
    with pytest.raises(UsageError, match="mlp_layer_types"):
        shape_of(config)


def test_a_missing_field_is_named_not_guessed() -> None:
    for key in set(tiny_config()["text_config"]) - {"local_layer_ids", "unpadded_vocab_size"}:
        if key.startswith(("swa_", "log_scaling_n", "sconv")):
            continue
        with pytest.raises(UsageError) as caught:
            shape_of(without(key))
        expected = {"dense_intermediate_size": "moe_intermediate_size"}.get(key, key)
        assert expected in caught.value.field


def test_all_unknown_keys_are_listed_together() -> None:
    config = tiny_config()
    config["text_config"] |= {"alpha": 1, "beta": 2}
    with pytest.raises(UsageError, match=r"text_config\.alpha, .*text_config\.beta"):
        shape_of(config)


def test_quantised_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    quantisation = {"quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantisation))
    with pytest.raises(UsageError, match="NVFP4"):
        shapes.read_config(tmp_path)


def test_what_is_no_checkpoint_folder_gets_a_remedy(tmp_path: Path) -> None:
    command = "hf download thinkingmachines/Inkling-Small --local-dir Inkling-Small"
    with pytest.raises(UsageError, match=command):
        shapes.read_config(Path("thinkingmachines/Inkling-Small"))
    with pytest.raises(UsageError, match="inkling-small"):
        shapes.read_config(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="without config.json"):
        shapes.read_config(tmp_path)
    (tmp_path / "config.json").touch()
    with pytest.raises(UsageError, match="the folder that holds this file"):
        shapes.read_config(tmp_path / "config.json")
    for text in ("{", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CorruptError, match=r"config\.json"):
            shapes.read_config(tmp_path)
