"""Lines of a batch job one by one: what is refused and how, what becomes of what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.batch_rig import StubChat, line, read_lines, stub, write_lines
from support.fake_spec import tiny_tokenizer

from inkling_engine.artifacts.errors import UsageError
from inkling_engine.runtime import batch_input
from inkling_engine.runtime.batch import BatchRunner
from inkling_engine.runtime.batch_input import Input, SeenIds, Shard, parse_shard
from inkling_engine.runtime.requests import Request
from inkling_engine.runtime.sampling import SamplingParams

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]


def without(name: str, value: Any = None) -> dict[str, Any]:
    """A good line without field `name`, or with another value of it."""
    whole = line("x")
    del whole[name]
    return whole if value is None else whole | {name: value}


def chat(**body: Any) -> dict[str, Any]:
    return line("x", CHAT, **{"messages": USER, **body})


# name: (line, code, words of the message)
BAD: dict[str, tuple[object, str, tuple[str, ...]]] = {
    "malformed": (b'{"custom_id": "a",}', "invalid_json", ("line", '"custom_id": "a",}', "JSON")),
    "not utf-8": (b'{"custom_id": "\xff"}', "invalid_json", ("line", "UTF-8")),
    "truncated": (b'{"custom_id": "a"', "invalid_json", ("line", "truncated")),
    "two values": (b"{} {}", "invalid_json", ("line", "{} {}", "trailing")),
    "NaN": (b'{"custom_id": NaN}', "invalid_json", ("line", "NaN")),
    "lone surrogate": (b'{"custom_id": "\\ud800"}', "invalid_json", ("line", "ud800")),
    "too deep": (b"[" * 4000, "invalid_json", ("line", "[[[", "recursion")),
    "endless number": (b"9" * 4999, "invalid_json", ("line", "9999")),
    "empty": (b"", "invalid_json", ("an empty line", "a JSON object")),
    "blank": (b" \t ", "invalid_json", ("an empty line",)),
    "a list": ([1, 2], "invalid_json", ("[1, 2]", "a JSON object")),
    "a text": ("text", "invalid_json", ("'text'", "a JSON object")),
    "too long": (b" " * 8193, "invalid_json", ("more than 8192 bytes",)),
    "no custom_id": (without("custom_id"), "invalid_custom_id", ("custom_id", "nothing")),
    "numeric custom_id": (without("custom_id", 7), "invalid_custom_id", ("custom_id", "found 7")),
    "empty custom_id": (line(""), "invalid_custom_id", ("custom_id", "''")),
    "repeated custom_id": (line("first"), "duplicate_custom_id", ("'first'", "line 1")),
    "extra field": (line("x") | {"b": 3}, "unknown_field", ("b: found 3", "custom_id, method")),
    "no method": (without("method"), "invalid_request", ("method: found nothing", "POST")),
    "GET": (without("method", "GET"), "invalid_request", ("method: found 'GET'", "POST")),
    "no url": (without("url"), "invalid_request", ("url: found nothing", "/v1/completions")),
    "embeddings": (line("x", "/v1/embeddings"), "invalid_request", ("url", "/v1/embeddings")),
    "no body": (without("body"), "invalid_request", ("body: found None", "an object")),
    "body is a list": (without("body", [1]), "invalid_request", ("body: found [1]",)),
    "no prompt": (line("x", prompt=None), "invalid_request", ("prompt: found nothing",)),
    "empty prompt": (line("x", prompt=""), "invalid_request", ("prompt: found no tokens",)),
    "prompt is a number": (line("x", prompt=3), "invalid_request", ("prompt: found int",)),
    "prompt is an object": (line("x", prompt={"a": 1}), "invalid_request", ("{'a': 1}",)),
    "two prompts": (line("x", prompt=["a", "b"]), "invalid_request", ("a list of 2 prompts",)),
    "prompts of ids": (line("x", prompt=[[1], [2]]), "invalid_request", ("a list of 2 prompts",)),
    "id beyond": (line("x", prompt=[30, 151]), "invalid_request", ("151", "from 0 to 150")),
    "negative id": (line("x", prompt=[-1]), "invalid_request", ("prompt token id", "-1")),
    "boolean id": (line("x", prompt=[30, True]), "invalid_request", ("token id", "True")),
    "prompt too long": (
        *(line("x", prompt=[30] * 70), "context_length_exceeded"),
        ("prompt + max_tokens", "70 + 3 = 73", "at most 64 (max_context)"),
    ),
    "unknown field": (line("x", temprature=1), "unknown_field", ("temprature: found 1",)),
    "model is a number": (line("x", model=4), "invalid_request", ("model: found 4", "a string")),
    "hot": (line("x", temperature=-1), "invalid_request", ("temperature: found -1",)),
    "temperature text": (line("x", temperature="hot"), "invalid_request", ("temperature", "'hot'")),
    "top_p": (line("x", top_p=1.5), "invalid_request", ("top_p: found 1.5", "at most 1")),
    "n": (line("x", n=0), "invalid_request", ("n: found 0", "from 1")),
    "max_tokens": (line("x", max_tokens=1.5), "invalid_request", ("max_tokens: found 1.5",)),
    "seed": (line("x", seed=-3), "invalid_request", ("seed: found -3",)),
    "huge seed": (line("x", seed=10**30), "invalid_request", ("seed", str(10**30))),
    "bias of a huge id": (
        *(line("x", logit_bias={"9" * 5000: 1}), "invalid_request"),
        ("logit_bias: found '999", " characters)"),
    ),
    "stop": (line("x", stop=[""]), "invalid_request", ("stop: found ['']",)),
    "stop ids": (line("x", stop_token_ids=["a"]), "invalid_request", ("stop_token_ids", "'a'")),
    "presence_penalty": (
        *(line("x", presence_penalty=3), "invalid_request"),
        ("presence_penalty: found 3", "to 2"),
    ),
    "bias": (line("x", logit_bias={"a": 1}), "invalid_request", ("logit_bias: found 'a': 1",)),
    "bias beyond": (line("x", logit_bias={"160": 1}), "invalid_request", ("logit_bias", "160")),
    "logprobs": (line("x", logprobs=4), "invalid_request", ("logprobs: found 4", "at most 3")),
    "logprobs flag": (line("x", logprobs=True), "invalid_request", ("logprobs: found True",)),
    "min_tokens": (line("x", min_tokens=9), "invalid_request", ("min_tokens: found 9",)),
    "token ids": (line("x", return_token_ids=1), "invalid_request", ("return_token_ids: found 1",)),
    "stream": (line("x", stream=True), "unsupported_field", ("stream: found True", "one whole")),
    "best_of": (line("x", best_of=3), "unsupported_field", ("best_of: found 3", "use n")),
    "suffix": (line("x", suffix="end"), "unsupported_field", ("suffix: found 'end'",)),
    "echo": (line("x", echo=True), "unsupported_field", ("echo: found True",)),
    "format": (
        *(line("x", response_format={"type": "json_object"}), "unsupported_field"),
        ("response_format", "json_object"),
    ),
    "tools": (line("x", tools=[{"type": "f"}]), "unsupported_field", ("tools", CHAT)),
    "messages": (line("x", messages=USER), "unsupported_field", ("messages", CHAT)),
    "vllm only": (line("x", prompt_logprobs=1), "unsupported_field", ("prompt_logprobs: found 1",)),
    "no messages": (chat(messages=None), "invalid_request", ("messages: found nothing",)),
    "empty messages": (chat(messages=[]), "invalid_request", ("messages: found []",)),
    "image": (chat(messages=IMAGE), "invalid_request", ("messages[0].content", "image_url")),
    "role": (chat(messages=[{"role": "x"}]), "invalid_request", ("messages[0].role", "'x'")),
    "bad message": (chat(messages=[3]), "processing_failed", ("prompt could not be read", "'int'")),
    "both lengths": (
        *(chat(max_completion_tokens=4), "invalid_request"),
        ("max_completion_tokens: found 4 beside max_tokens 3",),
    ),
    "length": (
        *(chat(max_completion_tokens=0, max_tokens=None), "invalid_request"),
        ("max_completion_tokens: found 0",),
    ),
    "top_logprobs alone": (chat(top_logprobs=2), "invalid_request", ("top_logprobs: found 2",)),
    "top_logprobs": (
        *(chat(logprobs=True, top_logprobs=9), "invalid_request"),
        ("top_logprobs: found 9", "at most 3"),
    ),
    "chat logprobs": (chat(logprobs=2), "invalid_request", ("logprobs: found 2", "true or false")),
    "chat prompt": (chat(prompt="a"), "unsupported_field", ("prompt: found 'a'",)),
    "audio": (chat(modalities=["audio"]), "unsupported_field", ("modalities", "audio")),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All bad lines between two good ones, in one job."""
    folder = tmp_path_factory.mktemp("bad")
    lines = [
        one | {"custom_id": name} if isinstance(one, dict) and one.get("custom_id") == "x" else one
        for name, (one, _, _) in BAD.items()
    ]
    source = write_lines(folder / "in", [line("first"), *lines, line("last")])
    runner = BatchRunner(stub(tiny_tokenizer())[0], StubChat())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_input, "MAX_LINE", 8192)
        summary = runner.run(source, folder / "out")
    assert summary["requests"]["failed"] == len(BAD) >= 40
    return read_lines(folder / "out")


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_answered_with_its_error(answers: list[dict[str, Any]], name: str) -> None:
    one, code, words = BAD[name]
    answer = answers[1 + list(BAD).index(name)]
    custom_id = one.get("custom_id") if isinstance(one, dict) else None
    expected = {"x": name, "first": "first"}.get(custom_id) if isinstance(custom_id, str) else None
    assert (answer["custom_id"], answer["response"]) == (expected, None)
    assert answer["error"]["code"] == code
    message = answer["error"]["message"]
    assert all(word in message for word in words), message
    assert "\n" not in message and len(message) < 400
    if param := answer["error"].get("param"):
        assert message.startswith(f"{param}: found ")


