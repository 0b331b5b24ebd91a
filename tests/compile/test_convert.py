"""Weight files: the same bytes from every layout, all ranks together the model, bounded memory."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support.checkpoints import (
    load,
    save,
    save_sharded,
    tensor_shapes,
    tiny_config,
    to_text_only,
    write_appendix_a,
    write_random,
)
from support.recipes import assemble_all
from torch import Tensor

from inkling_engine.artifacts.errors import CorruptError, FailedError
from inkling_engine.artifacts.manifest import Recipe
from inkling_engine.compile import convert
from inkling_engine.compile.checkpoint import Checkpoint, open_checkpoint
from inkling_engine.compile.convert import write_weights
from inkling_engine.compile.models.inkling import names
from inkling_engine.compile.models.inkling.shape import TINY
from inkling_engine.compile.models.inkling.sizes import weight_bill

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("original"), tiny_config(), seed=2)


def recipes_of(
    checkpoint: Checkpoint, dtype: str = "float32", tp: int = 1, rank: int = 0
) -> tuple[Recipe, ...]:
    assert dtype in ("float32", "bfloat16")
    return names.recipes(checkpoint.shape, dtype, checkpoint.layout, tp, rank)  # type: ignore[arg-type]


def converted(folder: Path, target: Path, dtype: str = "float32") -> bytes:
    checkpoint = open_checkpoint(folder)
    write_weights(checkpoint, recipes_of(checkpoint, dtype), target)
    return target.read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [64, 1 << 20])
def test_the_file_holds_the_recipes_tensors(
    original: Path, tmp_path: Path, dtype: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, whatever the chunk; read back by the format's own reader."""
    monkeypatch.setattr(convert, "CHUNK_BYTES", chunk)
    checkpoint = open_checkpoint(original)
    recipes = recipes_of(checkpoint, dtype)
    path, told = tmp_path / "rank0.safetensors", list[int]()
    digest = write_weights(checkpoint, recipes, path, {"engine": "e"}, told.append)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert sum(told) == path.stat().st_size
    expected = assemble_all(recipes, load(original))
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"engine": "e"}
        assert list(file.offset_keys()) == [recipe.name for recipe in recipes]
        for name, tensor in expected.items():
            found = file.get_tensor(name)
            assert found.dtype == tensor.dtype and torch.equal(found, tensor), name
    header = int.from_bytes(path.read_bytes()[:8], "little")
    assert header % 8 == 0
    bill = weight_bill(checkpoint.shape, recipes[0].dtype, 1)  # type: ignore[arg-type]
    assert path.stat().st_size == 8 + header + bill.file
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def as_text_only(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return to_text_only(tensors)


def as_multimodal(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return to_text_only(tensors, "model.language_model.")


def with_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"language_model.{name}": tensor for name, tensor in tensors.items()}


def with_wide_convs(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What transformers re-saves: convolutions, choice bias and gate scale in f32."""
    return {n: t.float() if "sconv" in n else t for n, t in tensors.items()}


def all_wide(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.float() for n, t in tensors.items()}


def all_narrow(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.bfloat16() for n, t in tensors.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "change", [as_text_only, as_multimodal, with_prefix, with_wide_convs, all_wide, all_narrow]
)
def test_every_spelling_of_the_same_weights_gives_the_same_bytes(
    tmp_path: Path, change: Change, dtype: str
) -> None:
    """Appendix A's values are exact in bf16, so that widening and narrowing change nothing."""
    folder = write_appendix_a(tmp_path / "original")
    config = json.loads((folder / "config.json").read_text())
    other = save(tmp_path / "other", config, change(load(folder)))
    expected = converted(folder, tmp_path / "a.safetensors", dtype)
    assert converted(other, tmp_path / "b.safetensors", dtype) == expected


def test_shards_give_the_same_bytes(original: Path, tmp_path: Path) -> None:
    tensors = load(original)
    drafts = {n: t for n, t in tensors.items() if ".mtp." in n}
    trunk = {n: t for n, t in tensors.items() if ".mtp." not in n}
    shards = {"a.safetensors": trunk, "mtp.safetensors": drafts}
    save_sharded(tmp_path / "other", tiny_config(), shards, unlisted="mtp.safetensors")
    expected = converted(original, tmp_path / "a.safetensors")
    assert converted(tmp_path / "other", tmp_path / "b.safetensors") == expected


def test_the_packaged_model_in_text_only_names_gives_the_same_bytes(tmp_path: Path) -> None:
    config = json.loads((TINY / "config.json").read_text())
    towers = ("model.visual.", "model.audio.")
    tensors = {n: t for n, t in load(TINY).items() if not n.startswith(towers)}
    save(tmp_path / "text", config, to_text_only(tensors))
    expected = converted(TINY, tmp_path / "a.safetensors", "bfloat16")
    assert converted(tmp_path / "text", tmp_path / "b.safetensors", "bfloat16") == expected


def test_reading_halves_instead_of_pairs_is_caught(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault of test_names, seen in the comparison of the two layouts' files."""
    text_only = save(tmp_path / "text", tiny_config(), to_text_only(load(original)))
    expected = converted(text_only, tmp_path / "a.safetensors")
    assert converted(original, tmp_path / "b.safetensors") == expected

    def halves(rows: names.Rows, width: int) -> tuple[int, int, int]:
        first = rows in ("all", "even", "first")
        return (0, width, 1) if first else (width, 2 * width, 1)

    monkeypatch.setattr(names, "gate_up_rows", halves)
    checkpoint = open_checkpoint(original)
    write_weights(checkpoint, recipes_of(checkpoint), tmp_path / "c.safetensors")
    assert (tmp_path / "c.safetensors").read_bytes() != expected


def test_what_transformers_saves_gives_the_same_tensors(tmp_path: Path) -> None:
    """The three files it writes (vendor names, its names, text class) against the packaged model."""
    transformers = pytest.importorskip("transformers")
    model = transformers.InklingForConditionalGeneration.from_pretrained(TINY, dtype=torch.bfloat16)
    for original_format in (True, False):
        model.save_pretrained(
            tmp_path / f"whole-{original_format}", save_original_format=original_format
        )
    text = transformers.InklingForCausalLM(model.config.text_config).to(torch.bfloat16)
    trunk = {n.replace(".language_model", ""): t for n, t in model.state_dict().items()}
    assert not text.load_state_dict(trunk, strict=False).missing_keys
    text.save_pretrained(tmp_path / "text")
    converted(TINY, tmp_path / "a.safetensors", "bfloat16")
    expected = load_file(tmp_path / "a.safetensors")
    layouts = set()
    for folder in ("whole-True", "whole-False", "text"):
        layouts.add(open_checkpoint(tmp_path / folder).layout)
        converted(tmp_path / folder, tmp_path / "b.safetensors", "bfloat16")
        found = load_file(tmp_path / "b.safetensors")
        assert found.keys() == {n for n in expected if not n.startswith(("drafts.", "chain_norm"))}
        assert all(torch.equal(found[name], expected[name]) for name in found)
    assert layouts == {"original", "hf"}


@pytest.mark.parametrize("tp", [2, 4])
def test_rank_files_hold_the_ranks_recipes(original: Path, tmp_path: Path, tp: int) -> None:
    """With test_names, where all ranks' recipes together are the whole model."""
    checkpoint = open_checkpoint(original)
    for rank in range(tp):
        recipes = recipes_of(checkpoint, "bfloat16", tp, rank)
        write_weights(checkpoint, recipes, tmp_path / "rank.safetensors")
        found = load_file(tmp_path / "rank.safetensors")
        expected = assemble_all(recipes, load(original))
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_file_that_ends_early_is_reported_and_leaves_nothing(
    original: Path, tmp_path: Path
) -> None:
    folder = save(tmp_path / "model", tiny_config(), load(original))
    checkpoint = open_checkpoint(folder)
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    (tmp_path / "out").mkdir()
    with pytest.raises(CorruptError, match=r"model\.safetensors"):
        write_weights(checkpoint, recipes_of(checkpoint), tmp_path / "out" / "rank0.safetensors")
    assert not list((tmp_path / "out").iterdir())


def test_a_place_that_cannot_be_written_is_one_line(original: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(original)
    with pytest.raises(FailedError, match="No such file"):
        write_weights(checkpoint, recipes_of(checkpoint), tmp_path / "absent" / "a.safetensors")


MEASURE = """
import sys
from pathlib import Path
from inkling_engine.compile import convert
from inkling_engine.compile.checkpoint import open_checkpoint
from inkling_engine.compile.models.inkling.names import recipes

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024

convert.CHUNK_BYTES = int(sys.argv[3])
checkpoint = open_checkpoint(Path(sys.argv[1]))
tensors = recipes(checkpoint.shape, "float32", "original")
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
convert.write_weights(checkpoint, tensors, Path(sys.argv[2]))
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_tensor(tmp_path: Path) -> None:
    """Peak over 64 MB tensors in a child process; whole tensors at once are seen to exceed it."""
    config = tiny_config()
    config["text_config"] |= {"num_hidden_layers": 1, "local_layer_ids": [0], "dense_mlp_idx": 0}
    config["text_config"] |= {"vocab_size": 1 << 18, "intermediate_size": 1 << 12}
    config["mtp_config"] = {}
    sparse_checkpoint(tmp_path, config)
    largest = (1 << 18) * 64 * 4
    assert peak(tmp_path, convert.CHUNK_BYTES) < largest // 2
    assert peak(tmp_path, 1 << 40) > largest


def peak(folder: Path, chunk: int) -> int:
    """Bytes by which converting `folder` in chunks of `chunk` raises a process's peak memory."""
    target = folder / "out" / "rank0.safetensors"
    target.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-c", MEASURE, str(folder), str(target), str(chunk)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def sparse_checkpoint(folder: Path, config: dict[str, object]) -> None:
    """A checkpoint of zeros whose file is a header and a hole."""
    header, position = {}, 0
    for name, shape in tensor_shapes(config).items():
        size = 2 * torch.Size(shape).numel()
        header[name] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [position, position + size],
        }
        position += size
    raw = json.dumps(header).encode()
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "model.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    os.truncate(path, 8 + len(raw) + position)
