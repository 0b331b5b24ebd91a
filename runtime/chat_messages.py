"""An OpenAI chat body as messages of the model's grammar, still as text.

Every message of the grammar has a role, sometimes a name, a kind and a text. One OpenAI message
becomes several: one a text part, one for its reasoning, one a tool call. What cannot be honoured
is refused by name, so that no request is quietly answered with something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import msgspec

from inkling_engine.artifacts.errors import UsageError, show

Role = Literal["system", "user", "model", "tool"]
Kind = Literal["text", "thinking", "xml", "invoke_tool_json"]

EFFORTS: Final[Mapping[str, float]] = {
    "none": 0.0,
    "minimal": 0.1,
    "low": 0.2,
    "medium": 0.7,
    "high": 0.9,
    "xhigh": 0.99,
    "max": 0.99,
}
_DEFAULT_EFFORT: Final = EFFORTS["high"]
_ROLES: Final[Mapping[str, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "model",
    "tool": "tool",
}
_FIELDS: Final[Mapping[Role, frozenset[str]]] = {
    "system": frozenset(),
    "user": frozenset(),
    "model": frozenset({"reasoning_content", "tool_calls"}),
    "tool": frozenset({"tool_call_id", "name"}),
}
_LEAVE_OUT: Final = "leave it out"
_arguments = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the grammar; `ends_turn` marks the last one of an assistant's turn."""

    role: Role
    kind: Kind
    text: str
    name: str = ""
    ends_turn: bool = False


def read_body(body: Mapping[str, Any]) -> list[Message]:
    """The messages that a chat body's `messages`, `tools` and `reasoning_effort` stand for.

    Declared tools, then the reasoning effort, follow the leading system messages. Raises
    UsageError, naming the field.
    """
    listed = _list(body.get("messages"), "messages")
    if not listed:
        raise UsageError("messages", "none", "at least one message", "add a user message")
    tools, effort = read_tools(body), read_effort(body.get("reasoning_effort"))
    names: dict[str, str] = {}
    read = [
        message
        for index, value in enumerate(listed)
        for message in _read_message(value, f"messages[{index}]", names)
    ]
    head = next((i for i, message in enumerate(read) if message.role != "system"), len(read))
    declared = [Message("system", "xml", _json(tools, "tools"), "tool_declare")] if tools else []
    level = Message("system", "text", f"Thinking effort level: {effort}")
    return [*read[:head], *declared, level, *read[head:]]


def read_effort(value: Any) -> str:
    """A reasoning effort, a preset's name or a number from 0 to 1, as the model reads it."""
    level = EFFORTS.get(value) if isinstance(value, str) else value
    if value is None:
        level = _DEFAULT_EFFORT
    if isinstance(level, bool) or not isinstance(level, (int, float)) or not 0 <= level <= 1:
        expected = f"one of {', '.join(EFFORTS)}, or a number from 0 to 1"
        raise UsageError("reasoning_effort", _shown(value), expected, "give one of them")
    # In two steps and with ties to even: the vendor's renderer keeps thousandths.
    hundredths = round(round(level * 1000) / 1000 * 100)
    return f"{hundredths / 100:.2f}".rstrip("0").rstrip(".")


def read_tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The declared tools, flattened; none under `tool_choice` "none"."""
    choice, parallel = body.get("tool_choice"), body.get("parallel_tool_calls")
    if choice not in (None, "auto", "none"):
        expected = "`auto` or `none`: tokens are not constrained to a call"
        remedy = "leave it out and ask for the call in a message"
        raise UsageError("tool_choice", _shown(choice), expected, remedy)
    if parallel not in (None, True):
        expected = "true: the number of calls is not constrained"
        raise UsageError("parallel_tool_calls", _shown(parallel), expected, _LEAVE_OUT)
    listed = _optional_list(body.get("tools"), "tools")
    tools = [_read_tool(value, f"tools[{index}]") for index, value in enumerate(listed)]
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool["name"] in seen:
            found = f"{_shown(tool['name'])} again"
            raise UsageError(f"tools[{index}].function.name", found, "a new name", "rename one")
        seen.add(tool["name"])
    return [] if choice == "none" else tools


def _read_tool(value: Any, field: str) -> dict[str, Any]:
    tool = _object(value, field, {"type", "function"})
    if tool.get("type") != "function":
        found = _shown(tool.get("type"))
        raise UsageError(f"{field}.type", found, '"function"', "declare the tool as a function")
    field += ".function"
    known = {"name", "description", "parameters", "strict"}
    function = _object(tool.get("function"), field, known)
    if function.get("strict"):
        expected = "false: tokens are not constrained to a schema"
        raise UsageError(f"{field}.strict", "true", expected, _LEAVE_OUT)
    parameters = function.get("parameters")
    return {
        "description": _optional_text(function.get("description"), f"{field}.description"),
        "name": _name(function.get("name"), f"{field}.name"),
        "parameters": {} if parameters is None else _object(parameters, f"{field}.parameters"),
        "type": "function",
    }


def _read_message(value: Any, field: str, names: dict[str, str]) -> Iterator[Message]:
    """The grammar's messages of one OpenAI message; `names` maps ids of tool calls to names."""
    message = _object(value, field)
    given = message.get("role")
    role = _ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise UsageError(f"{field}.role", _shown(given), f"one of {', '.join(_ROLES)}", "use one")
    _object(value, field, {"role", "content", *_FIELDS[role]})
    if role == "model":
        turn = list(_read_turn(message, field, names))
        yield from turn[:-1]
        yield replace(turn[-1], ends_turn=True)
        return
    name = _tool_name(message, field, names) if role == "tool" else ""
    for text in _read_content(message.get("content"), f"{field}.content"):
        yield Message(role, "text", text, name)


