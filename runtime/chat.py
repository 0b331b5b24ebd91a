"""Chat: OpenAI bodies to prompt tokens, sampled tokens to OpenAI messages, by the vendor's grammar.

    message := role [name] kind text end_message      turn := model messages, end of sampling

Roles, kinds and ends are special tokens; all else is encoded as plain text, so that no text of a
request can become one of them. The model writes the header of its answer itself: a prompt ends
with its last message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from inkling_engine.artifacts.errors import CorruptError
from inkling_engine.artifacts.layout import TOKENIZER
from inkling_engine.runtime.chat_messages import Message, read_body
from inkling_engine.runtime.chat_output import TEXT, Marks, read_output

FIELDS: Final = frozenset(
    {"messages", "parallel_tool_calls", "reasoning_effort", "tool_choice", "tools"}
)
_ROLES: Final = ("user", "model", "system", "tool")
_KINDS: Final = ("text", "thinking", "xml", "tool_error", "invoke_tool_json", "invoke_tool_text")
_OWN_KINDS: Final = ("thinking", "invoke_tool_json")  # every other kind of output is text
_END_TURN: Final = "content_model_end_sampling"
_END_MESSAGE: Final = "end_message"
_END_TEXT: Final = "endoftext"  # the tokenizer's own end; the model's is _END_TURN
TOKENS: Final = (
    *(f"message_{role}" for role in _ROLES),
    *(f"content_{kind}" for kind in _KINDS),
    _END_MESSAGE,
    _END_TURN,
)


class Vocabulary(Protocol):
    """What chat needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, never special ones."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of `ids`."""

    def added_tokens(self) -> Mapping[str, int]:
        """Ids of the tokens beside the ordinary vocabulary, by spelling."""


class Chat:
    """The grammar over one tokenizer; `stop_token_ids` end a turn, the model's own end first."""

    stop_token_ids: tuple[int, ...]

    def __init__(self, tokenizer: Vocabulary, ids: Mapping[str, int]) -> None:
        """`ids` has every name of `TOKENS`, and perhaps the tokenizer's own end."""
        self._tokenizer, self._ids = tokenizer, ids
        self.stop_token_ids = tuple(ids[name] for name in (_END_TURN, _END_TEXT) if name in ids)
        self._marks = Marks(
            kinds={ids[f"content_{kind}"]: kind if kind in _OWN_KINDS else TEXT for kind in _KINDS},
            roles=frozenset(ids[f"message_{role}"] for role in _ROLES),
            end_message=ids[_END_MESSAGE],
            stops=frozenset(self.stop_token_ids),
        )

    def render(self, body: Mapping[str, Any]) -> list[int]:
        """The prompt of a chat-completions body, of which only `FIELDS` are read.

        A last assistant message is a finished turn too, not one to go on with. Raises UsageError
        for what is malformed or cannot be honoured.
        """
        return [token for message in read_body(body) for token in self._encode(message)]

    def parse(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """The assistant's message in sampled tokens, whole, cut off or broken; never raises."""
        return read_output(token_ids, self._marks, self._decode)

    def _encode(self, message: Message) -> Iterator[int]:
        ids, encode = self._ids, self._tokenizer.encode
        yield ids[f"message_{message.role}"]
        if message.name:
            yield from encode(message.name)
        yield ids[f"content_{message.kind}"]
        yield from encode(message.text)
        yield ids[_END_MESSAGE]
        if message.ends_turn:
            yield ids[_END_TURN]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def open_chat(tokenizer: Vocabulary | None, folder: Path) -> Chat | None:
    """The chat of an engine folder, or None if its tokenizer has no chat tokens.

    Raises CorruptError for a tokenizer that lacks some of them or makes them from text.
    """
    added = {} if tokenizer is None else tokenizer.added_tokens()
    spelled = {name: f"<|{name}|>" for name in (*TOKENS, _END_TEXT)}
    ids = {name: added[text] for name, text in spelled.items() if text in added}
    if tokenizer is None or not ids.keys() & set(TOKENS):
        return None
    path = str(folder / TOKENIZER / "tokenizer.json")
    remedy = "build the engine from a checkpoint with the model's own tokenizer"
    if missing := [spelled[name] for name in TOKENS if name not in ids]:
        raise CorruptError(path, f"no {', '.join(missing)}", "every token of the chat", remedy)
    if made := [
        spelled[name] for name, token in ids.items() if token in tokenizer.encode(spelled[name])
    ]:
        raise CorruptError(path, f"text becomes {', '.join(made)}", "them marked special", remedy)
    return Chat(tokenizer, ids)
