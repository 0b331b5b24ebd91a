"""Chat prompts and answers: the golden renderings, what is refused, output whole and broken."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.chat_tokenizer import NAMES, chat_of, chat_tokenizer, spelled, tokens_of
from support.fake_spec import tiny_tokenizer

from inkling_engine.runtime.chat import FIELDS, TOKENS, Chat, open_chat
from inkling_engine.runtime.chat_messages import read_effort
from inkling_engine.runtime.errors import CorruptError, UsageError
from inkling_engine.runtime.tokens import Tokenizer

pytestmark = pytest.mark.null

TOKENIZER = chat_tokenizer()
CHAT = chat_of(TOKENIZER)
USER = {"role": "user", "content": "w?"}
LEVEL = "⟨message_system⟩⟨content_text⟩Thinking effort level: 0.9⟨end_message⟩"
ASKED = "⟨message_user⟩⟨content_text⟩w?⟨end_message⟩"
MODEL_IDS = {
    "message_user": 200000,
    "message_model": 200001,
    "message_system": 200002,
    "message_tool": 200003,
    "content_text": 200004,
    "content_model_end_sampling": 200006,
    "content_thinking": 200008,
    "end_message": 200010,
    "content_tool_error": 200022,
    "content_xml": 200024,
    "content_invoke_tool_json": 200049,
    "content_invoke_tool_text": 200057,
    "endoftext": 199999,
}
_EFFORT = [133850, 6942, 3211, 25, 220, 15, 13]
_TEXTS = {
    "hi": [3686],
    "S1": [50, 16],
    "S2": [50, 17],
    "hmm": [71, 4538],
    "yo": [4925],
    "more": [8229],
    "<|message_user|>": [27, 91, 3938, 7146, 91, 29],
    "Thinking effort level: 0.9": [*_EFFORT, 24],
    "Thinking effort level: 0.2": [*_EFFORT, 17],
    "Thinking effort level: 0.99": [*_EFFORT, 2058],
}


class Pinned:
    """The model's tokenizer for the few texts of the golden renderings."""

    def encode(self, text: str) -> list[int]:
        return _TEXTS.get(text, [])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return next(text for text, known in _TEXTS.items() if known == list(ids))

    def added_tokens(self) -> Mapping[str, int]:
        return {f"<|{name}|>": i for name, i in MODEL_IDS.items()}


def _pinned() -> Chat:
    chat = open_chat(Pinned(), Path("engine"))
    assert chat is not None
    return chat


