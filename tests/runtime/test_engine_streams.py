"""Streams, text, stop strings, and the awaited forms, over the fake step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import zip_longest

import pytest
from support.fake_spec import EOS, build_spec, tiny_tokenizer
from support.fake_step import open_engine

from inkling_engine.runtime.errors import UsageError
from inkling_engine.runtime.requests import Choice, Delta, Prompt
from inkling_engine.runtime.sampling import SamplingParams
from inkling_engine.runtime.tokens import UNFINISHED, Tokenizer

SPEC = build_spec()
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
PROMPT = [40, 41, 42]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def _assert_adds_up(deltas: Iterable[Delta], choice: Choice) -> None:
    mine = [delta for delta in deltas if delta.index == choice.index]
    assert tuple(token for delta in mine for token in delta.token_ids) == choice.token_ids
    assert "".join(delta.text for delta in mine) == choice.text
    assert [delta.finish_reason for delta in mine[:-1]] == [None] * (len(mine) - 1)
    assert (mine[-1].finish_reason, mine[-1].stop_reason) == (
        choice.finish_reason,
        choice.stop_reason,
    )
    logprobs = tuple(item for delta in mine for item in delta.logprobs or ())
    assert logprobs == (choice.logprobs or ())


def test_a_stream_adds_up_to_the_completion(tokenizer: Tokenizer) -> None:
    with open_engine(SPEC, tokenizer) as engine:
        (done,) = engine.generate(PROMPT, GREEDY)
        deltas = list(engine.stream(PROMPT, GREEDY))
        assert len(deltas) == 24
        _assert_adds_up(deltas, done.choices[0])
        several = SamplingParams(n=3, seed=1, max_tokens=9)
        expected = engine.generate(PROMPT, several)[0]
        streamed = list(engine.stream(PROMPT, several))
        for choice in expected.choices:
            _assert_adds_up(streamed, choice)


def test_two_streams_interleave(tokenizer: Tokenizer) -> None:
    with open_engine(SPEC, tokenizer) as engine:
        done = engine.generate([[50], [60]], GREEDY)
        streams = [engine.stream([n], GREEDY) for n in (50, 60)]
        pairs = list(zip_longest(*streams))
        for completion, column in zip(done, zip(*pairs, strict=True), strict=True):
            _assert_adds_up(filter(None, column), completion.choices[0])


def test_leaving_a_stream_aborts() -> None:
    with open_engine(SPEC) as engine:
        for _ in engine.stream(PROMPT, GREEDY):
            break
        assert not engine.scheduler.unfinished()


def test_stop_strings(tokenizer: Tokenizer) -> None:
    with open_engine(SPEC, tokenizer) as engine:
        whole = engine.generate(PROMPT, GREEDY)[0].choices[0]
        for at in range(2, len(whole.text) - 4, 3):
            stop = whole.text[at : at + 3]
            if UNFINISHED in stop:
                continue
            params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=[stop])
            choice = engine.generate(PROMPT, params)[0].choices[0]
            cut = whole.text.index(stop)
            assert choice.text == whole.text[:cut]
            assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
            text = tokenizer.decode(choice.token_ids, skip_special_tokens=True)
            assert stop in text and stop not in tokenizer.decode(
                choice.token_ids[:-1], skip_special_tokens=True
            ), "tokens end with the one that completes the stop string"
            streamed = list(engine.stream(PROMPT, params))
            assert "".join(delta.text for delta in streamed) == choice.text


def test_included_stop_string_and_min_tokens(tokenizer: Tokenizer) -> None:
    with open_engine(SPEC, tokenizer) as engine:
        whole = engine.generate(PROMPT, GREEDY)[0].choices[0]
        stop = tokenizer.decode(whole.token_ids[:2], skip_special_tokens=True)[-1]
        kept = SamplingParams(
            temperature=0, ignore_eos=True, stop=stop, include_stop_str_in_output=True
        )
        assert engine.generate(PROMPT, kept)[0].choices[0].text.endswith(stop)
        later = SamplingParams(
            temperature=0, ignore_eos=True, stop=stop, min_tokens=10, max_tokens=12
        )
        assert len(engine.generate(PROMPT, later)[0].choices[0].token_ids) > 10


def test_stop_token_text(tokenizer: Tokenizer) -> None:
    """The stop token is among the ids; its text only if asked for."""
    with open_engine(SPEC, tokenizer) as engine:
        tokens = engine.generate(PROMPT, GREEDY)[0].choices[0].token_ids
        stop = tokens[5]
        ids = tokens[: tokens.index(stop) + 1]
        for included, shown in ((False, ids[:-1]), (True, ids)):
            params = SamplingParams(
                temperature=0,
                stop_token_ids=[stop],
                ignore_eos=True,
                include_stop_str_in_output=included,
            )
            choice = engine.generate(PROMPT, params)[0].choices[0]
            assert choice.token_ids == ids
            assert choice.text == tokenizer.decode(shown, skip_special_tokens=True)
            assert "".join(d.text for d in engine.stream(PROMPT, params)) == choice.text


def test_text_switches(tokenizer: Tokenizer) -> None:
    with open_engine(SPEC, tokenizer) as engine:
        silent = SamplingParams(temperature=0, detokenize=False)
        assert engine.generate(PROMPT, silent)[0].choices[0].text == ""
        biased = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        tokens = engine.generate(PROMPT, biased)[0].choices[0].token_ids
        assert EOS in tokens, "the prompt was chosen to meet the end token"
        shown = SamplingParams(
            temperature=0, max_tokens=40, ignore_eos=True, skip_special_tokens=False
        )
        assert "<|eos|>" in engine.generate(PROMPT, shown)[0].choices[0].text
        assert "<|eos|>" not in engine.generate(PROMPT, biased)[0].choices[0].text


def test_text_prompts(tokenizer: Tokenizer) -> None:
    with open_engine(SPEC, tokenizer) as engine:
        params = SamplingParams(temperature=0, max_tokens=3)
        ids = tokenizer.encode("F9")
        assert all(token < SPEC.shape.real_vocab for token in ids)
        forms: list[Prompt] = ["F9", {"prompt": "F9"}]
        by_text, by_object = engine.generate(forms, params)
        assert by_text.choices == by_object.choices == engine.generate(ids, params)[0].choices
        with pytest.raises(UsageError, match="prompt"):
            engine.generate("", params)


def test_stop_strings_need_a_tokenizer() -> None:
    with open_engine(SPEC) as engine, pytest.raises(UsageError, match="stop"):
        engine.generate([5], SamplingParams(stop="x"))


def test_awaited_forms_run_together(tokenizer: Tokenizer) -> None:
    with open_engine(SPEC, tokenizer) as engine:
        prompts = [[40 + i, 41] for i in range(6)]
        expected = [engine.generate(prompt, GREEDY)[0].choices for prompt in prompts]
        alone = engine.steps

        async def collect(prompt: list[int]) -> list[Delta]:
            return [delta async for delta in engine.astream(prompt, GREEDY)]

        async def run() -> tuple[list[tuple[Choice, ...]], list[list[Delta]]]:
            done = await asyncio.gather(*(engine.agenerate(p, GREEDY) for p in prompts))
            return [item.choices for item in done], await asyncio.gather(*map(collect, prompts))

        found, streams = asyncio.run(run())
        assert found == expected
        for deltas, choices in zip(streams, expected, strict=True):
            _assert_adds_up(deltas, choices[0])
        assert engine.steps - alone < alone, "concurrent calls share steps"


def test_cancelling_an_awaited_call_aborts() -> None:
    with open_engine(SPEC) as engine:

        async def run() -> None:
            task = asyncio.create_task(engine.agenerate(PROMPT, GREEDY))
            while not engine.steps:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(run())
        assert not engine.scheduler.unfinished()
        assert len(engine.generate(PROMPT, GREEDY)[0].choices[0].token_ids) == 24
