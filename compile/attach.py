"""Adds weights and tokenizer to a programs-only engine: `python -m inkling_engine.compile.attach DIR CHECKPOINT`.

The checkpoint must have the engine's shape. The folder is the old engine until the last moment.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import msgspec

from inkling_engine.artifacts import store
from inkling_engine.artifacts.errors import UsageError, UserError, unusable
from inkling_engine.artifacts.layout import TOKENIZER, weights_file
from inkling_engine.artifacts.manifest import Manifest, WeightsEntry
from inkling_engine.compile.checkpoint import Checkpoint, check, open_checkpoint, require_shape
from inkling_engine.compile.convert import write_weights
from inkling_engine.compile.lock import locked
from inkling_engine.compile.models.inkling.names import recipes
from inkling_engine.compile.plan import fingerprint
from inkling_engine.compile.tokenizer import check_tokenizer, copy_tokenizer


def attach(folder: Path, checkpoint_folder: Path) -> Manifest:
    """Convert the checkpoint's weights for every rank, add them and its text files to `folder`.

    Raises UsageError when the engine has weights, the checkpoint is of another shape, or another
    process builds the engine or attaches to it.
    """
    folder = folder.resolve()  # two names of it have one lock, and staging its file system
    checkpoint = open_checkpoint(checkpoint_folder)
    check_tokenizer(checkpoint)
    _bare(folder, checkpoint)  # a mistake leaves nothing behind
    with locked(folder, "engine folder", "attach to a copy of it"):
        return _add(folder, _bare(folder, checkpoint), checkpoint)


def _bare(folder: Path, checkpoint: Checkpoint) -> Manifest:
    """The manifest of the engine `folder`, which must lack weights and be of the checkpoint's shape."""
    manifest = store.open_manifest(folder)
    if manifest.weights:
        raise UsageError(
            "engine folder", f"{folder} with weights", "a programs-only engine", "nothing to do"
        )
    require_shape(checkpoint, manifest.spec.shape, manifest.spec.model)
    return manifest


def _add(folder: Path, manifest: Manifest, checkpoint: Checkpoint) -> Manifest:
    """Convert and add; whoever calls holds the folder's name."""
    spec = manifest.spec
    staging = store.stage(folder)
    shutil.rmtree(staging / TOKENIZER, ignore_errors=True)
    copy_tokenizer(checkpoint, staging / TOKENIZER)
    entries = []
    for rank in range(spec.tp):
        recipe = recipes(spec.shape, spec.dtype, checkpoint.layout, spec.tp, rank)
        check(checkpoint, recipe)
        target = staging / weights_file(rank)
        target.parent.mkdir(exist_ok=True)
        write_weights(checkpoint, recipe, target)
        entries.append(WeightsEntry(rank=rank, file=weights_file(rank)))
    changed = msgspec.structs.replace(
        manifest,
        weights=tuple(entries),
        recipe=recipes(spec.shape, spec.dtype, checkpoint.layout, spec.tp, 0),
        source=f"{checkpoint.folder.name} sha256:{fingerprint(checkpoint)}",
    )
    return store.add_files(folder, staging, changed)


def main() -> int:
    """Command line of the module; one line on stderr and an exit code on a mistake."""
    try:
        attach(Path(sys.argv[1]), Path(sys.argv[2]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {unusable(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # whoever runs this says so
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
