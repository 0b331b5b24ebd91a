"""What a batch job writes for an answered line, and what it tells about itself."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.batch_rig import POISON, SPEC, StubChat, line, read_lines, stub, write_lines
from support.fake_spec import tiny_tokenizer
from support.fake_step import open_engine

from inkling_engine.runtime.batch import BatchRunner
from inkling_engine.runtime.batch_progress import Meter, render, shown
from inkling_engine.runtime.tokens import Tokenizer

CHAT = "/v1/chat/completions"
ENGINE_ID = "fake-tp1-native-fp32-00000000"
USER = [{"role": "user", "content": "hi"}]


def answer(
    folder: Path,
    one: dict[str, Any],
    tokenizer: Tokenizer | None = None,
    chat: StubChat | None = None,
) -> dict[str, Any]:
    """The output line of a job of one line."""
    runner = BatchRunner(stub(tokenizer)[0], chat or StubChat())
    runner.run(write_lines(folder / "in", [one]), folder / "out")
    return read_lines(folder / "out")[0]


def test_a_completion_has_openais_form(tmp_path: Path) -> None:
    one = answer(tmp_path, line("mine", n=2), tiny_tokenizer())
    assert list(one) == ["id", "custom_id", "response", "error"]
    key = one["id"].removeprefix("batch_req_")
    assert re.fullmatch("[0-9a-f]{24}", key)
    assert (one["custom_id"], one["error"]) == ("mine", None)
    assert one["response"] | {"body": None} == {
        "status_code": 200,
        "request_id": f"req_{key}",
        "body": None,
    }
    body = one["response"]["body"]
    choices = body.pop("choices")
    assert body == {
        "id": f"cmpl-{key}",
        "object": "text_completion",
        "created": 0,
        "model": ENGINE_ID,
        "usage": {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8},
    }
    assert [choice.pop("index") for choice in choices] == [0, 1]
    assert all(isinstance(choice.pop("text"), str) for choice in choices)
    assert choices == [{"logprobs": None, "finish_reason": "length", "stop_reason": None}] * 2


def test_token_ids_come_when_asked_for_or_when_there_is_no_text(tmp_path: Path) -> None:
    for name, tokenizer, asked, there in (
        ("a", tiny_tokenizer(), None, False),
        ("b", tiny_tokenizer(), True, True),
        ("c", None, None, True),
        ("d", None, False, False),
    ):
        (tmp_path / name).mkdir()
        one = answer(tmp_path / name, line("x", return_token_ids=asked), tokenizer)
        choice = one["response"]["body"]["choices"][0]
        assert len(choice.get("token_ids", ())) == 3 * there


def test_logprobs_of_a_completion(tmp_path: Path) -> None:
    one = answer(tmp_path, line("x", logprobs=2, return_token_ids=True), tiny_tokenizer())
    choice = one["response"]["body"]["choices"][0]
    logprobs, names = choice["logprobs"], []
    for token in choice["token_ids"]:
        text = tiny_tokenizer().decode([token], skip_special_tokens=False)
        names.append(f"token_id:{token}" if "\ufffd" in text else text)
    assert logprobs["tokens"] == names
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert [list(top.values()) for top in logprobs["top_logprobs"]] == [[0.0, -1.0]] * 3
    assert logprobs["text_offset"] == [0, len(names[0]), len(names[0]) + len(names[1])]


def test_a_chat_answer_has_openais_form(tmp_path: Path) -> None:
    asked = line("x", CHAT, messages=USER, logprobs=True, top_logprobs=1, return_token_ids=True)
    body = answer(tmp_path, asked)["response"]["body"]
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    choice = body["choices"][0]
    assert choice["message"] == StubChat().parse(choice["token_ids"])
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{t}" for t in choice["token_ids"]]
    assert entries[0]["bytes"] == list(entries[0]["token"].encode())
    assert [len(entry["top_logprobs"]) for entry in entries] == [1, 1, 1]


class Calls(StubChat):
    """A chat whose every answer calls a tool, ended by the chat's own token."""

    def parse(self, token_ids: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": None, "tool_calls": [{"id": "call_0"}]}


class Fails(StubChat):
    """A chat that cannot read what was generated."""

    def parse(self, token_ids: Any) -> dict[str, Any]:
        raise KeyError("no\nsuch block")


def test_ends_of_chats(tmp_path: Path) -> None:
    asked = line("x", CHAT, messages=USER, max_tokens=8, return_token_ids=True)

    def choice(name: str, chat: StubChat, stop: int) -> Any:
        chat.stop_token_ids = (stop,)
        with open_engine(SPEC) as engine:
            source = write_lines(tmp_path / f"{name}.in", [asked])
            BatchRunner(engine, chat).run(source, tmp_path / f"{name}.out")
        return read_lines(tmp_path / f"{name}.out")[0]["response"]["body"]["choices"][0]

    whole = choice("whole", Calls(), 7)
    assert (whole["finish_reason"], len(whole["token_ids"])) == ("length", 8)
    for name, chat, reason in (("tools", Calls(), "tool_calls"), ("text", StubChat(), "stop")):
        found = choice(name, chat, whole["token_ids"][3])
        assert (found["finish_reason"], found["stop_reason"]) == (reason, None)
        assert found["token_ids"] == whole["token_ids"][:4]


class Plain(StubChat):
    """A chat whose message is the text of its tokens."""

    def parse(self, token_ids: Any) -> dict[str, Any]:
        text = tiny_tokenizer().decode(token_ids, skip_special_tokens=True)
        return {"role": "assistant", "content": text}


def test_stop_strings_end_messages(tmp_path: Path) -> None:
    def content(name: str, **body: Any) -> tuple[str, str, Any]:
        asked = line("x", CHAT, messages=USER, max_tokens=30, **body)
        with open_engine(SPEC, tiny_tokenizer()) as engine:
            source = write_lines(tmp_path / f"{name}.in", [asked])
            BatchRunner(engine, Plain()).run(source, tmp_path / f"{name}.out")
        choice = read_lines(tmp_path / f"{name}.out")[0]["response"]["body"]["choices"][0]
        return choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]

    whole = content("whole")[0]
    stop = whole[9:11]
    kept = whole[: whole.index(stop)]
    assert content("cut", stop=stop) == (kept, "stop", stop)
    with_stop = content("kept", stop=stop, include_stop_str_in_output=True)
    assert with_stop[0].startswith(kept + stop)


