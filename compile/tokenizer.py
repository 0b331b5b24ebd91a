"""The checkpoint's text files: what of them a run needs, what names them, and whether they fit.

They are part of an engine as its weights are: another tokenizer gives other answers.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Final

from inkling_engine.artifacts.errors import CorruptError
from inkling_engine.compile.checkpoint import Checkpoint

TOKENIZER_FILE: Final = "tokenizer.json"
TEXT_FILES: Final = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
TEXTS: Final = (
    "def main",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n" * 2,
)
"""What golden prompts say."""


def text_files(checkpoint: Checkpoint | None) -> list[Path]:
    """Those of TEXT_FILES that the checkpoint has."""
    paths = [checkpoint.folder / name for name in TEXT_FILES] if checkpoint else []
    return [path for path in paths if path.exists()]


def text_fingerprint(checkpoint: Checkpoint | None) -> str:
    """SHA-256 over names and contents of the checkpoint's text files."""
    digest = hashlib.sha256()
    for path in text_files(checkpoint):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def copy_tokenizer(checkpoint: Checkpoint | None, target: Path) -> None:
    """Copy the checkpoint's text files into the folder `target`, which may stay empty."""
    target.mkdir(exist_ok=True)
    for path in text_files(checkpoint):
        shutil.copyfile(path, target / path.name)


def golden_texts(tokenizer: Path) -> list[list[int]]:
    """TEXTS as token ids of the file `tokenizer`."""
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer))
    return [encoder.encode(text, add_special_tokens=False).ids for text in TEXTS]


def check_tokenizer(checkpoint: Checkpoint) -> None:
    """Raise CorruptError unless TEXTS become ids of the model's vocabulary; without a tokenizer,
    nothing is to be checked."""
    path, vocabulary = checkpoint.folder / TOKENIZER_FILE, checkpoint.shape.real_vocab
    if not path.exists():
        return
    expected = f"a tokenizer with ids below the model's {vocabulary}"
    remedy = "copy the model's own tokenizer there, or remove the file to build without one"
    try:
        texts = golden_texts(path)
    except Exception as error:  # noqa: BLE001 - the library raises the bare class
        raise CorruptError(str(path), " ".join(str(error).split()), expected, remedy) from None
    for text, ids in zip(TEXTS, texts, strict=True):
        if not ids or max(ids) >= vocabulary:
            found = f"id {max(ids)}" if ids else "no token"
            raise CorruptError(str(path), f"{found} for {text.split()[0]!r}", expected, remedy)
