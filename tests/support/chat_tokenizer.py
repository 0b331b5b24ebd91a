"""The default model's tokenizer with the chat's special tokens, for tests of chat.

Its last merges are dropped and their ids become the chat's tokens, so that every id stays inside
the model's vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from support.fake_spec import TINY
from tokenizers import Tokenizer as NativeTokenizer

from inkling_engine.runtime.chat import TOKENS, Chat, open_chat
from inkling_engine.runtime.tokens import Tokenizer

NAMES = (*TOKENS, "endoftext")


def chat_tokenizer_json(names: Sequence[str] = NAMES, *, special: bool = True) -> str:
    """The text of a `tokenizer.json` that has the tokens `names`."""
    file = json.loads(TINY.read_text())
    model, count = file["model"], len(names)
    first = len(model["vocab"]) - count
    model["merges"] = model["merges"][:-count] if count else model["merges"]
    model["vocab"] = {text: i for text, i in model["vocab"].items() if i < first}
    like = file["added_tokens"][0]
    file["added_tokens"] += [
        {**like, "id": first + i, "content": f"<|{name}|>", "special": special}
        for i, name in enumerate(names)
    ]
    return json.dumps(file)


def chat_tokenizer(names: Sequence[str] = NAMES, *, special: bool = True) -> Tokenizer:
    """The tokenizer of `chat_tokenizer_json`."""
    return Tokenizer(NativeTokenizer.from_str(chat_tokenizer_json(names, special=special)))


def chat_of(tokenizer: Tokenizer) -> Chat:
    """The chat over `tokenizer`, which must have its tokens."""
    chat = open_chat(tokenizer, Path("engine"))
    assert chat is not None
    return chat


def tokens_of(text: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of `text`, in which `⟨name⟩` stands for a special token."""
    ids, added = [], tokenizer.added_tokens()
    for piece in text.split("⟨"):
        name, end, plain = piece.rpartition("⟩")
        ids += [added[f"<|{name}|>"]] if end else []
        ids += tokenizer.encode(plain) if plain else []
    return ids


def spelled(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The inverse of `tokens_of`."""
    names = {i: text[2:-2] for text, i in tokenizer.added_tokens().items()}
    text, plain = "", list[int]()
    for token in [*ids, -1]:
        if token in names or token < 0:
            text += tokenizer.decode(plain, skip_special_tokens=False)
            text, plain = text + (f"⟨{names[token]}⟩" if token >= 0 else ""), []
        else:
            plain.append(token)
    return text
