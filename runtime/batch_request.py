"""One input line of a batch job, checked field by field: line -> `Envelope` -> `Work`.

Whatever is wrong is one `LineError` that names the field, the value found and what to do. Fields
that this engine cannot honour are refused from the closed list `REFUSED`, each with its reason and
with the values that ask for nothing; a null is always a field left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from inkling_engine.artifacts.errors import FailedError, UsageError, UserError, clip, show
from inkling_engine.runtime import batch_input, sampling
from inkling_engine.runtime.batch_input import Line, SeenIds
from inkling_engine.runtime.chat import FIELDS as CHAT_FIELDS
from inkling_engine.runtime.requests import Encoder, read_prompt
from inkling_engine.runtime.sampling import SamplingParams

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
_LINE_FIELDS: Final = ("custom_id", "method", "url", "body")
_CODES: Final = {"prompt + max_tokens": "context_length_exceeded"}

_ANSWER = "a batch line has one whole answer; leave it out"
_CHECK = "ask for it in the prompt and check the text"
_TOOLS = "use `tools` of /v1/chat/completions"
_TEXT = "this engine makes text only; leave it out"
REFUSED: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "audio": ((), _TEXT),
    "best_of": ((1,), "use n and compare logprobs"),
    "chat_template": ((), "use /v1/completions with the text that it would make"),
    "echo": ((False,), "put the prompt before the text yourself"),
    "function_call": (("none",), _TOOLS),
    "functions": (([],), _TOOLS),
    "guided_choice": ((), _CHECK),
    "guided_grammar": ((), _CHECK),
    "guided_json": ((), _CHECK),
    "guided_regex": ((), _CHECK),
    "max_completion_tokens": ((), "use max_tokens"),
    "messages": ((), "use /v1/chat/completions"),
    "modalities": ((["text"],), _TEXT),
    "prediction": ((), "leave it out"),
    "prompt": ((), "use /v1/completions"),
    "prompt_embeds": ((), "give text or token ids"),
    "reasoning_effort": ((), "use /v1/chat/completions"),
    "response_format": (({"type": "text"},), _CHECK),
    "stream": ((False,), _ANSWER),
    "stream_options": ((), _ANSWER),
    "tool_choice": (("none",), _TOOLS),
    "tools": (([],), _TOOLS),
    "top_logprobs": ((), "use logprobs with a number"),
    "verbosity": ((), "ask for it in the prompt"),
    "web_search_options": ((), _TEXT),
}
_IGNORED: Final = {  # they say who asks and how to bill it, nothing about the answer
    *("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user")
}
_SAMPLING: Final = {
    *("frequency_penalty", "ignore_eos", "include_stop_str_in_output", "logit_bias", "logprobs"),
    *("max_drafts", "max_tokens", "min_p", "min_tokens", "n", "presence_penalty"),
    *("repetition_penalty", "seed", "skip_special_tokens", "stop", "stop_token_ids"),
    *("temperature", "top_k", "top_p"),
}
_OWN: Final = {"model", "return_token_ids"}
_FIELDS: Final = {
    COMPLETIONS: _SAMPLING | _OWN | {"prompt"},
    CHAT: _SAMPLING | _OWN | CHAT_FIELDS | {"max_completion_tokens", "top_logprobs"},
}


class Chat(Protocol):
    """The model's message grammar: messages to token ids, token ids to a message."""

    stop_token_ids: tuple[int, ...]

    def render(self, body: Mapping[str, Any]) -> list[int]:
        """The prompt of a chat request; UserError for what cannot be honoured."""

    def parse(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """The OpenAI `message` that generated tokens say."""


class LineError(Exception):
    """Why a line has no answer: `code` for programs, `message` for people, the field `param`."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        """Keep the three, the message in one line."""
        self.code, self.message, self.param = code, " ".join(message.split()), param
        super().__init__(self.message)

    @classmethod
    def of(cls, error: UserError, names: Mapping[str, str] | None = None) -> LineError:
        """A user's mistake as a line's error; what was found is cut to a readable length."""
        code = _CODES.get(error.field, "invalid_request")
        name = (names or {}).get(error.field, error.field)
        found = f"found {clip(error.found)}; expected {error.expected}; {error.remedy}"
        return cls(code, f"{name}: {found}", name)


@dataclass(frozen=True, slots=True)
class Envelope:
    """A line as far as it could be read: its `key` names it within all jobs, `fields` are its
    own, and `error` is what is wrong with it so far."""

    index: int
    key: str
    custom_id: str | None
    fields: Mapping[str, Any]
    error: LineError | None


@dataclass(frozen=True, slots=True)
class Work:
    """A request ready to submit: `chat` says which kind of body answers it, `token_ids` whether
    that holds them, `names` how the line calls fields that the engine calls otherwise."""

    prompt: Sequence[int]
    params: SamplingParams
    chat: bool
    token_ids: bool
    names: Mapping[str, str]


def read_line(line: Line, job: str, seen: SeenIds) -> Envelope:
    """Read a line's own fields. Its key is of `job` and its custom_id, of `job` and its number if
    it has none of its own."""
    fields: Mapping[str, Any] = {}
    custom_id, name, error = None, f"line {line.index}", None
    try:
        fields = _decode(line)
        custom_id = _custom_id(fields)
        if (first := seen.add(custom_id, line.index)) is not None:
            text = f"found {show(custom_id)} again; expected one not used in line {first + 1}"
            raise LineError("duplicate_custom_id", f"custom_id: {text}; change it", "custom_id")
        name = f"id {custom_id}"
    except LineError as caught:
        error = caught.with_traceback(None)  # which would hold the line and all its fields
    return Envelope(line.index, derive(job, name).hex()[:24], custom_id, fields, error)


def derive(job: str, name: str) -> bytes:
    """32 bytes that depend on the job and on a name within it, on nothing else."""
    return hashlib.sha256(f"{job}\n{name}".encode()).digest()


def read_request(envelope: Envelope, job: str, encoder: Encoder | None, chat: Chat | None) -> Work:
    """What a line that has no error so far asks for; LineError if it cannot be had."""
    try:
        return _read(envelope, job, encoder, chat)
    except FailedError:
        raise
    except UserError as error:
        raise LineError.of(error) from None
    except (LineError, AssertionError):
        raise
    except Exception as error:  # a library's surprise is this line's alone
        raise surprise("the prompt could not be read", error) from error


def surprise(what: str, error: Exception) -> LineError:
    """The error of a line that somebody else's code could not take."""
    return LineError("processing_failed", f"{what}: {type(error).__name__}: {clip(error)}")


def _read(envelope: Envelope, job: str, encoder: Encoder | None, chat: Chat | None) -> Work:
    fields = envelope.fields
    if extra := fields.keys() - set(_LINE_FIELDS):
        raise _unknown(min(extra), fields[min(extra)], "custom_id, method, url and body")
    _require("method", fields.get("method"), ("POST",))
    url = _require("url", fields.get("url"), (COMPLETIONS, CHAT))
    if not isinstance(body := fields.get("body"), dict):
        raise UsageError("body", show(body), "an object of request fields", "give one")
    body = {name: value for name, value in body.items() if value is not None}
    _check_names(body, url)
    if not isinstance(body.get("model", ""), str):
        raise UsageError("model", show(body["model"]), "a string", "correct it or leave it out")
    values = {name: body[name] for name in _SAMPLING & body.keys()}
    values.setdefault("seed", int.from_bytes(derive(job, f"seed {envelope.custom_id}")[:8]))
    if url == CHAT:
        return _read_chat(body, values, chat)
    if "prompt" not in body:
        raise UsageError("prompt", "nothing", "text or a list of token ids", "give one")
    token_ids = _token_ids_wanted(body, encoder is None)
    params = SamplingParams(**values)
    prompt = body["prompt"]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        found = f"a list of {len(prompt)} prompts"
        raise UsageError("prompt", found, "text or a list of token ids", "one line for each prompt")
    if isinstance(prompt, dict):
        raise UsageError("prompt", show(prompt), "text or a list of token ids", "give one of them")
    return Work(read_prompt(prompt, encoder), params, False, token_ids, {})


def _read_chat(body: dict[str, Any], values: dict[str, Any], chat: Chat | None) -> Work:
    if not isinstance(messages := body.get("messages"), list) or not messages:
        found = show(messages) if "messages" in body else "nothing"
        raise UsageError("messages", found, "a non-empty list of messages", "give one")
    if chat is None:
        remedy = f"make the prompt yourself and use {COMPLETIONS}"
        raise UsageError("url", CHAT, "no chat: this engine has no chat tokens", remedy)
    names = _chat_lengths(body, values)
    _chat_logprobs(body, values)
    asked = values.get("stop_token_ids", [])
    if isinstance(asked, list):
        values["stop_token_ids"] = [*asked, *chat.stop_token_ids]
    values["detokenize"] = "stop" in values  # the message is read from ids
    try:
        params = SamplingParams(**values)
    except UsageError as error:
        raise LineError.of(error, names) from None
    return Work(chat.render(body), params, True, _token_ids_wanted(body, False), names)


def _chat_lengths(body: dict[str, Any], values: dict[str, Any]) -> dict[str, str]:
    """Set max_tokens of a chat; the names under which the line gave what may be at fault."""
    newer, older = body.get("max_completion_tokens"), body.get("max_tokens")
    if newer is not None and older is not None and newer != older:
        found = f"{show(newer)} beside max_tokens {show(older)}"
        raise UsageError("max_completion_tokens", found, "one of the two", "drop max_tokens")
    values["max_tokens"] = older if newer is None else newer  # none: all that the context leaves
    names = {"logprobs": "top_logprobs"}
    return names if newer is None else names | {"max_tokens": "max_completion_tokens"}


def _chat_logprobs(body: dict[str, Any], values: dict[str, Any]) -> None:
    wanted = values.pop("logprobs", False)
    if not isinstance(wanted, bool):
        raise UsageError("logprobs", show(wanted), "true or false", "use top_logprobs for a count")
    if "top_logprobs" in body and not wanted:
        found = f"{show(body['top_logprobs'])} without logprobs"
        raise UsageError("top_logprobs", found, "`logprobs: true` beside it", "set it")
    if wanted:
        values["logprobs"] = body.get("top_logprobs", 0)


def _token_ids_wanted(body: Mapping[str, Any], default: bool) -> bool:
    wanted = body.get("return_token_ids", default)
    if not isinstance(wanted, bool):
        raise UsageError("return_token_ids", show(wanted), "true or false", "correct it")
    return wanted


def _check_names(body: dict[str, Any], url: str) -> None:
    """Drop what asks for nothing; LineError for what is refused or unknown."""
    for name, value in list(body.items()):
        if name in _FIELDS[url]:
            continue
        neutral, remedy = REFUSED.get(name, ((), sampling.REFUSED.get(name, "")))
        if name in _IGNORED or any(type(value) is type(v) and value == v for v in neutral):
            del body[name]
        elif remedy:
            error = UsageError(name, show(value), f"no such field at {url}", remedy)
            raise LineError("unsupported_field", str(error), name)
        else:
            raise _unknown(name, value, f"a field of {url}")


def _unknown(name: str, value: Any, expected: str) -> LineError:
    error = UsageError(clip(name), show(value), expected, "correct the name or leave it out")
    return LineError("unknown_field", str(error), name)


def _require(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        found = "nothing" if value is None else show(value)
        raise UsageError(name, found, " or ".join(allowed), f"set {name}")
    return value


def _decode(line: Line) -> dict[str, Any]:
    """The line as a JSON object; LineError `invalid_json`."""
    if line.data is None:
        found = f"line: found more than {batch_input.MAX_LINE} bytes; expected fewer"
        raise LineError("invalid_json", f"{found}; shorten or split it")
    text = line.data.strip()
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        shown = show(text.decode(errors="replace")) if text else "an empty line"
        reason = f" ({error})" if text else ""
        found = f"line: found {shown}{reason}; expected a JSON object"
        raise LineError("invalid_json", f"{found}; correct or remove the line") from None
    if not isinstance(value, dict):
        found = f"line: found {show(value)}; expected a JSON object"
        raise LineError("invalid_json", f"{found}; correct or remove the line")
    return value


def _custom_id(fields: Mapping[str, Any]) -> str:
    value = fields.get("custom_id")
    if isinstance(value, str) and value:
        return value
    found = show(value) if "custom_id" in fields else "nothing"
    error = UsageError("custom_id", found, "a non-empty string", "name the line")
    raise LineError("invalid_custom_id", str(error), "custom_id")
