"""A checkpoint folder as a checked index of tensors; nothing is loaded.

Every safetensors file's header is read, names are made canonical, media towers are set aside, and
the rest is compared with what the recipes need: all that is missing, extra, misshapen or wrongly
typed comes in one error. Draft tensors are found wherever they lie, listed in the index or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from inkling_engine.artifacts.errors import CorruptError, UsageError
from inkling_engine.artifacts.manifest import Recipe
from inkling_engine.artifacts.spec import DraftShape, ModelShape
from inkling_engine.compile.folder import CONFIG, read_json, require_weights
from inkling_engine.compile.models.inkling import names
from inkling_engine.compile.models.inkling.shape import read_config, ties_embeddings
from inkling_engine.compile.recipes import source_shapes
from inkling_engine.compile.tensorfile import DiskTensor, read_header

INDEX: Final = "model.safetensors.index.json"
DTYPES: Final = ("BF16", "F32")
NO_DRAFTS: Final = DraftShape(depths=0, local_depths=(), chain_norm=False)

_NOT_MATHEMATICS = ("eos_tokens", "max_context")


@dataclass(frozen=True)
class Checkpoint:
    """What a folder holds: `tensors` by canonical name; `skipped` are the towers' tensors.

    `shape` is the configuration's, without draft depths if no draft tensor is there. `notes` are
    one-line facts for the build log.
    """

    folder: Path
    shape: ModelShape
    layout: names.Layout
    tensors: Mapping[str, DiskTensor]
    skipped: tuple[str, ...]
    notes: tuple[str, ...]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the configuration and all headers of `folder`, and check one against the other.

    Raises UsageError for what is no checkpoint or no model of ours, CorruptError for damaged files
    and for tensors that are not the configuration's.
    """
    shape = read_config(folder)
    require_weights(folder)
    found, notes = _scan(folder)
    tensors = {name: tensor for name, tensor in found.items() if not names.is_tower(name)}
    skipped = tuple(name for name in found if names.is_tower(name))
    if skipped:
        notes.append(f"{len(skipped)} tensors of the media towers are left out")
    layout = names.detect(tensors)
    if shape.drafts.depths and not any(map(names.is_draft, tensors)):
        notes.append(f"{CONFIG} names {shape.drafts.depths} draft depths, no draft tensor is there")
        shape = msgspec.structs.replace(shape, drafts=NO_DRAFTS)
    if _tie_head(folder, layout, tensors):
        notes.append("the head is tied to the embedding")
    checkpoint = Checkpoint(folder, shape, layout, tensors, skipped, tuple(notes))
    check(checkpoint, names.recipes(shape, "float32", layout))
    return checkpoint


def check(checkpoint: Checkpoint, recipes: Sequence[Recipe]) -> None:
    """Raise one CorruptError listing every tensor that is not as `recipes`, of any rank, need it.

    `open_checkpoint` has checked its own model; this is for recipes made from another shape.
    """
    tensors = checkpoint.tensors
    whole = source_shapes(names.recipes(checkpoint.shape, "float32", checkpoint.layout))
    needed = source_shapes(recipes)
    expected = {**needed, **whole}
    problems = [f"missing {name}" for name in expected if name not in tensors]
    problems += [f"extra {name}" for name in tensors if name not in expected]
    for name in (name for name in expected if name in tensors):
        found = tensors[name]
        if found.shape != whole.get(name, found.shape) or not _holds(found, needed.get(name)):
            problems.append(
                f"misshapen {name} {_size(found.shape)} instead of {_size(expected[name])}"
            )
        if found.dtype not in DTYPES:
            problems.append(f"wrongly typed {name} {found.dtype} instead of {' or '.join(DTYPES)}")
    if problems:
        raise CorruptError(
            "checkpoint",
            f"{len(problems)} wrong tensors in {checkpoint.folder}: {'; '.join(problems)}",
            f"the tensors that {CONFIG} describes",
            "restore the missing files or correct the configuration",
        )


def require_shape(checkpoint: Checkpoint, shape: ModelShape, model: str) -> None:
    """Raise UsageError naming each field in which the checkpoint is not the model `model`."""
    differing = [
        f"{field} {getattr(checkpoint.shape, field)} instead of {getattr(shape, field)}"
        for field in ModelShape.__struct_fields__
        if field not in _NOT_MATHEMATICS
        and getattr(checkpoint.shape, field) != getattr(shape, field)
    ]
    if differing:
        raise UsageError(
            "checkpoint",
            f"{checkpoint.folder} with {'; '.join(differing)}",
            f"the weights of {model}",
            f"give the folder of {model} or use --model {checkpoint.folder}",
        )


def _scan(folder: Path) -> tuple[dict[str, DiskTensor], list[str]]:
    """All tensors by canonical name, and notes. With an index, other files give only drafts."""
    index = _index(folder)
    found: dict[str, DiskTensor] = {}
    notes: list[str] = []
    twice: list[str] = []
    for path in sorted(folder.glob("*.safetensors"), key=lambda path: _order(path, index)):
        tensors = [(names.canonical(tensor.name), tensor) for tensor in read_header(path)]
        if index is not None and path.name not in index:
            tensors = [(n, t) for n, t in tensors if names.is_draft(n) and n not in found]
            notes.append(f"{path.name} is not in the index: {len(tensors)} of its tensors are used")
        for name, tensor in tensors:
            if name in found:
                twice.append(name)
            found[name] = tensor
    if twice:
        listed = ", ".join(twice)
        raise CorruptError(
            "checkpoint", f"twice: {listed}", "each tensor once", "remove one of both"
        )
    return found, notes


def _order(path: Path, index: set[str] | None) -> tuple[bool, str]:
    """Files of the index first, then the others, which only fill gaps."""
    return index is not None and path.name not in index, path.name


def _index(folder: Path) -> set[str] | None:
    """File names in the index, each of which must hold what the index says; None without one."""
    path = folder / INDEX
    if not path.exists():
        return None
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CorruptError(INDEX, "no weight_map", "an object weight_map", "restore the index")
    files = {str(file) for file in weight_map.values()}
    if missing := sorted(file for file in files if not (folder / file).is_file()):
        raise CorruptError(
            INDEX, f"no {', '.join(missing)}", "every file it lists", "download them"
        )
    held = {(file, tensor.name) for file in files for tensor in read_header(folder / file)}
    if wrong := [f"{n} in {file}" for n, file in weight_map.items() if (file, n) not in held]:
        raise CorruptError(
            INDEX, f"no {', '.join(wrong)}", "tensors where it lists them", "restore it"
        )
    return files


def _tie_head(folder: Path, layout: names.Layout, tensors: dict[str, DiskTensor]) -> bool:
    """Let the embedding stand for an absent head unless the configuration forbids it (spec 3.2)."""
    head, embed = names.head_and_embedding(layout)
    tied = ties_embeddings(read_json(folder / CONFIG))
    if head in tensors:
        if tied:
            raise UsageError(
                "tie_word_embeddings", f"true beside {head}", "one of both", f"correct {CONFIG}"
            )
        return False
    if tied is False or embed not in tensors:
        return False
    tensors[head] = tensors[embed]
    return True


def _holds(tensor: DiskTensor, needed: Iterable[int] | None) -> bool:
    """Whether every block read of the tensor lies inside it."""
    sizes = tensor.shape if needed is None else tuple(needed)
    pairs = zip(tensor.shape, sizes, strict=False)
    return len(sizes) == len(tensor.shape) and all(size <= found for found, size in pairs)


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
