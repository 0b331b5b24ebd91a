"""Chat bodies for property tests: any conversation that the engine accepts."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from inkling_engine.runtime.chat import TOKENS

SPELLED = st.sampled_from([f"<|{name}|>" for name in TOKENS])
TEXTS = st.one_of(st.text(max_size=12), SPELLED, st.sampled_from(['{"name":"f"}', "\u2028\x00é😀"]))
NAMES = st.one_of(st.sampled_from(["f", "get_w"]), TEXTS.filter(bool))
THOUSANDTHS = st.integers(-(10**9), 10**9).map(lambda i: i / 1000)
NUMBERS = st.integers(-(2**63), 2**64 - 1) | THOUSANDTHS  # what every JSON reader keeps
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=3)
CONTENTS = TEXTS | st.lists(TEXTS, min_size=1, max_size=3).map(
    lambda texts: [{"type": "text", "text": text} for text in texts]
)
EFFORTS = st.sampled_from(["none", "low", "high", "max"]) | st.floats(0, 1)


@st.composite
def calls(draw: st.DrawFn, index: int) -> list[dict[str, Any]]:
    """Tool calls whose ids are new in the conversation when `index` is."""
    found = []
    for number in range(draw(st.integers(0, 2))):
        arguments = json.dumps(draw(OBJECTS), ensure_ascii=draw(st.booleans()))
        function = {"name": draw(NAMES), "arguments": arguments}
        found.append({"id": f"c{index}-{number}", "type": "function", "function": function})
    return found


@st.composite
def turns(draw: st.DrawFn, index: int = 0) -> dict[str, Any]:
    """An assistant's message."""
    turn: dict[str, Any] = {"role": "assistant", "content": draw(TEXTS)}
    if reasoning := draw(TEXTS):
        turn["reasoning_content"] = reasoning
    if listed := draw(calls(index)):
        turn["tool_calls"] = listed
    return turn


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """A body with several turns, the answers of its calls, perhaps tools and an effort."""
    messages: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(0, 2))):
        messages.append({"role": "system", "content": draw(CONTENTS)})
    for index in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(CONTENTS)})
        if draw(st.booleans()):
            turn = draw(turns(index))
            messages.append(turn)
            for call in turn.get("tool_calls", ()):
                answer = {"role": "tool", "tool_call_id": call["id"], "content": draw(CONTENTS)}
                messages.append(answer)
    body: dict[str, Any] = {"messages": messages}
    if draw(st.booleans()):
        body["reasoning_effort"] = draw(EFFORTS)
    names = draw(st.lists(NAMES, max_size=2, unique=True))
    body["tools"] = [
        {
            "type": "function",
            "function": {"name": name, "description": draw(TEXTS), "parameters": draw(OBJECTS)},
        }
        for name in names
    ]
    return body
