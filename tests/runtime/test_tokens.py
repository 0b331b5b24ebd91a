"""Text that grows by tokens: characters split over tokens, stop strings split over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_spec import tiny_tokenizer

from inkling_engine.runtime.errors import CorruptError, UsageError
from inkling_engine.runtime.sampling import SamplingParams
from inkling_engine.runtime.tokens import TextStream, Tokenizer

pytestmark = pytest.mark.null

TOKENIZER = tiny_tokenizer()
VOCAB = 2040


class Bytes:
    """A decoder whose token ids are bytes; ids from 256 are special and have no bytes."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        shown = "" if skip_special_tokens else "<s>"
        parts = [bytes([i]) if i < 256 else shown.encode() for i in ids]
        return b"".join(parts).decode(errors="replace")


class Pieces:
    """A decoder whose tokens are given strings."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(self.pieces[i] for i in ids)


def _stream(decoder: object, **values: object) -> TextStream:
    return TextStream(decoder, SamplingParams(**values))  # type: ignore[arg-type]


@given(st.lists(st.integers(0, VOCAB - 1), max_size=80), st.booleans())
def test_any_tokens_grow_into_their_text(ids: list[int], skip: bool) -> None:
    stream = _stream(TOKENIZER, skip_special_tokens=skip)
    texts = []
    for token in ids:
        stream.push(token)
        texts.append(stream.text[: stream.ready])
    whole = TOKENIZER.decode(ids, skip_special_tokens=skip)
    assert stream.close() == whole
    assert all(whole.startswith(text) for text in texts), "nothing is taken back"


def test_text_that_is_no_unicode_is_refused() -> None:
    """As a shell gives bytes that are not UTF-8, or JSON half of a pair."""
    for text in ("a\udcff", "\ud83d"):
        with pytest.raises(UsageError, match=f"at character {len(text) - 1}"):
            TOKENIZER.encode(text)


@given(st.text(max_size=30), st.lists(st.integers(0, 300), max_size=12))
def test_any_bytes_grow_into_their_text(text: str, noise: list[int]) -> None:
    ids = [*text.encode(errors="surrogatepass"), *noise, *text.encode(errors="surrogatepass")]
    whole = Bytes().decode(ids, skip_special_tokens=True)
    stream = _stream(Bytes())
    for token in ids:
        stream.push(token)
        assert whole.startswith(stream.text)
    assert stream.close() == whole


def test_a_character_appears_once_whole() -> None:
    stream = _stream(Bytes())
    seen = []
    for token in "a\U0001f600b\u20ac".encode():
        stream.push(token)
        seen.append(stream.text)
    assert seen == ["a", "a", "a", "a", "a😀", "a😀b", "a😀b", "a😀b", "a😀b€"]


def test_a_character_that_never_ends_is_replaced_at_the_end() -> None:
    stream = _stream(Bytes())
    for token in b"a\xf0\x9f":
        stream.push(token)
    assert stream.text == "a"
    assert stream.close() == "a\ufffd"


def test_special_tokens_inside_a_character() -> None:
    for skip, text in ((True, "€"), (False, "\ufffd<s>\ufffd")):
        stream = _stream(Bytes(), skip_special_tokens=skip)
        for token in (0xE2, 300, 0x82, 0xAC):
            stream.push(token)
        assert stream.close() == Bytes().decode([0xE2, 300, 0x82, 0xAC], skip_special_tokens=skip)
        assert text in (stream.text, "\ufffd<s>\ufffd")


def test_stop_strings_span_tokens() -> None:
    stream = _stream(Pieces("He", "llo", " w", "or", "ld"), stop=["o wor"])
    assert [stream.push(i) for i in range(4)] == [None, None, None, "o wor"]
    assert stream.text == "Hell"
    assert stream.ready == 4


def test_what_may_become_a_stop_string_is_kept_back() -> None:
    stream = _stream(Pieces("ab", "c", "x", "ab"), stop=["abcd", "bcx!"])
    ready = []
    for i in range(4):
        stream.push(i)
        ready.append(stream.text[: stream.ready])
    assert ready == ["", "", "a", "abcx"]
    assert stream.close() == "abcxab"


def test_the_stop_string_that_is_complete_first_wins() -> None:
    for pieces in (("xabcd",), ("xa", "b", "cd"), ("x", "abc", "d")):
        stream = _stream(Pieces(*pieces), stop=["abcd", "bc", "c"])
        stop = next(filter(None, map(stream.push, range(len(pieces)))))
        assert stop == "bc", "of those complete at c, the longest"
        assert stream.text == "xa"


def test_a_stop_string_can_be_kept_in_the_text() -> None:
    stream = _stream(Pieces("one", ". two"), stop=".", include_stop_str_in_output=True)
    assert [stream.push(0), stream.push(1)] == [None, "."]
    assert stream.text == "one."


@pytest.mark.parametrize("stops", [["."], [".", "long one"]])
def test_stop_strings_before_min_tokens_are_passed_over(stops: list[str]) -> None:
    stream = _stream(Pieces("a.", "b", "c."), stop=stops)
    assert stream.push(0, may_stop=False) is None
    assert stream.push(1) is None, "an old match stays passed over"
    assert stream.push(2) == "."
    assert stream.text == "a.bc"


@given(
    st.lists(st.text("ab", max_size=3), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stopping_does_not_depend_on_where_tokens_are_cut(
    pieces: list[str], stops: list[str]
) -> None:
    whole = "".join(pieces)
    results = set()
    for cut in (pieces, list(whole)):
        stream = _stream(Pieces(*cut), stop=stops)
        found = None
        for i in range(len(cut)):
            before = stream.text[: stream.ready]
            found = stream.push(i)
            assert stream.text.startswith(before), "nothing handed out is taken back"
            if found:
                break
        results.add((found, stream.text if found else stream.close()))
    assert len(results) == 1
    found, text = results.pop()
    assert whole.startswith(text) and (found is not None or not any(s in whole for s in stops))


def test_special_tokens_are_never_made_from_text() -> None:
    ids = TOKENIZER.encode("<|eos|>")
    assert 2 not in ids and len(ids) > 1
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "<|eos|>"
    assert TOKENIZER.decode([2], skip_special_tokens=False) == "<|eos|>"


@given(st.text(max_size=40))
def test_text_survives_encoding(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=True) == text


def test_opening(tmp_path: Path) -> None:
    assert Tokenizer.open(tmp_path) is None
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{")
    with pytest.raises(CorruptError, match="tokenizer.json"):
        Tokenizer.open(tmp_path)
