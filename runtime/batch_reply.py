"""What a batch job writes: one JSON line in OpenAI's batch output format for each input line.

Nothing in it depends on the time, on chance or on what ran beside it, so a line that is made again
is the same line: ids derive from the job and the custom_id, `created` is 0. A line has a `response`
or an `error`, never both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from inkling_engine.runtime.batch_request import Chat, Envelope, LineError, Work, surprise
from inkling_engine.runtime.requests import Choice, Completion, TokenLogprob
from inkling_engine.runtime.tokens import UNFINISHED, Decoder

Json = dict[str, Any]
_LOGITS = "found non-finite logits; expected finite ones; check the weights or use --dtype fp32"
_NO_END = {
    "error": ("non_finite_logits", _LOGITS),
    "abort": ("cancelled", "found an abort; expected an end; send the line again"),
    "deadline": ("expired", "found its deadline passed; expected an end; send the line again"),
}


class Replies:
    """Makes the lines of one engine's answers."""

    def __init__(self, engine_id: str, decoder: Decoder | None, chat: Chat | None) -> None:
        """`engine_id` is the `model` of every body."""
        self._engine_id, self._decoder, self._chat = engine_id, decoder, chat

    def answer(self, envelope: Envelope, work: Work, done: Completion) -> tuple[bytes, Json]:
        """The line of an ended request, and its usage; LineError if a choice has no result."""
        for choice in done.choices:
            if choice.finish_reason in _NO_END:
                code, text = _NO_END[choice.finish_reason]
                raise LineError(code, f"choice {choice.index}: {text}")
        make = self._chat_choice if work.chat else self._text_choice
        usage = {
            "prompt_tokens": done.usage.prompt_tokens,
            "completion_tokens": done.usage.completion_tokens,
            "total_tokens": done.usage.total_tokens,
        }
        body = {
            "id": f"{'chatcmpl' if work.chat else 'cmpl'}-{envelope.key}",
            "object": "chat.completion" if work.chat else "text_completion",
            "created": 0,
            "model": self._engine_id,
            "choices": [make(choice, work) for choice in done.choices],
            "usage": usage,
        }
        request_id = f"req_{envelope.key}"
        response = {"status_code": 200, "request_id": request_id, "body": body}
        return _line(envelope, response, None), usage

    def _text_choice(self, choice: Choice, work: Work) -> Json:
        return {
            "index": choice.index,
            "text": choice.text,
            **_ids(choice, work),
            "logprobs": None if choice.logprobs is None else self._text_logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _chat_choice(self, choice: Choice, work: Work) -> Json:
        assert self._chat is not None, "a chat was rendered"
        stop = choice.stop_reason
        try:
            message = self._chat.parse(choice.token_ids)
        except Exception as error:  # a library's surprise is this line's alone
            raise surprise("the message could not be read", error) from error
        if isinstance(stop, str) and not work.params.include_stop_str_in_output:
            _cut(message, stop)
        called = choice.finish_reason == "stop" and message.get("tool_calls")
        return {
            "index": choice.index,
            "message": message,
            **_ids(choice, work),
            "logprobs": None
            if choice.logprobs is None
            else {"content": [self._chat_logprob(one) for one in choice.logprobs]},
            "finish_reason": "tool_calls" if called else choice.finish_reason,
            "stop_reason": None if stop in self._chat.stop_token_ids else stop,
        }

    def _text_logprobs(self, items: Sequence[TokenLogprob]) -> Json:
        tokens = [self._name(item.token_id) for item in items]
        offsets, at = [], 0
        for token in tokens:
            offsets.append(at)
            at += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [item.logprob for item in items],
            "top_logprobs": [{self._name(t): value for t, value in item.top} for item in items],
            "text_offset": offsets,
        }

    def _chat_logprob(self, item: TokenLogprob) -> Json:
        top = [self._entry(token, value) for token, value in item.top]
        return self._entry(item.token_id, item.logprob) | {"top_logprobs": top}

    def _entry(self, token: int, value: float) -> Json:
        name = self._name(token)
        return {"token": name, "logprob": value, "bytes": list(name.encode())}

    def _name(self, token: int) -> str:
        """A token's text, or `token_id:N` if it is no text of its own."""
        decoder = self._decoder
        text = decoder.decode([token], skip_special_tokens=False) if decoder else UNFINISHED
        return f"token_id:{token}" if UNFINISHED in text else text


def failure(envelope: Envelope, error: LineError) -> bytes:
    """The line of an input line that has no answer."""
    reason: Json = {"code": error.code, "message": error.message}
    if error.param:
        reason["param"] = error.param
    return _line(envelope, None, reason)


def line_id(envelope: Envelope) -> str:
    """The `id` of the line that answers `envelope`."""
    return f"batch_req_{envelope.key}"


def _line(envelope: Envelope, response: Json | None, error: Json | None) -> bytes:
    value = {
        "id": line_id(envelope),
        "custom_id": envelope.custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(value) + b"\n"


def _ids(choice: Choice, work: Work) -> Json:
    return {"token_ids": choice.token_ids} if work.token_ids else {}


def _cut(message: Json, stop: str) -> None:
    """End the message before its stop string, which its last tokens completed."""
    for name in ("content", "reasoning_content"):
        text = message.get(name)
        if isinstance(text, str) and (at := text.rfind(stop)) >= 0:
            message[name] = text[:at]
            return
