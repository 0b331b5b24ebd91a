"""Any conversation renders into the grammar, any answer comes back, no output breaks the parser."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chat_bodies import bodies, turns
from support.chat_tokenizer import chat_of, chat_tokenizer

from inkling_engine.runtime.chat import FIELDS
from inkling_engine.runtime.errors import UsageError

pytestmark = pytest.mark.null

TOKENIZER = chat_tokenizer()
CHAT = chat_of(TOKENIZER)
ADDED = {text[2:-2]: i for text, i in TOKENIZER.added_tokens().items()}
SPECIAL = frozenset(ADDED.values())
ROLES = {ADDED[f"message_{role}"] for role in ("user", "model", "system", "tool")}
KINDS = {ADDED[f"content_{kind}"] for kind in ("text", "thinking", "xml", "invoke_tool_json")}
END, END_TURN = ADDED["end_message"], ADDED["content_model_end_sampling"]
IDS = st.integers(0, 2**32 - 1) | st.integers(0, 2039) | st.sampled_from(sorted(SPECIAL))


def _turn(message: dict[str, Any]) -> list[int]:
    """The tokens of an assistant's message, as the model would have sampled them."""
    alone = CHAT.render({"messages": [{"role": "user", "content": ""}]})
    return CHAT.render({"messages": [{"role": "user", "content": ""}, message]})[len(alone) :]


def _comparable(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what a turn's tokens do not hold: ids, the spelling of arguments."""
    found = dict(message)
    found["tool_calls"] = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]
    return found | {"content": message["content"] or ""}


@given(bodies())
def test_a_prompt_is_messages_of_the_grammar(body: dict[str, Any]) -> None:
    ids = CHAT.render(body)
    marks = [token for token in ids if token in SPECIAL]
    messages = [token for token in marks if token != END_TURN]
    assert ids[0] in ROLES and ids[-1] in (END, END_TURN)
    assert set(messages[0::3]) <= ROLES
    assert set(messages[1::3]) <= KINDS
    assert set(messages[2::3]) == {END}
    assert marks.count(END_TURN) == sum(m["role"] == "assistant" for m in body["messages"])
    assert all(ids[i - 1] == END for i, token in enumerate(ids) if token == END_TURN)


@given(bodies(), bodies())
def test_a_longer_conversation_begins_with_the_shorter_one(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    """What prefix reuse needs."""
    more = [m for m in second["messages"] if m["role"] == "user"]
    longer = first | {"messages": [*first["messages"], *more]}
    ids = CHAT.render(first)
    assert CHAT.render(longer)[: len(ids)] == ids


KEYS = st.sampled_from(
    [
        "role",
        "content",
        "type",
        "text",
        "tool_calls",
        "tool_call_id",
        "id",
        "function",
        "name",
        "arguments",
        "parameters",
    ]
)
WORDS = st.sampled_from(["user", "assistant", "tool", "system", "text", "function", "{}", "c", ""])
SCRAPS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
)
MESSAGE = st.fixed_dictionaries({"role": WORDS, "content": SCRAPS}, optional={"tool_calls": SCRAPS})


@given(st.lists(MESSAGE, max_size=2), st.dictionaries(st.sampled_from(sorted(FIELDS)), SCRAPS))
def test_any_body_is_rendered_or_refused(messages: list[Any], body: dict[str, Any]) -> None:
    with contextlib.suppress(UsageError):
        assert CHAT.render({"messages": messages} | body)


@given(turns())
def test_an_answer_comes_back(message: dict[str, Any]) -> None:
    ids = _turn(message)
    found = CHAT.parse(ids)
    assert _comparable(found) == _comparable(message)
    assert _comparable(CHAT.parse(ids[1:])) == _comparable(found), "the prompt may have the role"
    assert _turn(found) == ids, "an answer taken into the next prompt has the same tokens"


@given(turns(), st.data())
def test_a_turn_cut_off_keeps_what_is_there(message: dict[str, Any], data: st.DataObject) -> None:
    ids = _turn(message)
    cut = ids[: data.draw(st.integers(0, len(ids)))]
    found, whole = CHAT.parse(cut), CHAT.parse(ids)
    thoughts, expected = found.get("reasoning_content", ""), whole.get("reasoning_content", "")
    assert expected.startswith(thoughts.rstrip("\ufffd"))
    calls, listed = _comparable(found)["tool_calls"], _comparable(whole)["tool_calls"]
    assert calls == listed[: len(calls)]
    if len(calls) == len(listed):
        assert _comparable(whole)["content"].startswith((found["content"] or "").rstrip("\ufffd"))


@given(st.lists(IDS, max_size=40))
def test_any_tokens_are_a_message(ids: list[int]) -> None:
    message = CHAT.parse(ids)
    assert message["role"] == "assistant"
    assert _comparable(message) == _comparable(CHAT.parse([*ids, END_TURN, 5]))
    for call in message.get("tool_calls", ()):
        assert isinstance(json.loads(call["function"]["arguments"]), dict)
    assert set(message) <= {"role", "content", "reasoning_content", "tool_calls"}
    json.dumps(message).encode()
    CHAT.render({"messages": [{"role": "user", "content": ""}, message]})


@given(st.lists(st.integers(0, 2039).filter(lambda i: i not in SPECIAL), max_size=30))
def test_no_text_is_lost(ids: list[int]) -> None:
    text = TOKENIZER.decode(ids, skip_special_tokens=False)
    for header in ([], [ADDED["message_model"]], [ADDED["content_text"]]):
        for end in ([], [END], [END_TURN], [END, END_TURN]):
            assert CHAT.parse([*header, *ids, *end])["content"] == text