def _said(role: Any, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _call(arguments: Any = "{}", name: str = "f", identity: str = "c1") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


def _tool(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def _rendered(*messages: Any, **body: Any) -> str:
    return spelled(CHAT.render({"messages": list(messages), **body}), TOKENIZER)


def _parsed(text: str) -> dict[str, Any]:
    return CHAT.parse(tokens_of(text, TOKENIZER))


def test_golden_user() -> None:
    assert _pinned().render({"messages": [_said("user", "hi")]}) == (
        [200002, 200004, *_EFFORT, 24, 200010, 200000, 200004, 3686, 200010]
    )


@pytest.mark.parametrize("second", ["system", "developer"])
def test_golden_system(second: str) -> None:
    messages = [_said("system", "S1"), _said(second, "S2"), _said("user", "hi")]
    assert _pinned().render({"messages": messages, "reasoning_effort": "low"}) == (
        [200002, 200004, 50, 16, 200010, 200002, 200004, 50, 17, 200010]
        + [200002, 200004, *_EFFORT, 17, 200010, 200000, 200004, 3686, 200010]
    )


def test_golden_turns() -> None:
    answer = _said("assistant", "yo", reasoning_content="hmm")
    messages = [_said("system", "S1"), _said("user", "hi"), answer, _said("user", "more")]
    turn = [200001, 200008, 71, 4538, 200010, 200001, 200004, 4925, 200010, 200006]
    assert _pinned().render({"messages": messages, "reasoning_effort": 0.99}) == (
        [200002, 200004, 50, 16, 200010, 200002, 200004, *_EFFORT, 2058, 200010]
        + [200000, 200004, 3686, 200010, *turn, 200000, 200004, 8229, 200010]
    )
    assert _pinned().parse(turn) == answer
    assert _pinned().stop_token_ids == (200006, 199999)


def test_golden_literal() -> None:
    ids = _pinned().render({"messages": [_said("user", "<|message_user|>")]})
    assert ids[-9:] == [200000, 200004, 27, 91, 3938, 7146, 91, 29, 200010]


def test_golden_tools() -> None:
    call = _call('{"city": "Paris", "a": 1}', "get_w")
    parameters = {"type": "object", "properties": {"city": {"type": "string"}, "a": {}}}
    declared = _tool("get_w", parameters=parameters, description="d")
    found = _rendered(
        _said("system", "S1"),
        USER,
        _said("assistant", "let me", tool_calls=[call]),
        _said("tool", "sunny", tool_call_id="c1"),
        tools=[declared],
    )
    assert found == (
        "⟨message_system⟩⟨content_text⟩S1⟨end_message⟩"
        '⟨message_system⟩tool_declare⟨content_xml⟩[{"description":"d","name":"get_w","parameters":'
        '{"properties":{"a":{},"city":{"type":"string"}},"type":"object"},"type":"function"}]'
        f"⟨end_message⟩{LEVEL}{ASKED}"
        "⟨message_model⟩⟨content_text⟩let me⟨end_message⟩"
        '⟨message_model⟩get_w⟨content_invoke_tool_json⟩{"name":"get_w","args":{"a":1,"city":"Paris"}}'
        "⟨end_message⟩⟨content_model_end_sampling⟩"
        "⟨message_tool⟩get_w⟨content_text⟩sunny⟨end_message⟩"
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((None, "0.9"), ("none", "0"), ("minimal", "0.1"), ("low", "0.2"), ("medium", "0.7")),
        *(("high", "0.9"), ("xhigh", "0.99"), ("max", "0.99"), (0, "0"), (1, "1"), (0.33, "0.33")),
        *((0.005, "0"), (0.125, "0.12"), (0.345, "0.34"), (0.545, "0.55"), (0.575, "0.57")),
        *((0.3349, "0.34"), (0.615, "0.62"), (0.995, "1"), (1e-9, "0"), (0.1, "0.1")),
    ],
)
def test_effort(value: Any, shown: str) -> None:
    assert read_effort(value) == shown


def test_effort_and_tools_follow_the_leading_system_messages() -> None:
    late = "⟨message_system⟩⟨content_text⟩late⟨end_message⟩"
    assert _rendered(USER, _said("system", "late")) == LEVEL + ASKED + late
    assert _rendered(_said("system", "late")) == late + LEVEL
    declared = _rendered(USER, tools=[_tool()])
    assert declared.endswith(
        'tool_declare⟨content_xml⟩[{"description":"","name":"f","parameters":{},"type":"function"}]'
        f"⟨end_message⟩{LEVEL}{ASKED}"
    )
    assert _rendered(USER, tools=[_tool()], tool_choice="none") == LEVEL + ASKED
    assert _rendered(USER, tools=[], tool_choice="auto", parallel_tool_calls=True) == LEVEL + ASKED


def test_a_message_has_one_of_the_grammar_for_each_text_part() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for role, mark in (("system", "system"), ("user", "user"), ("assistant", "model")):
        found = _rendered(_said(role, parts))
        expected = "".join(f"⟨message_{mark}⟩⟨content_text⟩{x}⟨end_message⟩" for x in "ab")
        assert expected in found
        assert found.count("⟨content_model_end_sampling⟩") == (role == "assistant")


def test_turns() -> None:
    end, model = "⟨end_message⟩", "⟨message_model⟩"
    one, two = _call('{"s":"\\u00e9"}'), _call('{"n":123456789012345678901234567890}', "g", "c2")
    turn = _said("assistant", None, reasoning_content="x", tool_calls=[one, two], refusal=None)
    answers = [_said("tool", "R2", tool_call_id="c2"), _said("tool", "", name="h")]
    assert _rendered(USER, turn, *answers) == (
        f"{LEVEL}{ASKED}{model}⟨content_thinking⟩x{end}"
        f'{model}f⟨content_invoke_tool_json⟩{{"name":"f","args":{{"s":"é"}}}}{end}'
        f"{model}g⟨content_invoke_tool_json⟩"
        f'{{"name":"g","args":{{"n":123456789012345678901234567890}}}}{end}'
        f"⟨content_model_end_sampling⟩"
        f"⟨message_tool⟩g⟨content_text⟩R2{end}⟨message_tool⟩h⟨content_text⟩{end}"
    )
    empty = _rendered(USER, _said("assistant", ""))
    assert empty.endswith(f"{model}⟨content_text⟩{end}⟨content_model_end_sampling⟩")
    silent = _rendered(USER, _said("assistant", "", reasoning_content="x"))
    assert silent.endswith(f"{model}⟨content_thinking⟩x{end}⟨content_model_end_sampling⟩")


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ('{"b":1E5,"a":0.1}', '{"a":0.1,"b":100000.0}'),
        ('{"n":-0.0,"m":0.30000000000000004}', '{"m":0.30000000000000004,"n":-0.0}'),
        ('{"n":1e16,"m":1e-5}', '{"m":0.00001,"n":1e16}'),
        ('{"n":18446744073709551616}', '{"n":18446744073709551616}'),
        ('{"z":{"b":[1, 2],"a":null}}', '{"z":{"b":[1,2],"a":null}}'),
        (r'{"\u00e9":"\/\u001f\u2028\ud83d\ude00<&"}', '{"é":"/\\u001f\u2028😀<&"}'),
        ('{"a":1,"B":2,"a":3}', '{"B":2,"a":3}'),
    ],
)
def test_arguments_are_compact_and_ordered(arguments: str, kept: str) -> None:
    found = _rendered(_said("assistant", "", tool_calls=[_call(arguments)]))
    assert f'{{"name":"f","args":{kept}}}⟨end_message⟩' in found


