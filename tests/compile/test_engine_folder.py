"""A built engine as a folder: moved, damaged and foreign ones through `inkling-engine verify`, and
weights attached later."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file
from support.builds import DECODE, EXTEND
from support.checkpoints import load as load_checkpoint
from support.checkpoints import save, tiny_config, to_text_only, write_random
from support.compiler import inkling_engine, refused

from inkling_engine.artifacts import store
from inkling_engine.artifacts.digest import digest, file_digest
from inkling_engine.artifacts.errors import CorruptError, UsageError
from inkling_engine.artifacts.layout import (
    GOLDEN_FILE,
    MANIFEST,
    PROGRAMS,
    TOKENIZER,
    WEIGHTS,
    kernel_library_file,
    weights_file,
)
from inkling_engine.artifacts.manifest import Manifest
from inkling_engine.compile import attach as attach_module
from inkling_engine.compile.attach import attach
from inkling_engine.compile.convert import write_weights
from inkling_engine.compile.lock import locked

Damage = Callable[[Path], object]


@pytest.fixture
def copy(engine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(engine, tmp_path / "copy")


def reseal(folder: Path, change: Callable[[Manifest], Manifest]) -> Manifest:
    """Replace the manifest by a changed one whose own digest is right."""
    unsigned = msgspec.structs.replace(change(store.open_manifest(folder)), manifest_sha256="")
    signed = msgspec.structs.replace(unsigned, manifest_sha256=digest(unsigned))
    (folder / MANIFEST).write_bytes(msgspec.json.encode(signed))
    return signed


def flip(path: Path, place: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(data)


def test_a_moved_engine_verifies(copy: Path, tmp_path: Path) -> None:
    moved = tmp_path / "another place" / "named otherwise"
    moved.parent.mkdir()
    copy.rename(moved)
    done = inkling_engine("verify", moved, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["digests"] == "ok"
    assert outcome["golden"].startswith("ok, ") and outcome["golden"].endswith(" of 2 prompts")


def _swap(folder: Path) -> None:
    first, second = (folder / PROGRAMS / f"{name}.pt2" for name in (DECODE, EXTEND))
    third = first.with_suffix(".third")
    first.rename(third)
    second.rename(first)
    third.rename(second)


def _foreign_kernels(folder: Path) -> None:
    library = folder / kernel_library_file()
    library.write_bytes(library.read_bytes() + b"\0")


CORRUPT: dict[str, tuple[Damage, str]] = {
    "flipped program": (lambda f: flip(f / PROGRAMS / f"{DECODE}.pt2"), "has other content"),
    "flipped weight": (lambda f: flip(f / weights_file(0), 0.99), "has other content"),
    "flipped manifest": (lambda f: flip(f / MANIFEST, 0.1), MANIFEST),
    "missing program": (lambda f: (f / PROGRAMS / f"{EXTEND}.pt2").unlink(), "missing programs/"),
    "extra program": (
        lambda f: shutil.copy(f / PROGRAMS / f"{EXTEND}.pt2", f / PROGRAMS / "extra.pt2"),
        "extra programs/extra.pt2",
    ),
    "swapped programs": (_swap, f"{DECODE}.pt2 has"),
    "other kernels": (_foreign_kernels, "kernels.so has"),
    "truncated manifest": (lambda f: (f / MANIFEST).write_bytes(b'{"schema_version": 1'), MANIFEST),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "never sealed"),
}


@pytest.mark.parametrize("name", CORRUPT)
def test_a_damaged_engine_is_corrupt(copy: Path, name: str) -> None:
    damage, words = CORRUPT[name]
    damage(copy)
    assert words in refused(inkling_engine("verify", copy), 4)


def test_an_engine_of_another_torch_is_incompatible(copy: Path) -> None:
    def older(manifest: Manifest) -> Manifest:
        built = msgspec.structs.replace(manifest.environment, torch="2.11.0+cpu")
        return msgspec.structs.replace(manifest, environment=built)

    reseal(copy, older)
    line = refused(inkling_engine("verify", copy), 3)
    assert "torch" in line and "pip install torch==2.11.0" in line


def test_swapped_programs_are_found_even_if_their_digests_agree(copy: Path) -> None:
    """The binding and the golden inputs are a second line of defence."""
    _swap(copy)

    def listed(manifest: Manifest) -> Manifest:
        found = [
            msgspec.structs.replace(
                entry,
                size=(copy / entry.path).stat().st_size,
                sha256=file_digest(copy / entry.path),
            )
            for entry in manifest.files
        ]
        return msgspec.structs.replace(manifest, files=tuple(found))

    reseal(copy, listed)
    assert inkling_engine("verify", copy).returncode == 1


def programs_only(engine: Path, folder: Path) -> Manifest:
    """Seal a copy of `engine` without what it has of a checkpoint."""
    staging = store.stage(folder)
    shutil.copytree(engine, staging, dirs_exist_ok=True)
    for part in (WEIGHTS, TOKENIZER):
        shutil.rmtree(staging / part)
    (staging / MANIFEST).unlink()
    manifest = store.open_manifest(engine)
    bare = msgspec.structs.replace(manifest, weights=(), source="no weights", files=())
    return store.seal(staging, bare, folder)


def test_attached_weights_are_those_of_a_direct_build(
    engine: Path, checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "bare"
    programs_only(engine, folder)
    done = inkling_engine("attach-weights", folder, checkpoint)
    assert (done.returncode, done.stderr) == (0, "")
    attached, direct = store.open_manifest(folder), store.open_manifest(engine)
    store.verify_files(folder, attached)
    assert (attached.files, attached.recipe) == (direct.files, direct.recipe)
    assert (attached.weights, attached.source) == (direct.weights, direct.source)
    assert [path.name for path in tmp_path.iterdir()] == ["bare"]


def test_the_tokenizer_is_attached_with_the_weights(
    engine: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """Of the last checkpoint alone: an attach of another one may have been interrupted."""
    folder, model = tmp_path / "bare", shutil.copytree(checkpoint, tmp_path / "model")
    programs_only(engine, folder)
    texts = {"tokenizer_config.json": "{}", "chat_template.jinja": "{{ text }}"}
    for name, text in texts.items():
        (model / name).write_text(text)
    stale = [folder / TOKENIZER, store.stage(folder) / TOKENIZER]
    for tokenizer in stale:
        tokenizer.mkdir(exist_ok=True)
        (tokenizer / "special_tokens_map.json").write_text("another's")
    attached = attach(folder, model)
    store.verify_files(folder, attached)
    found = {path.name: path.read_text() for path in (folder / TOKENIZER).iterdir()}
    assert found == texts
    assert {entry.path for entry in attached.files} >= {f"{TOKENIZER}/{name}" for name in texts}


def test_attached_weights_may_come_in_another_layout(
    engine: Path, checkpoint: Path, tmp_path: Path
) -> None:
    tensors = to_text_only(load_checkpoint(checkpoint))
    config = json.loads((checkpoint / "config.json").read_text())
    programs_only(engine, tmp_path / "bare")
    attached = attach(tmp_path / "bare", save(tmp_path / "text-only", config, tensors))
    assert attached.recipe != store.open_manifest(engine).recipe
    found, expected = (load_file(f / weights_file(0)) for f in (tmp_path / "bare", engine))
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)


def test_attaching_is_refused_where_it_makes_no_sense(
    engine: Path, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="engine folder"):
        attach(engine, checkpoint)
    folder = tmp_path / "bare"
    before = programs_only(engine, folder)
    other = write_random(tmp_path / "other", tiny_config(), seed=1)
    line = refused(inkling_engine("attach-weights", folder, other), 2)
    assert "layers 6 instead of 2" in line
    flip(shutil.copytree(checkpoint, tmp_path / "damaged") / "model.safetensors", 0.0)
    with pytest.raises(CorruptError):
        attach(folder, tmp_path / "damaged")
    (tmp_path / "other" / "dangling.safetensors").symlink_to("nowhere")
    line = refused(inkling_engine("attach-weights", folder, tmp_path / "other"), 1)
    assert "dangling.safetensors: found No such file" in line
    assert {path.name for path in tmp_path.iterdir()} == {"bare", "other", "damaged"}
    assert store.open_manifest(folder) == before
    store.verify_files(folder, before)


def test_an_interrupted_attach_leaves_the_old_engine(
    engine: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bare"
    before = programs_only(engine, folder)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for step in ("add_files", "_write_manifest"):
        with monkeypatch.context() as patch:
            patch.setattr(store, step, killed)
            with pytest.raises(KeyboardInterrupt):
                attach(folder, checkpoint)
        assert store.open_manifest(folder) == before
        store.verify_files(folder, before)
    attach(folder, checkpoint)
    assert file_digest(folder / weights_file(0)) == file_digest(engine / weights_file(0))


def test_one_attach_at_a_time(
    engine: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one, begun while the first converts, is refused; the first is not disturbed."""
    folder, refusals = tmp_path / "bare", list[str]()
    programs_only(engine, folder)
    (tmp_path / "link").symlink_to(folder)

    def interrupted(*given: Any) -> str:
        for name in (folder, tmp_path / "link"):
            refusals.append(refused(inkling_engine("attach-weights", name, checkpoint), 2))
        return write_weights(*given)

    monkeypatch.setattr(attach_module, "write_weights", interrupted)
    attach(folder, checkpoint)
    assert len(refusals) == 2 and all("in use by another build" in line for line in refusals)
    assert (folder / weights_file(0)).read_bytes() == (engine / weights_file(0)).read_bytes()


def test_an_engine_that_was_given_weights_meanwhile_takes_no_others(
    engine: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bare"
    programs_only(engine, folder)

    def late(*given: Any) -> AbstractContextManager[None]:
        monkeypatch.setattr(attach_module, "locked", locked)
        attach(folder, checkpoint)
        return locked(*given)

    monkeypatch.setattr(attach_module, "locked", late)
    with pytest.raises(UsageError, match="with weights"):
        attach(folder, checkpoint)
    store.verify_files(folder, store.open_manifest(folder))


def test_a_program_holds_its_code_and_no_weights(engine: Path) -> None:
    manifest = store.open_manifest(engine)
    for program in manifest.programs:
        with zipfile.ZipFile(engine / program.file) as package:
            names = package.namelist()
        assert sum(name.endswith(".so") for name in names) == 1
        assert not any(name.endswith((".pkl", ".pickle", ".pt")) for name in names)
        assert (engine / program.file).stat().st_size < 4 << 20
        assert program.proof == "equal to eager"
    assert (engine / GOLDEN_FILE).is_file()
