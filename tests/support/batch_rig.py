"""A batch job's other half for tests: an engine that answers at once, a chat, input files.

`StubEngine` checks requests as the engine does and ends them after a few steps, out of order, with
tokens that depend on prompt, seed and choice alone; so thousands of lines take a second. As a
program (`python -m support.batch_rig IN OUT [SECONDS A STEP]`) it runs a job that can be killed.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from support.fake_spec import build_manifest, build_spec, tiny_tokenizer

from inkling_engine.artifacts.errors import UsageError
from inkling_engine.runtime.batch import BatchRunner, stopped_by_signals
from inkling_engine.runtime.batch_progress import Meter
from inkling_engine.runtime.drafts import DraftStats
from inkling_engine.runtime.engine import Engine
from inkling_engine.runtime.requests import (
    Request,
    Status,
    TokenLogprob,
    open_request,
    read_prompt,
)
from inkling_engine.runtime.requests import Sequence as Choices
from inkling_engine.runtime.sampling import SamplingParams
from inkling_engine.runtime.tokens import Tokenizer

SPEC = build_spec(running=8)
POISON = 13  # a prompt that holds it has non-finite logits


class StubEngine:
    """Stands in for `Engine` where a batch runner uses it; `most` is the most it ever held."""

    def __init__(self, tokenizer: Tokenizer | None, seconds: float = 0.0) -> None:
        self.spec, self.manifest, self.tokenizer = SPEC, build_manifest(SPEC), tokenizer
        self._seconds = seconds
        self.live: list[tuple[Request, int]] = []
        self.submitted: deque[Request] = deque(maxlen=1000)  # the last ones
        self.most = self.steps = 0
        self.drafts = DraftStats.none(0)
        self.fails_at: int | None = None

    def submit(self, prompt: Any, params: SamplingParams) -> Request:
        """Queue a request."""
        ids = read_prompt(prompt, self.tokenizer)
        request = open_request(len(self.submitted), ids, params, self.spec, seed=0)
        self.submitted.append(request)
        digest = _digest(ids)
        self.live.append((request, self.steps + 1 + digest[0] % 7 + 90 * (digest[0] == 5)))
        self.most = max(self.most, sum(len(one.sequences) for one, _ in self.live))
        return request

    def step(self) -> list[Request]:
        """End whose time has come."""
        self.steps += 1
        if self.steps == self.fails_at:
            raise RuntimeError("the device is gone")
        time.sleep(self._seconds)
        ended = [request for request, at in self.live if at <= self.steps]
        self.live = [(request, at) for request, at in self.live if at > self.steps]
        for request in ended:
            for sequence in request.sequences:
                self._end(sequence)
        return ended

    def abort(self, request: Request) -> None:
        """End a request early."""
        self.live = [(one, at) for one, at in self.live if one is not request]
        for sequence in request.sequences:
            if sequence.status is not Status.FINISHED:
                sequence.finish("abort")

    def _end(self, sequence: Choices) -> None:
        if POISON in sequence.prompt:
            sequence.finish("error")
            return
        seed = 0 if sequence.params.is_greedy else sequence.seed
        digest = _digest([*sequence.prompt, seed, sequence.index])
        sequence.tokens = [30 + byte % 100 for byte in digest[: min(sequence.max_tokens, 32)]]
        if sequence.logprobs is not None:
            top = tuple((token, -float(token)) for token in range(sequence.params.logprobs or 0))
            sequence.logprobs += [TokenLogprob(token, -0.5, top) for token in sequence.tokens]
        if self.tokenizer:
            sequence.text = self.tokenizer.decode(sequence.tokens, skip_special_tokens=True)
        sequence.finish("length")


class StubChat:
    """A grammar of one character a token: `user` messages only, parsed into content."""

    stop_token_ids: tuple[int, ...] = (7,)

    def render(self, body: Mapping[str, Any]) -> list[int]:
        """All contents, one after the other."""
        ids: list[int] = []
        for at, message in enumerate(body["messages"]):
            if (role := message.get("role")) != "user":
                raise UsageError(f"messages[{at}].role", repr(role), "user", "change it")
            if not isinstance(message["content"], str):
                found = message["content"][0]["type"]
                raise UsageError(f"messages[{at}].content", found, "text parts", "drop it")
            ids += [30 + ord(character) % 100 for character in message["content"]]
        return ids

    def parse(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """A message of the ids' letters."""
        text = "".join(chr(97 + token % 26) for token in token_ids)
        return {"role": "assistant", "content": text, "reasoning_content": None}


class Stops:
    """A watch that stops a runner once as many lines are written."""

    def __init__(self, runner: BatchRunner, written: int) -> None:
        """Stop `runner` then."""
        self.runner, self.written = runner, written

    def __call__(self, meter: Meter) -> None:
        """Look."""
        if meter.written >= self.written:
            self.runner.stop()


def stub(tokenizer: Tokenizer | None = None, seconds: float = 0.0) -> tuple[Engine, StubEngine]:
    """The same stub twice: as what a runner takes, and as itself."""
    engine = StubEngine(tokenizer, seconds)
    return cast(Engine, engine), engine


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    """A good line; `body` on top of a short greedy completion."""
    prompt: dict[str, Any] = {"prompt": [30, 31]} if url == "/v1/completions" else {}
    body = {**prompt, "max_tokens": 3, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write_lines(path: Path, lines: Iterable[object]) -> Path:
    """Write JSON lines; bytes as they are."""
    encoded = (one if isinstance(one, bytes) else json.dumps(one).encode() for one in lines)
    path.write_bytes(b"".join(one + b"\n" for one in encoded))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """An output file's lines."""
    return [json.loads(one) for one in path.read_bytes().splitlines()]


def mixed(count: int) -> list[object]:
    """A job of all kinds of lines: greedy, sampled with and without a seed, broken, repeated."""
    lines: list[object] = []
    for at in range(count):
        prompt = [30 + at % 90, 31 + at // 90 % 90, 40 + at // 8100]
        kinds: tuple[object, ...] = (
            line(f"greedy-{at}", prompt=prompt, max_tokens=1 + at % 9),
            line(f"sampled-{at}", prompt=prompt, temperature=1.0, n=1 + at % 3),
            line(f"seeded-{at}", prompt=prompt, temperature=1.0, seed=at, logprobs=2),
            b"{broken",
            line("again", prompt=prompt),
            line(f"poison-{at}", prompt=[*prompt, POISON]),
            line(f"long-{at}", prompt=[30] * 70),
        )
        lines.append(kinds[min(at % 20, 19) if at % 20 < 7 else at % 3])
    return lines


def _digest(ids: Sequence[int]) -> bytes:
    return hashlib.sha256(repr(list(ids)).encode()).digest()


def main() -> None:
    """Run a job as a process of its own; prints once it is under way."""
    runner = BatchRunner(stub(tiny_tokenizer(), float(sys.argv[3]) if sys.argv[3:] else 0.0)[0])
    with stopped_by_signals(runner):
        print("running", flush=True)
        runner.run(sys.argv[1], sys.argv[2])


if __name__ == "__main__":
    main()
