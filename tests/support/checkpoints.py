"""Small checkpoints for tests, in the vendor's layout, written from the format's own tables.

`write_appendix_a` is the specification's deterministic model; `write_random` a random model of any
configuration; `tiny_config` a small configuration to start from. Names and shapes are spelled out
here a second time on purpose: nothing comes from the product's name tables.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Shapes = dict[str, tuple[int, ...]]
Config = dict[str, Any]

F32 = ("gate.bias", "gate.global_scale")


def appendix_a_config() -> Config:
    """Configuration of the deterministic model, in the vendor's dialect."""
    config = tiny_config()
    config["text_config"] |= {"num_key_value_heads": 2, "swa_num_key_value_heads": 4}
    config["text_config"] |= {"log_scaling_n_floor": 10, "dense_mlp_idx": 2}
    config["text_config"] |= {"dense_intermediate_size": 48, "intermediate_size": 32}
    config["text_config"] |= {"unpadded_vocab_size": 150, "logits_mup_width_multiplier": 16.0}
    config["mtp_config"] = {"num_nextn_predict_layers": 2, "local_layer_ids": [0]}
    return config


def tiny_config() -> Config:
    """A small model with everything in it: both layer kinds, dense and expert MLPs, drafts."""
    text = {
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "local_layer_ids": [0, 1, 2, 3, 4],
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "sliding_window_size": 8,
        "d_rel": 4,
        "rel_extent": 12,
        "log_scaling_n_floor": 16,
        "log_scaling_alpha": 0.1,
        "dense_mlp_idx": 1,
        "dense_intermediate_size": 96,
        "intermediate_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "route_scale": 8.0,
        "sconv_kernel_size": 4,
        "vocab_size": 160,
        "unpadded_vocab_size": 151,
        "logits_mup_width_multiplier": 4.0,
        "rms_norm_eps": 1e-6,
        "model_max_length": 1024,
    }
    mtp = {"num_nextn_predict_layers": 3, "local_layer_ids": [0, 1], "chain_hidden_post_norm": True}
    return {"model_type": "inkling_mm_model", "text_config": text, "mtp_config": mtp}


def write_appendix_a(folder: Path) -> Path:
    """Write the deterministic model of the specification's Appendix A; returns `folder`."""
    config = appendix_a_config()
    return _write(folder, config, {n: _hashed(n, s) for n, s in tensor_shapes(config).items()})


def write_random(folder: Path, config: Config, seed: int) -> Path:
    """Write a random model: weights 1/sqrt(fan-in), taps 0.5, bias bank 1, choice bias 0.1."""
    generator = torch.Generator().manual_seed(seed)
    shapes = tensor_shapes(config)
    return _write(folder, config, {n: _random(n, s, generator) for n, s in shapes.items()})


def tensor_shapes(config: Config) -> Shapes:
    """Every text and draft tensor of the vendor's layout, by name, for a vendor configuration."""
    text, mtp = config["text_config"], config.get("mtp_config", {})
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    shapes: Shapes = {
        "model.llm.embed.weight": (vocab, hidden),
        "model.llm.embed_norm.weight": (hidden,),
        "model.llm.norm.weight": (hidden,),
        "model.llm.unembed.weight": (vocab, hidden),
    }
    for i in range(text["num_hidden_layers"]):
        prefix = f"model.llm.layers.{i}."
        shapes |= dict(_attention(prefix, text, local=i in text["local_layer_ids"]))
        mlp = _dense if i < text["dense_mlp_idx"] else _experts
        shapes |= mlp(prefix, text)
    for d in range(mtp.get("num_nextn_predict_layers", 0)):
        prefix = f"model.mtp.layers.{d}."
        shapes[prefix + "hidden_norm.weight"] = shapes[prefix + "embed_norm.weight"] = (hidden,)
        shapes[prefix + "input_proj.weight"] = (hidden, 2 * hidden)
        block = prefix + "transformer_block."
        shapes |= dict(_attention(block, text, local=d in mtp["local_layer_ids"]))
        shapes |= _dense(block, text)
    if mtp.get("chain_hidden_post_norm"):
        shapes["model.mtp.chain_norm.weight"] = (hidden,)
    return shapes