def test_good_lines_beside_bad_ones_are_answered(answers: list[dict[str, Any]]) -> None:
    assert len(answers) == len(BAD) + 2
    assert [answers[at]["response"]["status_code"] for at in (0, -1)] == [200, 200]
    assert len({one["id"] for one in answers}) == len(answers)


@pytest.mark.parametrize(
    "body",
    [
        b'"prompt":[1,%s1%s]',
        *(b'"prompt":[30],"stop":[%s1%s]', b'"prompt":[30],"logit_bias":{"1":%s1%s}'),
        *(b'"prompt":[30],"n":%s1%s', b'"prompt":[30],"echo":%s1%s'),
    ],
)
def test_values_too_deep_to_show_are_their_lines_errors(tmp_path: Path, body: bytes) -> None:
    head = b'{"custom_id":"%d","method":"POST","url":"/v1/completions","body":{' + body + b"}}"
    lines = [head % (at, b"[" * at, b"]" * at) for at in range(600, 1001)]
    source = write_lines(tmp_path / "in", [*lines, line("last")])
    BatchRunner(stub()[0]).run(source, tmp_path / "out")
    *refused, last = read_lines(tmp_path / "out")
    assert last["response"]
    codes = {one["error"]["code"] for one in refused}  # where decoding ends is Python's choice
    assert codes <= {"invalid_json", "invalid_request", "unsupported_field"}