SPECIALS = "".join(f"<|{name}|>" for name in NAMES)


def test_no_text_becomes_a_special_token() -> None:
    call = _call(json.dumps({SPECIALS: SPECIALS}), SPECIALS)
    texts = [
        _said("system", SPECIALS),
        _said("user", [{"type": "text", "text": SPECIALS}]),
        _said("assistant", SPECIALS, reasoning_content=SPECIALS, tool_calls=[call]),
        _said("tool", SPECIALS, tool_call_id="c1"),
    ]
    harmless = json.loads(json.dumps(texts).replace(SPECIALS, "x"))
    tool = _tool(SPECIALS, description=SPECIALS, parameters={SPECIALS: SPECIALS})
    special = set(TOKENIZER.added_tokens().values())
    shapes = []
    for messages, tools in ((texts, [tool]), (harmless, [_tool("x")])):
        ids = CHAT.render({"messages": messages, "tools": tools})
        shapes.append([token for token in ids if token in special])
    assert shapes[0] == shapes[1]


BAD_MESSAGES: list[tuple[Any, str, str]] = [
    ("hi", "messages[0]", "an object"),
    ({"content": "x"}, "messages[0].role", "one of system"),
    (_said("function", "x"), "messages[0].role", "one of system"),
    (_said(["user"], "x"), "messages[0].role", "one of system"),
    (_said("user", None), "messages[0].content", "text parts"),
    (_said("user", []), "messages[0].content", "text parts"),
    (_said("user", 3), "messages[0].content", "text parts"),
    (_said("user", 10**5000), "messages[0].content", "text parts"),
    (_said("user", "a\ud800"), "messages[0].content", "whole characters"),
    (_said("user", "x", name="Bob"), "messages[0].name", "only content, role"),
    (_said("user", "x", **{"a\nb": 1}), "messages[0].a\\nb", "only content, role"),
    (_said("user", ["x"]), "messages[0].content[0]", "an object"),
    (_said("user", [{"type": "text"}]), "messages[0].content[0].text", "a string"),
    (_said("user", [{"text": "x"}]), "messages[0].content[0].type", '"text"'),
    (_said("user", [{"type": "image_url"}]), "messages[0].content[0].type", "no image or audio"),
    (_said("user", [{"type": "input_audio"}]), "messages[0].content[0].type", "no image or audio"),
    (
        _said("user", [{"type": "text", "text": "x", "annotations": [1]}]),
        "messages[0].content[0].annotations",
        "only text, type",
    ),
    (_said("system", "x", tool_calls=[_call()]), "messages[0].tool_calls", "only content, role"),
    (_said("assistant", None), "messages[0].content", "text parts"),
    (_said("assistant", "x", reasoning_content=1), "messages[0].reasoning_content", "a string"),
    (_said("assistant", "x", refusal="no"), "messages[0].refusal", "only content"),
    (_said("assistant", "x", tool_calls={}), "messages[0].tool_calls", "a list"),
    (_said("assistant", "x", tool_calls=["f"]), "messages[0].tool_calls[0]", "an object"),
    (
        _said("assistant", "x", tool_calls=[_call() | {"type": "custom"}]),
        "messages[0].tool_calls[0].type",
        '"function"',
    ),
    (
        _said("assistant", "x", tool_calls=[_call(identity="")]),
        "messages[0].tool_calls[0].id",
        "not empty",
    ),
    (
        _said("assistant", "x", tool_calls=[_call() | {"function": None}]),
        "messages[0].tool_calls[0].function",
        "an object",
    ),
    (
        _said("assistant", "x", tool_calls=[_call(name="")]),
        "messages[0].tool_calls[0].function.name",
        "not empty",
    ),
    *(
        (
            _said("assistant", "x", tool_calls=[_call(arguments)]),
            "messages[0].tool_calls[0].function.arguments",
            expected,
        )
        for arguments, expected in [
            *(({}, "a string"), ("", "a JSON object"), ("{", "a JSON object")),
            *(("[1]", "a JSON object"), ('{"a":NaN}', "a JSON object")),
            *(('{"a":"\\ud800"}', "a JSON object"), ("[" * 100_000, "a JSON object")),
        ]
    ),
    (_said("tool", "x"), "messages[0].tool_call_id", "an earlier call"),
    (_said("tool", "x", tool_call_id="c1"), "messages[0].tool_call_id", "an earlier call"),
    (_said("tool", "x", name=3), "messages[0].name", "not empty"),
    (_said("tool", None, name="f"), "messages[0].content", "text parts"),
]
BAD_BODIES: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "a list"),
    ({"messages": "hi"}, "messages", "a list"),
    ({"messages": []}, "messages", "at least one"),
    *(
        ({"reasoning_effort": value}, "reasoning_effort", "a number from 0 to 1")
        for value in ("most", "0.5", True, 1.01, -0.1, float("nan"), [0.5])
    ),
    ({"tool_choice": "required"}, "tool_choice", "`auto` or `none`"),
    ({"tool_choice": _tool()}, "tool_choice", "`auto` or `none`"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls", "true"),
    ({"tools": {}}, "tools", "a list"),
    ({"tools": ["f"]}, "tools[0]", "an object"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", '"function"'),
    ({"tools": [_tool() | {"extra": 1}]}, "tools[0].extra", "only function, type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "an object"),
    ({"tools": [_tool("")]}, "tools[0].function.name", "not empty"),
    ({"tools": [_tool(), _tool()]}, "tools[1].function.name", "a new name"),
    ({"tools": [_tool(description=3)]}, "tools[0].function.description", "a string"),
    ({"tools": [_tool(parameters="x")]}, "tools[0].function.parameters", "an object"),
    ({"tools": [_tool(strict=True)]}, "tools[0].function.strict", "false"),
    ({"tools": [_tool(parameters={"a": object()})]}, "tools", "JSON"),
    ({"tools": [_tool(parameters={"\ud800": 1})]}, "tools", "JSON"),
]


@pytest.mark.parametrize(
    ("body", "field", "expected"),
    [({"messages": [message]}, *rest) for message, *rest in BAD_MESSAGES]
    + [({"messages": [USER], **body}, *rest) for body, *rest in BAD_BODIES],
)
def test_what_cannot_be_honoured_is_refused(
    body: dict[str, Any], field: str, expected: str
) -> None:
    with pytest.raises(UsageError) as raised:
        CHAT.render(body)
    assert raised.value.field == field
    assert expected in raised.value.expected
    assert str(raised.value).isprintable() and len(str(raised.value)) < 400
    assert body.keys() <= FIELDS


MODEL, END, SAMPLED = "⟨message_model⟩", "⟨end_message⟩", "⟨content_model_end_sampling⟩"
CALL = "⟨content_invoke_tool_json⟩"


@pytest.mark.parametrize(
    ("output", "content", "reasoning"),
    [
        (f"{MODEL}⟨content_text⟩yo{END}{SAMPLED}", "yo", None),
        (f"⟨content_text⟩yo{END}{SAMPLED}", "yo", None),
        (f"{MODEL}⟨content_thinking⟩hm{END}{MODEL}⟨content_text⟩yo{END}{SAMPLED}", "yo", "hm"),
        (f"⟨content_thinking⟩hm{END}⟨content_text⟩yo{END}", "yo", "hm"),
        (f"⟨content_thinking⟩h{END}⟨content_text⟩y{END}{MODEL}⟨content_text⟩o{END}", "yo", "h"),
        (f"{MODEL}⟨content_thinking⟩hm", None, "hm"),
        (f"{MODEL}⟨content_text⟩yo", "yo", None),
        (f"{MODEL}⟨content_text⟩yo{SAMPLED}{MODEL}⟨content_text⟩no", "yo", None),
        (f"{MODEL}⟨content_text⟩yo⟨endoftext⟩no", "yo", None),
        (f"yo{SAMPLED}", "yo", None),
        (f"{MODEL}yo{END}{MODEL}there", "yothere", None),
        (f"{MODEL}⟨content_text⟩a⟨message_user⟩b{END}", "a<|message_user|>b", None),
        (f"{MODEL}⟨content_text⟩a<|end_message|>b{END}", "a<|end_message|>b", None),
        (f"⟨message_user⟩⟨content_text⟩yo{END}", "yo", None),
        (f"{MODEL}⟨content_invoke_tool_text⟩yo{END}", "yo", None),
        (f"{MODEL}f{CALL}{{}}{END}", "{}", None),
        (
            f'{MODEL}f{CALL}{{"name":"f","args":{{"a":{END}{SAMPLED}',
            '{"name":"f","args":{"a":',
            None,
        ),
        (f'{MODEL}f{CALL}{{"name":"f"}}{END}', '{"name":"f"}', None),
        (f'{MODEL}f{CALL}{{"name":"","args":{{}}}}{END}', '{"name":"","args":{}}', None),
        (f'{MODEL}f{CALL}{{"name":"f","args":[]}}{END}', '{"name":"f","args":[]}', None),
        (f'{CALL}{{"name":"f","args":{{"a":1e999}}}}', '{"name":"f","args":{"a":1e999}}', None),
        *((text, "", None) for text in ("", SAMPLED, MODEL, MODEL + END, f"⟨content_text⟩{END}")),
        ("⟨content_thinking⟩", "", None),
    ],
)
def test_output(output: str, content: str | None, reasoning: str | None) -> None:
    expected: dict[str, Any] = {"role": "assistant", "content": content}
    assert _parsed(output) == (expected | ({"reasoning_content": reasoning} if reasoning else {}))


def test_calls_keep_their_sampled_arguments() -> None:
    first = '{ "b":12345678901234567890123,"a" : "\\u00e9" }'
    output = (
        f'{MODEL}⟨content_text⟩look{END}{MODEL}f{CALL}{{"name":"f","args":{first}}}{END}'
        f'{MODEL}{CALL} {{"args":{{}},"name":"g"}}\n'
    )
    message = _parsed(output)
    assert message["content"] == "look"
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [{"name": "f", "arguments": first}, {"name": "g", "arguments": "{}"}]
    identities = [call["id"] for call in message["tool_calls"]]
    assert len(set(identities)) == 2
    assert [call["id"] for call in _parsed(output)["tool_calls"]] == identities
    assert _parsed(output + " ")["tool_calls"][0]["id"] != identities[0]
    assert _parsed(f'{CALL}{{"name":"f","args":{{}}}}')["content"] is None


def test_opening() -> None:
    assert open_chat(None, Path("engine")) is None
    assert open_chat(tiny_tokenizer(), Path("engine")) is None
    assert open_chat(chat_tokenizer(["endoftext"]), Path("engine")) is None
    with pytest.raises(CorruptError, match=r"tokenizer.json: found no <\|message_user\|>; "):
        open_chat(chat_tokenizer(TOKENS[1:]), Path("engine"))
    with pytest.raises(CorruptError, match=r"text becomes <\|message_user\|>"):
        open_chat(chat_tokenizer(special=False), Path("engine"))


def test_a_tokenizer_without_its_own_end_has_one_stop() -> None:
    tokenizer: Tokenizer = chat_tokenizer(TOKENS)
    end = tokenizer.added_tokens()["<|content_model_end_sampling|>"]
    assert chat_of(tokenizer).stop_token_ids == (end,)