def to_text_only(tensors: Mapping[str, Tensor], prefix: str = "model.") -> dict[str, Tensor]:
    """The decoder's tensors under transformers' names; drafts as its draft module has them."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith("model.mtp.layers."):
            name = name.replace(".embed_norm.", ".enorm.")
        for old, new in _RENAMED:
            name = name.replace(old, new)
        name = name.replace("model.llm.", prefix)
        if "w13_dn.weight" in name:
            renamed[name.replace("w13_dn", "gate_proj")] = tensor[0::2].clone()
            renamed[name.replace("w13_dn", "up_proj")] = tensor[1::2].clone()
        elif "shared_w13_weight" in name:
            renamed[name.replace("shared_w13_weight", "gate_proj")] = tensor[:, 0::2].clone()
            renamed[name.replace("shared_w13_weight", "up_proj")] = tensor[:, 1::2].clone()
        elif "experts.w13_weight" in name:
            halves = torch.cat([tensor[:, 0::2], tensor[:, 1::2]], 1)
            renamed[name.replace("w13_weight", "gate_up_proj")] = halves
        else:
            renamed[name] = tensor
    return renamed


def load(folder: Path) -> dict[str, Tensor]:
    """All tensors of a single-file checkpoint."""
    return load_file(folder / "model.safetensors")


def save(folder: Path, config: Config, tensors: Mapping[str, Tensor]) -> Path:
    """Write a single-file checkpoint; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