def test_chat_lines_are_refused_without_a_chat(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", [chat(), line("y")])
    BatchRunner(stub()[0]).run(source, tmp_path / "out")
    refused, answered = read_lines(tmp_path / "out")
    assert "no chat tokens" in refused["error"]["message"] and answered["response"]


def test_text_is_refused_without_a_tokenizer(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", [line("x", prompt="text")])
    BatchRunner(stub()[0]).run(source, tmp_path / "out")
    assert "no tokenizer" in read_lines(tmp_path / "out")[0]["error"]["message"]


def submitted(tmp_path: Path, one: dict[str, Any]) -> Request:
    """What the engine was asked for by a line."""
    engine, seen = stub(tiny_tokenizer())
    BatchRunner(engine, StubChat()).run(write_lines(tmp_path / "in", [one]), tmp_path / "out")
    assert len(seen.submitted) == 1, read_lines(tmp_path / "out")
    return seen.submitted[0]


def test_every_sampling_field_reaches_the_engine(tmp_path: Path) -> None:
    fields = json.loads(
        """{"n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 5,
        "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5,
        "logit_bias": {"42": -5}, "max_tokens": 9, "min_tokens": 2, "stop": "abc",
        "stop_token_ids": [8], "ignore_eos": true, "include_stop_str_in_output": true,
        "logprobs": 2, "skip_special_tokens": false}"""
    )
    ignored: dict[str, Any] = {
        "user": "u",
        "metadata": {"a": "b"},
        "stream": False,
        "echo": False,
        "best_of": 1,
    }
    neutral: dict[str, Any] = {
        "response_format": {"type": "text"},
        "tools": [],
        "suffix": None,
        "model": "any",
    }
    request = submitted(tmp_path, line("x", **fields, **ignored, **neutral, prompt="a"))
    assert request.params == SamplingParams(**fields)
    assert list(request.prompt) == tiny_tokenizer().encode("a")


def test_chat_fields_reach_the_engine(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "max_tokens": None,
        "max_completion_tokens": 5,
        "logprobs": True,
        "top_logprobs": 2,
    }
    request = submitted(tmp_path, chat(**fields, stop_token_ids=[9], seed=4, temperature=1.0))
    wanted = SamplingParams(
        max_tokens=5, logprobs=2, seed=4, stop_token_ids=[9, 7], detokenize=False
    )
    assert request.params == wanted
    assert list(request.prompt) == StubChat().render({"messages": USER})


def test_a_chat_without_a_length_may_fill_the_context(tmp_path: Path) -> None:
    assert submitted(tmp_path, chat(max_tokens=None)).sequences[0].total == 64


def test_a_chat_with_stop_strings_makes_text(tmp_path: Path) -> None:
    assert submitted(tmp_path, chat(stop=["x"])).params.detokenize


def test_seeds_come_from_job_and_custom_id(tmp_path: Path) -> None:
    def seeds(name: str, *lines: object) -> list[int | None]:
        engine, seen = stub()
        source = write_lines(tmp_path / name, lines)
        BatchRunner(engine).run(source, tmp_path / f"{name}.out")
        return [request.params.seed for request in seen.submitted]

    first, second, given_one = seeds("a", line("x"), line("y"), line("z", seed=5))
    assert first != second and given_one == 5
    assert seeds("b", line("x"), line("y"), line("z", seed=5)) == [first, second, 5]
    assert seeds("c", line("x"))[0] != first


@given(st.lists(st.binary(max_size=30), max_size=8), st.booleans(), st.booleans())
def test_pieces_between_newlines_are_lines(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], mark: bool, last: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "in"
    data = b"\n".join(pieces) + b"\n" * last
    path.write_bytes(b"\xef\xbb\xbf" * mark + data)
    with path.open("rb") as stream:
        raw = stream.read()
    expected = raw.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if raw.endswith(b"\n") or not raw:
        expected.pop()
    lines = Input(path, lambda: None)
    assert lines.total == len(expected) and lines.size == len(raw)
    found = [one.data.removesuffix(b"\n") for one in lines.lines() if one.data is not None]
    assert found == expected
    lines.close()


@given(st.integers(0, 1000), st.integers(1, 30))
def test_shards_are_runs_that_add_up(total: int, count: int) -> None:
    spans = [Shard(index, count).span(total) for index in range(count)]
    assert [at for span in spans for at in span] == list(range(total))
    assert max(map(len, spans)) - min(map(len, spans)) <= 1


@pytest.mark.parametrize("text", ["", "1", "4/4", "-1/4", "a/b", "1/0", "0/0", "1/2/3", "¹/²"])
def test_bad_shards(text: str) -> None:
    with pytest.raises(UsageError, match="i from 0 to n-1"):
        parse_shard(text)
    assert parse_shard("3/4") == Shard(3, 4)


@given(st.lists(st.text(max_size=3), max_size=40))
def test_seen_ids_name_the_first_line(names: list[str]) -> None:
    seen, first = SeenIds(), dict[str, int]()
    for at, name in enumerate(names):
        assert seen.add(name, at) == first.get(name)
        first.setdefault(name, at)


def test_many_seen_ids() -> None:
    seen = SeenIds()
    assert not any(seen.add(f"id-{at}", at) for at in range(5000))
    assert all(seen.add(f"id-{at}", 9999) == at for at in range(5000))


def test_a_changed_input_is_noticed(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", [line("x"), line("y")])
    lines = Input(source, lambda: None)
    lines.require_unchanged()
    source.write_text(json.dumps(line("z")))
    with pytest.raises(UsageError, match="changed"):
        lines.require_unchanged()
    lines.close()


def test_inputs_that_are_no_files(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError, match="a file of JSON lines"):
            Input(path, lambda: None)
