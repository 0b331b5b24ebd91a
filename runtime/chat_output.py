"""Sampled tokens of a chat turn as an OpenAI message, by token ids and never by their text.

Inside a message every special token but its end is plain text. Output that breaks the grammar is
kept as content: text without a header, a call that is no whole JSON call, a turn cut off by its
length. Nothing raises.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

THINKING: Final = "thinking"
CALL: Final = "invoke_tool_json"
TEXT: Final = "text"


@dataclass(frozen=True, slots=True)
class Marks:
    """Special tokens that structure output: token id -> kind for `kinds`."""

    kinds: Mapping[int, str]
    roles: frozenset[int]
    end_message: int
    stops: frozenset[int]


@dataclass(frozen=True, slots=True)
class Block:
    """One message of a turn: the tokens before its kind token, and those after it."""

    kind: str
    header: Sequence[int]
    payload: Sequence[int]


class _Call(msgspec.Struct):
    """A tool call's payload; `args` keeps the sampled text, since numbers would not survive."""

    name: str
    args: msgspec.Raw


_call = msgspec.json.Decoder(_Call)
_arguments = msgspec.json.Decoder(dict[str, Any])


def split_blocks(ids: Sequence[int], marks: Marks) -> Iterator[Block]:
    """The messages of a turn, the last one perhaps unfinished; the first role token may be
    missing, as when the prompt already had it. Tokens without a kind are text."""
    kind: str | None = None
    header: list[int] = []
    payload: list[int] = []
    for token in ids:
        if token in marks.stops:
            break
        if kind is not None and token != marks.end_message:
            payload.append(token)
        elif kind is not None:
            yield Block(kind, header, payload)
            kind, header, payload = None, [], []
        elif token in marks.kinds:
            kind = marks.kinds[token]
        elif token == marks.end_message or token in marks.roles:
            if header:
                yield Block(TEXT, header, [])
            header = []
        else:
            header.append(token)
    if kind is not None or header:
        yield Block(kind or TEXT, header, payload)


def read_output(
    ids: Sequence[int], marks: Marks, decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    """The OpenAI message of a turn.

    `content` is None where there is only reasoning or calls; `reasoning_content` and `tool_calls`
    are there only if the turn has them. A call's `arguments` are its sampled text; its id follows
    from the turn's tokens and its place.
    """
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in split_blocks(ids, marks):
        if block.kind == CALL:
            payload = decode(block.payload)
            call = _read_call(payload)
            if call is not None:
                calls.append({"id": _call_id(ids, len(calls)), "type": "function"} | call)
            else:
                texts.append(payload)
        else:
            text = decode([*block.header, *block.payload])
            (thoughts if block.kind == THINKING else texts).append(text)
    content, reasoning = "".join(texts), "".join(thoughts)
    message: dict[str, Any] = {"role": "assistant"}
    message["content"] = content or (None if reasoning or calls else "")
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _read_call(payload: str) -> dict[str, Any] | None:
    """The function of a call, or None for text that is no whole call."""
    try:
        call = _call.decode(payload)
        _arguments.decode(call.args)
    except (msgspec.DecodeError, RecursionError):
        return None
    arguments = bytes(call.args).decode()
    return {"function": {"name": call.name, "arguments": arguments}} if call.name else None


def _call_id(ids: Sequence[int], index: int) -> str:
    """The same for the same tokens, so that a job done again gives the same file."""
    named = f"{index}:{','.join(map(str, ids))}"
    return f"call_{hashlib.sha256(named.encode()).hexdigest()[:24]}"
