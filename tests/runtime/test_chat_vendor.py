"""Our grammar against the vendor's own renderer and parser, token by token.

`tml_renderers` brings its tokenizer, the model's, so this is also the only test with the real
vocabulary. What differs is left out of the bodies: it rounds numbers of many digits, spells 1e16
in two ways, knows no developer role, and finds no tool's name by the id of its call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chat_bodies import bodies, turns

from inkling_engine.runtime.chat import Chat, open_chat
from inkling_engine.runtime.chat_messages import EFFORTS, read_effort

vendor = pytest.importorskip("tml_renderers")

NATIVE = vendor.tokenizers.O200kBaseChatTokenizer()
RENDERER = vendor.v0.Renderer(NATIVE)
USER = {"role": "user", "content": "u"}


class Vocabulary:
    """The vendor's tokenizer as chat needs it."""

    def encode(self, text: str) -> list[int]:
        return list(NATIVE.encode_ordinary(text))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return str(NATIVE.decode(list(ids)))

    def added_tokens(self) -> Mapping[str, int]:
        return {f"<|{name}|>": NATIVE.encode_special(name) for name in NATIVE.special_tokens()}


def _chat() -> Chat:
    chat = open_chat(Vocabulary(), Path("engine"))
    assert chat is not None
    return chat


CHAT = _chat()


def _author(kind: str, name: str | None = None) -> Any:
    return vendor.chat.Author(getattr(vendor.chat.AuthorKind, kind), name)


def _texts(content: Any) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def _native_call(call: dict[str, Any]) -> Any:
    arguments = json.loads(call["function"]["arguments"])
    args = [vendor.chat.ToolArg(name, json.dumps(value)) for name, value in arguments.items()]
    return vendor.chat.InvokeTool(vendor.chat.StructuredToolCall(call["function"]["name"], args))


def _native_turn(message: dict[str, Any]) -> list[Any]:
    contents = []
    if reasoning := message.get("reasoning_content"):
        contents.append(vendor.chat.Thinking(reasoning))
    calls = message.get("tool_calls", [])
    if message["content"] or not (reasoning or calls):
        contents.append(vendor.chat.Text(message["content"]))
    contents += [_native_call(call) for call in calls]
    contents.append(vendor.chat.ModelEndSampling())
    return [vendor.chat.Message(content=content, author=_author("Model")) for content in contents]


def _declaration(tools: list[dict[str, Any]]) -> list[Any]:
    if not tools:
        return []
    specs = [vendor.chat.ToolSpecJson("function", **tool["function"]) for tool in tools]
    content = vendor.chat.ToolDeclareJson(specs)
    return [vendor.chat.Message(content=content, author=_author("System", "tool_declare"))]


def _native(body: dict[str, Any]) -> list[Any]:
    """A body as the vendor's messages."""
    found: list[Any] = []
    names: dict[str, str] = {}
    head = 0
    for message in body["messages"]:
        if message["role"] == "assistant":
            found += _native_turn(message)
            names |= {c["id"]: c["function"]["name"] for c in message.get("tool_calls", [])}
            continue
        name = names[message["tool_call_id"]] if message["role"] == "tool" else None
        author = _author(message["role"].title(), name)
        texts = [vendor.chat.Text(text) for text in _texts(message["content"])]
        found += [vendor.chat.Message(content=text, author=author) for text in texts]
        head = len(found) if message["role"] == "system" else head
    return [*found[:head], *_declaration(body.get("tools", [])), *found[head:]]


def _tokens(spans: Sequence[Any]) -> list[int]:
    return [token for span in spans for token in span.span.tokens]


def _parser() -> Any:
    return RENDERER.render_for_completion(_native({"messages": [USER]}))[1]


@given(bodies())
def test_prompts_are_the_vendors(body: dict[str, Any]) -> None:
    effort = body.get("reasoning_effort", "high")
    effort = EFFORTS[effort] if isinstance(effort, str) else effort
    spans, _ = RENDERER.render_for_completion_with_effort(_native(body), effort)
    assert CHAT.render(body) == _tokens(spans)


@given(st.floats(0, 1) | st.integers(0, 1000).map(lambda i: i / 1000))
def test_efforts_are_the_vendors(effort: float) -> None:
    spans, _ = RENDERER.render_for_completion_with_effort([], effort)
    assert NATIVE.decode(_tokens(spans)[2:-1]) == f"Thinking effort level: {read_effort(effort)}"


@given(turns())
def test_answers_are_read_as_the_vendor_reads_them(message: dict[str, Any]) -> None:
    ids = CHAT.render({"messages": [USER, message]})[len(CHAT.render({"messages": [USER]})) :]
    found = CHAT.parse(ids)
    contents = [read.content for read in _parser().parse_tokens(ids)]
    assert contents.pop() == vendor.chat.ModelEndSampling()
    texts = [c.text for c in contents if isinstance(c, vendor.chat.Text)]
    thoughts = [c.text for c in contents if isinstance(c, vendor.chat.Thinking)]
    calls = [c for c in contents if isinstance(c, vendor.chat.InvokeTool)]
    assert "".join(texts) == (found["content"] or "")
    assert "".join(thoughts) == found.get("reasoning_content", "")
    functions = [call["function"] for call in found.get("tool_calls", [])]
    assert [call.name for call in calls] == [function["name"] for function in functions]
    for call, function in zip(calls, functions, strict=True):
        read = {arg.name: json.loads(arg.value) for arg in call.args}
        assert read == json.loads(function["arguments"])


def test_tokens_and_stops_are_the_vendors() -> None:
    assert CHAT.stop_token_ids == (*RENDERER.stop(), NATIVE.encode_special("endoftext"))


@pytest.mark.parametrize("name", ["user", "model", "system", "tool"])
def test_special_text_inside_an_answer_is_text(name: str) -> None:
    special = NATIVE.encode_special
    ids = [special("message_model"), special("content_text"), special(f"message_{name}")]
    ids += [special("end_message"), special("content_model_end_sampling")]
    assert CHAT.parse(ids)["content"] == _parser().parse_tokens(ids)[0].content.text