def test_what_has_no_answer(tmp_path: Path) -> None:
    one = answer(tmp_path, line("x", prompt=[30, POISON]))
    assert one["error"]["code"] == "non_finite_logits" and "choice 0" in one["error"]["message"]
    (tmp_path / "chat").mkdir()
    one = answer(tmp_path / "chat", line("x", CHAT, messages=USER), chat=Fails())
    assert one["error"]["code"] == "processing_failed"
    assert r"could not be read: KeyError: 'no\nsuch block'" in one["error"]["message"]


def test_a_meter_counts_this_run_apart_from_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    meter = Meter(10)
    assert meter.text() == "0/10 requests, 0 in, 0 out tokens/s, ETA ?"
    meter.count(None, {"prompt_tokens": 1000, "completion_tokens": 500})
    meter.count("invalid_json", {})
    meter.start()
    now[0] += 4
    meter.count(None, {"prompt_tokens": 8000, "completion_tokens": 40})
    assert meter.text() == "3/10 requests, 1 failed, 2,000 in, 10 out tokens/s, ETA 0:00:28"
    meter.cached_tokens = 7000
    assert "out tokens/s, 7,000 from the cache, ETA" in meter.text()
    meter.latencies.extend([0.5, 1.5, 2.5])
    summary = meter.summary()
    assert summary["requests"] == {"total": 10, "succeeded": 2, "failed": 1, "resumed": 2}
    assert summary["tokens"] == {"prompt": 9000, "completion": 540, "cached": 7000}
    assert summary["latency_seconds"] == {"p50": 1.5, "p90": 2.5, "p99": 2.5, "p100": 2.5}
    text = render(summary)
    assert "requests: 10, 2 succeeded, 1 failed (invalid_json 1), 2 from before" in text
    assert "2000.0 prompt tokens/s" in text and "p50 1.500 s" in text
    assert "latency" not in render(Meter(0).summary())


def test_progress_is_lines_or_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    meter = Meter(2)
    with shown() as watch:
        for now[0] in (1.0, 10.0, 11.0, 19.9, 20.0):
            watch(meter)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(one.startswith("batch: 0/2 requests") for one in lines)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with shown() as watch:
        now[0] += 1
        watch(meter)
    assert "0/2 requests" in capsys.readouterr().err


def test_lines_are_plain_json(tmp_path: Path) -> None:
    answer(tmp_path, line("\u2028\u00e9"), tiny_tokenizer())
    data = (tmp_path / "out").read_bytes()
    assert data.endswith(b"}\n") and data.count(b"\n") == 1
    assert json.loads(data)["custom_id"] == "\u2028\u00e9"
