"""Opening checkpoints: layouts, files and indexes, and every fault of a folder in one error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from support.checkpoints import (
    Config,
    load,
    save,
    save_sharded,
    tensor_shapes,
    tiny_config,
    to_text_only,
    write_random,
)
from torch import Tensor

from inkling_engine.artifacts.errors import CorruptError, UsageError
from inkling_engine.compile.checkpoint import check, open_checkpoint, require_shape
from inkling_engine.compile.models.inkling import names
from inkling_engine.compile.models.inkling.shape import TINY, preset

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("original"), tiny_config(), seed=1)


def shards(tensors: Tensors) -> dict[str, Tensors]:
    """The tensors in three files, the drafts in one of their own."""
    drafts = {n: t for n, t in tensors.items() if ".mtp." in n}
    trunk = [(n, t) for n, t in tensors.items() if ".mtp." not in n]
    half = len(trunk) // 2
    return {
        "model-00001-of-00002.safetensors": dict(trunk[:half]),
        "model-00002-of-00002.safetensors": dict(trunk[half:]),
        "mtp.safetensors": drafts,
    }


def test_the_index_holds_every_tensor_and_loads_none(original: Path) -> None:
    checkpoint = open_checkpoint(original)
    assert checkpoint.layout == "original"
    assert {n: t.shape for n, t in checkpoint.tensors.items()} == tensor_shapes(tiny_config())
    assert (checkpoint.skipped, checkpoint.notes) == ((), ())


def test_the_packaged_model_opens_and_its_towers_are_left_out() -> None:
    checkpoint = open_checkpoint(TINY)
    assert checkpoint.shape == preset("inkling-tiny")
    assert len(checkpoint.skipped) == 6
    assert all(name.startswith(("model.visual.", "model.audio.")) for name in checkpoint.skipped)
    assert checkpoint.notes == ("6 tensors of the media towers are left out",)


@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize("unlisted", ["", "mtp.safetensors"])
def test_shards_prefixes_and_an_unlisted_draft_file(
    original: Path, tmp_path: Path, prefix: str, unlisted: str
) -> None:
    tensors = {prefix + name: tensor for name, tensor in load(original).items()}
    save_sharded(tmp_path, tiny_config(), shards(tensors), unlisted)
    checkpoint = open_checkpoint(tmp_path)
    whole = open_checkpoint(original)
    assert (checkpoint.shape, checkpoint.layout) == (whole.shape, "original")
    assert checkpoint.tensors.keys() == whole.tensors.keys()
    assert len(checkpoint.notes) == bool(unlisted)


def test_draft_tensors_in_a_listed_file_but_not_in_the_index(
    original: Path, tmp_path: Path
) -> None:
    save_sharded(tmp_path, tiny_config(), {"a.safetensors": load(original)})
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    kept = {n: file for n, file in weight_map.items() if ".mtp." not in n}
    index.write_text(json.dumps({"weight_map": kept}))
    assert open_checkpoint(tmp_path).tensors.keys() == load(original).keys()


def test_a_file_outside_the_index_is_not_mixed_in(original: Path, tmp_path: Path) -> None:
    tensors = load(original)
    copies = {"a.safetensors": tensors, "consolidated.safetensors": dict(tensors)}
    save_sharded(tmp_path, tiny_config(), copies, unlisted="consolidated.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert {tensor.file.name for tensor in checkpoint.tensors.values()} == {"a.safetensors"}
    assert "0 of its tensors" in checkpoint.notes[0]


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_text_only_names(original: Path, tmp_path: Path, prefix: str) -> None:
    save(tmp_path, tiny_config(), to_text_only(load(original), prefix))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.layout == "hf"
    assert checkpoint.shape == open_checkpoint(original).shape


def test_without_draft_tensors_the_shape_has_no_drafts(original: Path, tmp_path: Path) -> None:
    """What transformers saves: the configuration still names the depths."""
    trunk = {n: t for n, t in load(original).items() if ".mtp." not in n}
    save(tmp_path, tiny_config(), trunk)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.shape.drafts.depths == 0
    assert "3 draft depths" in checkpoint.notes[0]


def test_some_of_the_draft_depths_missing_is_an_error(original: Path, tmp_path: Path) -> None:
    partial = {n: t for n, t in load(original).items() if "mtp.layers.2." not in n}
    with pytest.raises(CorruptError, match=r"missing model\.mtp\.layers\.2\.input_proj"):
        open_checkpoint(save(tmp_path, tiny_config(), partial))


def test_all_faults_come_in_one_error(original: Path, tmp_path: Path) -> None:
    tensors = load(original)
    del tensors["model.llm.norm.weight"]
    tensors["model.llm.layers.9.attn_norm.weight"] = torch.zeros(64)
    tensors["model.llm.layers.0.attn.wq_du.weight"] = torch.zeros(64, 32)
    tensors["model.llm.layers.1.mlp.gate.bias"] = torch.zeros(8, dtype=torch.float16)
    with pytest.raises(CorruptError) as caught:
        open_checkpoint(save(tmp_path, tiny_config(), tensors))
    message = str(caught.value)
    for expected in (
        "4 wrong tensors",
        "missing model.llm.norm.weight",
        "extra model.llm.layers.9.attn_norm.weight",
        "misshapen model.llm.layers.0.attn.wq_du.weight 64x32 instead of 64x64",
        "wrongly typed model.llm.layers.1.mlp.gate.bias F16 instead of BF16 or F32",
    ):
        assert expected in message
    assert "\n" not in message


def test_recipes_of_another_shape_are_refused(original: Path) -> None:
    checkpoint = open_checkpoint(original)
    wider = msgspec.structs.replace(checkpoint.shape, dense_width=128, layers=7)
    with pytest.raises(CorruptError, match=r"misshapen .*w13_dn.*missing|missing .*w13_dn"):
        check(checkpoint, names.recipes(wider, "float32", "original", tp=2, rank=1))
    for rank in range(2):
        check(checkpoint, names.recipes(checkpoint.shape, "bfloat16", "original", 2, rank))


def test_the_weights_of_another_model_are_refused_field_by_field(original: Path) -> None:
    checkpoint = open_checkpoint(original)
    tiny = preset("inkling-tiny")
    assert tiny is not None
    with pytest.raises(UsageError, match="hidden 64 instead of 192"):
        require_shape(checkpoint, tiny, "inkling-tiny")
    stops = msgspec.structs.replace(checkpoint.shape, eos_tokens=(7,))
    require_shape(checkpoint, stops, "the same model")


def test_an_absent_head_is_tied_unless_forbidden(original: Path, tmp_path: Path) -> None:
    tensors = load(original)
    del tensors["model.llm.unembed.weight"]
    checkpoint = open_checkpoint(save(tmp_path, tiny_config(), tensors))
    embed = checkpoint.tensors["model.llm.embed.weight"]
    assert checkpoint.tensors["model.llm.unembed.weight"] == embed
    assert checkpoint.notes == ("the head is tied to the embedding",)
    with pytest.raises(CorruptError, match=r"missing model\.llm\.unembed"):
        open_checkpoint(save(tmp_path, tied(False), tensors))
    with pytest.raises(UsageError, match="tie_word_embeddings"):
        open_checkpoint(save(tmp_path, tied(True), load(original)))


def tied(value: bool) -> Config:
    config = tiny_config()
    config["text_config"]["tie_word_embeddings"] = value
    return config


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut_in_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def break_json(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"dtype"', b'"dtypo"', 1))


def endless_offset(path: Path) -> None:
    replace_header(path, b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,Infinity]}}')


def deep_header(path: Path) -> None:
    replace_header(path, b"[" * 100_000)


def replace_header(path: Path, header: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def shift_offset(path: Path) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    name = next(n for n in header if n.endswith("q_norm.weight"))
    header[name]["data_offsets"][0] += 2
    changed = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + raw[8 + length :])


@pytest.mark.parametrize(
    "damage",
    [
        *(truncate, lengthen, empty, cut_in_header, break_json, shift_offset),
        *(endless_offset, deep_header),
    ],
)
def test_damaged_files_are_named(
    original: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    save(tmp_path, tiny_config(), load(original))
    damage(tmp_path / "model.safetensors")
    with pytest.raises(CorruptError, match=r"model\.safetensors") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.exit_code == 4
    assert "\n" not in str(caught.value)


def test_an_index_that_is_not_true_is_refused(original: Path, tmp_path: Path) -> None:
    save_sharded(tmp_path, tiny_config(), shards(load(original)))
    index = tmp_path / "model.safetensors.index.json"
    right = json.loads(index.read_text())
    index.write_text("[]")
    with pytest.raises(CorruptError, match="a JSON object"):
        open_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": None}))
    with pytest.raises(CorruptError, match="weight_map"):
        open_checkpoint(tmp_path)
    right["weight_map"]["model.llm.embed.weight"] = "mtp.safetensors"
    index.write_text(json.dumps(right))
    with pytest.raises(CorruptError, match=r"model\.llm\.embed\.weight in mtp\.safetensors"):
        open_checkpoint(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CorruptError, match="no model-00001-of-00002"):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_files_is_refused(original: Path, tmp_path: Path) -> None:
    save(tmp_path, tiny_config(), load(original))
    copy = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "other.safetensors").write_bytes(copy)
    with pytest.raises(CorruptError, match=r"twice: model\.llm"):
        open_checkpoint(tmp_path)


def test_a_tensor_under_two_names_is_refused(original: Path, tmp_path: Path) -> None:
    tensors = load(original)
    tensors["language_model.model.llm.norm.weight"] = tensors["model.llm.norm.weight"] * 2
    with pytest.raises(CorruptError, match=r"twice: model\.llm\.norm\.weight"):
        open_checkpoint(save(tmp_path, tiny_config(), tensors))


def test_folders_without_safetensors_get_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    with pytest.raises(UsageError, match="download the weights"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UsageError, match=r"pytorch_model\.bin.*save_pretrained"):
        open_checkpoint(tmp_path)
    with pytest.raises(UsageError, match="hf download org/name --local-dir name"):
        open_checkpoint(Path("org/name"))
