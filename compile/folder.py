"""Whether a path is a checkpoint folder at all, and what to do if it is not.

A hub id, a missing path, a file, a folder without `config.json` or with pickled weights only each
get their own remedy, before anything is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from inkling_engine.artifacts.errors import CorruptError, UsageError

CONFIG: Final = "config.json"
PICKLED: Final = ("*.bin", "*.pt", "*.pth")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def require_folder(folder: Path, presets: Iterable[str] = ()) -> None:
    """Raise UsageError unless `folder` is a folder with a `config.json`.

    `presets` are the names that the caller would have taken instead of a folder.
    """
    wanted = "an existing checkpoint folder"
    if names := ", ".join(presets):
        wanted += f" or a preset ({names})"
    if folder.is_file():
        raise UsageError("model", folder, wanted, "give the folder that holds this file")
    if not folder.exists():
        raise UsageError("model", folder, wanted, _remedy_for_missing(str(folder)))
    if not (folder / CONFIG).is_file():
        raise UsageError(
            "model", f"{folder} without {CONFIG}", wanted, f"copy the model's {CONFIG} into it"
        )


def require_weights(folder: Path) -> None:
    """Raise UsageError unless `folder` holds safetensors files."""
    if any(folder.glob("*.safetensors")):
        return
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if pickled:
        remedy = "convert it with transformers' save_pretrained; pickled weights are never opened"
        raise UsageError("checkpoint", ", ".join(pickled), "safetensors files", remedy)
    raise UsageError(
        "checkpoint", f"no weights in {folder}", "safetensors files", "download the weights too"
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; CorruptError if it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise CorruptError(
            path.name, " ".join(str(error).split()), "a JSON object", f"restore {path}"
        ) from error
    if not isinstance(value, dict):
        raise CorruptError(path.name, type(value).__name__, "a JSON object", f"restore {path}")
    return value


def _remedy_for_missing(name: str) -> str:
    if _HUB_ID.fullmatch(name):
        local = name.split("/")[1]
        return f"a hub id must be downloaded first: hf download {name} --local-dir {local}"
    return "check the path"
