"""Chat lines of a batch job through the model's own grammar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from support.batch_rig import line, read_lines, stub, write_lines
from support.chat_tokenizer import chat_of, chat_tokenizer

from inkling_engine.runtime.batch import BatchRunner

CHAT = "/v1/chat/completions"
USER: dict[str, Any] = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}


def test_chat_lines(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    chat = chat_of(tokenizer)
    engine, seen = stub(tokenizer)
    shape = msgspec.structs.replace(seen.spec.shape, real_vocab=8192, vocab=8192)
    seen.spec = msgspec.structs.replace(seen.spec, shape=shape, max_context=512)
    asked: list[dict[str, Any]] = [
        {"messages": [USER]},
        {"messages": [USER], "tools": [TOOL], "tool_choice": "auto", "reasoning_effort": "low"},
        {"messages": [IMAGE]},
        {"messages": [USER | {"role": "narrator"}]},
        {"messages": [USER], "tools": [TOOL], "tool_choice": "required"},
    ]
    lines = [line(f"{at}", CHAT, **body, return_token_ids=True) for at, body in enumerate(asked)]
    BatchRunner(engine, chat).run(write_lines(tmp_path / "in", lines), tmp_path / "out")
    answers = read_lines(tmp_path / "out")
    for at in (0, 1):
        assert list(seen.submitted[at].prompt) == chat.render(asked[at])
        assert seen.submitted[at].params.stop_token_ids == chat.stop_token_ids
        choice = answers[at]["response"]["body"]["choices"][0]
        assert choice["message"] == chat.parse(choice["token_ids"])
    messages = [one["error"]["message"] for one in answers[2:]]
    assert "image_url" in messages[0]
    assert "'narrator'" in messages[1]
    assert "'required'" in messages[2]