def save_sharded(
    folder: Path, config: Config, shards: Mapping[str, Mapping[str, Tensor]], unlisted: str = ""
) -> Path:
    """Write `shards` (file name -> tensors) and an index that leaves out the file `unlisted`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for file, tensors in shards.items():
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / file)
    index = {n: file for file, tensors in shards.items() for n in tensors if file != unlisted}
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


_RENAMED = (
    ("model.llm.embed_norm.", "model.llm.embed_tokens.embed_norm."),
    ("model.llm.embed.", "model.llm.embed_tokens."),
    ("model.llm.unembed.", "lm_head."),
    ("model.mtp.chain_norm.", "shared_post_norm."),
    ("model.mtp.layers.", "layers."),
    (".hidden_norm.", ".hnorm."),
    (".input_proj.", ".eh_proj."),
    (".transformer_block.", ".mtp_block."),
    (".attn_norm.", ".input_layernorm."),
    (".mlp_norm.", ".post_attention_layernorm."),
    ("_sconv.", "_sconv.conv1d."),
    (".attn.wq_du.", ".self_attn.q_proj."),
    (".attn.wk_dv.", ".self_attn.k_proj."),
    (".attn.wv_dv.", ".self_attn.v_proj."),
    (".attn.wr_du.", ".self_attn.r_proj."),
    (".attn.wo_ud.", ".self_attn.o_proj."),
    (".attn.", ".self_attn."),
    (".mlp.gate.bias", ".mlp.gate.e_score_correction_bias"),
    (".mlp.w2_md.", ".mlp.down_proj."),
    ("shared_w2_weight", "down_proj"),
    ("experts.w2_weight", "experts.down_proj"),
)


def _attention(prefix: str, text: Config, *, local: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    swa, hidden = "swa_" if local else "", text["hidden_size"]
    heads, kv_heads = text[f"{swa}num_attention_heads"], text[f"{swa}num_key_value_heads"]
    dim = text[f"{swa}head_dim"]
    extent = text["sliding_window_size"] if local else text["rel_extent"]
    yield prefix + "attn_norm.weight", (hidden,)
    yield prefix + "mlp_norm.weight", (hidden,)
    yield prefix + "attn.wq_du.weight", (heads * dim, hidden)
    yield prefix + "attn.wk_dv.weight", (kv_heads * dim, hidden)
    yield prefix + "attn.wv_dv.weight", (kv_heads * dim, hidden)
    yield prefix + "attn.wr_du.weight", (heads * text["d_rel"], hidden)
    yield prefix + "attn.wo_ud.weight", (hidden, heads * dim)
    yield prefix + "attn.q_norm.weight", (dim,)
    yield prefix + "attn.k_norm.weight", (dim,)
    yield prefix + "attn.k_sconv.weight", (kv_heads * dim, 1, 4)
    yield prefix + "attn.v_sconv.weight", (kv_heads * dim, 1, 4)
    yield prefix + "attn.rel_logits_proj.proj", (text["d_rel"], extent)
    yield prefix + "attn_sconv.weight", (hidden, 1, 4)
    yield prefix + "mlp_sconv.weight", (hidden, 1, 4)


def _dense(prefix: str, text: Config) -> Shapes:
    hidden, width = text["hidden_size"], text["dense_intermediate_size"]
    return {
        prefix + "mlp.w13_dn.weight": (2 * width, hidden),
        prefix + "mlp.w2_md.weight": (hidden, width),
        prefix + "mlp.global_scale": (1,),
    }


def _experts(prefix: str, text: Config) -> Shapes:
    hidden, width = text["hidden_size"], text["intermediate_size"]
    routed, shared = text["n_routed_experts"], text["n_shared_experts"]
    return {
        prefix + "mlp.experts.w13_weight": (routed, 2 * width, hidden),
        prefix + "mlp.experts.w2_weight": (routed, hidden, width),
        prefix + "mlp.gate.weight": (routed + shared, hidden),
        prefix + "mlp.gate.bias": (routed,),
        prefix + "mlp.gate.global_scale": (1,),
        prefix + "mlp.shared_experts.shared_w13_weight": (shared, 2 * width, hidden),
        prefix + "mlp.shared_experts.shared_w2_weight": (shared, hidden, width),
    }


def _write(folder: Path, config: Config, tensors: Mapping[str, Tensor]) -> Path:
    stored = {n: t if n.endswith(F32) else t.bfloat16() for n, t in tensors.items()}
    return save(folder, config, stored)


def _hashed(name: str, shape: tuple[int, ...]) -> Tensor:
    """Appendix A's values: a hash of name and index as a small multiple of a power of two."""
    mask = 0xFFFFFFFF
    x = (zlib.crc32(name.encode()) + torch.arange(math.prod(shape)) * 0x9E3779B1) & mask
    x ^= x >> 16
    x = _times(x, 0x85EBCA6B)
    x ^= x >> 13
    x = _times(x, 0xC2B2AE35)
    x ^= x >> 16
    m = ((x >> 25) - 64).float()
    return _scaled(name, m).view(shape)


def _times(x: Tensor, factor: int) -> Tensor:
    """x * factor modulo 2^32 without leaving int64."""
    low = x * (factor & 0xFFFF)
    high = ((x * (factor >> 16)) & 0xFFFF) << 16
    return (low + high) & 0xFFFFFFFF


def _scaled(name: str, m: Tensor) -> Tensor:
    if name.endswith("norm.weight"):
        return 1 + torch.floor(m / 8) / 64
    if name.endswith("global_scale"):
        return 1 + torch.floor(m / 8) / 32
    if name.endswith(("sconv.weight", "rel_logits_proj.proj")):
        return m / 128
    if name.endswith("gate.bias"):
        return m / 256
    return m / (64 if name == "model.llm.embed.weight" else 512)


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=generator)
    if name.endswith(("norm.weight", "global_scale")):
        return 1 + 0.1 * values
    if name.endswith("sconv.weight"):
        return 0.5 * values
    if name.endswith("gate.bias"):
        return 0.1 * values
    if name.endswith(("rel_logits_proj.proj", "llm.embed.weight")):
        return values
    return values / math.sqrt(shape[-1])