def _read_turn(message: Mapping[str, Any], field: str, names: dict[str, str]) -> Iterator[Message]:
    """Reasoning, then texts, then calls: at least one message."""
    content = message.get("content")
    reasoning = _optional_text(message.get("reasoning_content"), f"{field}.reasoning_content")
    calls = _optional_list(message.get("tool_calls"), f"{field}.tool_calls")
    if reasoning:
        yield Message("model", "thinking", reasoning)
    if not (content in (None, "") and (reasoning or calls)):
        for text in _read_content(content, f"{field}.content"):
            yield Message("model", "text", text)
    for index, call in enumerate(calls):
        yield _read_call(call, f"{field}.tool_calls[{index}]", names)


def _read_call(value: Any, field: str, names: dict[str, str]) -> Message:
    call = _object(value, field, {"id", "type", "function", "index"})
    if call.get("type", "function") != "function":
        raise UsageError(f"{field}.type", _shown(call["type"]), '"function"', "use that")
    identity = _name(call.get("id"), f"{field}.id")
    field += ".function"
    function = _object(call.get("function"), field, {"name", "arguments"})
    name = _name(function.get("name"), f"{field}.name")
    field += ".arguments"
    text = _text(function.get("arguments"), field)
    try:
        arguments = _arguments.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise UsageError(field, _shown(text), "the text of a JSON object", "mend it") from None
    names[identity] = name
    ordered = dict(sorted(arguments.items()))
    payload = f'{{"name":{_json(name, field)},"args":{_json(ordered, field, order=None)}}}'
    return Message("model", "invoke_tool_json", payload, name)


def _tool_name(message: Mapping[str, Any], field: str, names: Mapping[str, str]) -> str:
    """The name under which a tool's result is shown: its own, or that of the call it answers."""
    if message.get("name") is not None:
        return _name(message["name"], f"{field}.name")
    identity = message.get("tool_call_id")
    if not isinstance(identity, str) or identity not in names:
        expected = "the id of an earlier call in `tool_calls`"
        remedy = "repeat the assistant's message with that call, or give the tool's `name`"
        raise UsageError(f"{field}.tool_call_id", _shown(identity), expected, remedy)
    return names[identity]


def _read_content(value: Any, field: str) -> list[str]:
    """The texts of a content: a string, or text parts."""
    if isinstance(value, str):
        return [_text(value, field)]
    if not isinstance(value, (list, tuple)) or not value:
        expected = "a string or a list of text parts"
        raise UsageError(field, _shown(value), expected, "give one of them")
    return [_read_part(part, f"{field}[{index}]") for index, part in enumerate(value)]


def _read_part(value: Any, field: str) -> str:
    part = _object(value, field)
    if part.get("type") != "text":
        expected = '"text": the engine has the text model alone, no image or audio input'
        remedy = "leave the part out or describe it in words"
        raise UsageError(f"{field}.type", _shown(part.get("type")), expected, remedy)
    return _text(_object(value, field, {"type", "text"}).get("text"), f"{field}.text")


def _object(value: Any, field: str, known: set[str] | None = None) -> Mapping[str, Any]:
    """`value`, an object; fields outside `known` must be empty, as clients' models leave them."""
    if not isinstance(value, Mapping):
        raise UsageError(field, _shown(value), "an object", "give one")
    if known is None:
        return value
    for key, item in value.items():
        if key not in known and item not in (None, [], ()):
            expected = f"only {', '.join(sorted(known))}"
            named = ascii(key).strip("'")[:60]
            raise UsageError(f"{field}.{named}", _shown(item), expected, _LEAVE_OUT)
    return value


def _list(value: Any, field: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise UsageError(field, _shown(value), "a list", "give one")
    return list(value)


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise UsageError(field, _shown(value), "a string", "give one")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        found = f"half of a surrogate pair at {error.start}"
        raise UsageError(field, found, "whole characters", "mend or remove it") from None
    return value


def _optional_text(value: Any, field: str) -> str:
    return "" if value is None else _text(value, field)


def _optional_list(value: Any, field: str) -> list[Any]:
    return [] if value is None else _list(value, field)


def _name(value: Any, field: str) -> str:
    if not value or not isinstance(value, str):
        raise UsageError(field, _shown(value), "a string that is not empty", "give one")
    return _text(value, field)


def _json(value: Any, field: str, order: Literal["sorted"] | None = "sorted") -> str:
    """Compact JSON, all keys sorted unless `order` is None."""
    try:
        return msgspec.json.encode(value, order=order).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(field, str(error), "what JSON can hold", "mend it") from None


def _shown(value: Any) -> str:
    return "nothing" if value is None else show(value)
