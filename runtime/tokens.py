"""Text and token ids: the folder's tokenizer, and text that grows by one token at a time.

Bytes of one character may arrive in several tokens: an unfinished character is kept back. Stop
strings may span tokens: what could still become one is kept back too. The stop string that is
complete first ends the text, so that the result does not depend on where tokens are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from tokenizers import Tokenizer as NativeTokenizer

from inkling_engine.artifacts.errors import CorruptError, UsageError
from inkling_engine.artifacts.layout import TOKENIZER
from inkling_engine.runtime.sampling import SamplingParams

UNFINISHED: Final = "\ufffd"
_CONTEXT: Final = 8  # tokens decoded again with each new one: no character spans more


class Decoder(Protocol):
    """Whatever turns ids into text."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of `ids`."""


class Tokenizer:
    """The folder's tokenizer. Prompt text never becomes special tokens: those are given as ids."""

    def __init__(self, native: NativeTokenizer) -> None:
        """Wrap `native`, which is changed to encode special tokens' names as plain text."""
        self._native = native
        native.encode_special_tokens = True

    @classmethod
    def open(cls, folder: Path) -> Tokenizer | None:
        """The tokenizer of an engine folder, or None if it has none."""
        path = folder / TOKENIZER / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            return cls(NativeTokenizer.from_file(str(path)))
        except Exception as error:  # noqa: BLE001 - the library raises the bare class
            remedy = "restore the folder from a sound copy or build it again"
            raise CorruptError(str(path), str(error), "a tokenizers file", remedy) from None

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, nothing added around them. UsageError for what UTF-8 cannot say."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            found = f"{text[error.start]!a} at character {error.start}"
            raise UsageError("prompt", found, "text of whole characters", "correct it") from None
        ids: list[int] = self._native.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of `ids`; bytes that are no character become U+FFFD."""
        return str(self._native.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def added_tokens(self) -> dict[str, int]:
        """Ids of the tokens beside the ordinary vocabulary, special ones among them, by spelling."""
        return {token.content: i for i, token in self._native.get_added_tokens_decoder().items()}


class TextStream:
    """The growing text of one sequence, cut at the first complete stop string.

    `text` is final up to its end, except that a stop string may still cut off its last
    characters: `ready` counts those that nothing can take back.
    """

    __slots__ = (
        "_decoder",
        "_done",
        "_ids",
        "_keep_stop",
        "_skip",
        "_start",
        "_stops",
        "ready",
        "text",
    )

    def __init__(self, decoder: Decoder, params: SamplingParams) -> None:
        """An empty text; `params` name the stop strings and what to leave out."""
        self._decoder, self._stops = decoder, tuple(params.stop or ())
        self._keep_stop = params.include_stop_str_in_output
        self._skip = params.skip_special_tokens
        self._ids: list[int] = []
        self._start = 0  # first token still decoded
        self._done = 0  # characters of that window which are in `text`
        self.text = ""
        self.ready = 0

    def push(self, token: int, *, may_stop: bool = True) -> str | None:
        """Add a token; return the stop string that it completed, which also cuts the text."""
        self._ids.append(token)
        before = len(self.text)
        self._grow(self._decoder.decode(self._ids[self._start :], skip_special_tokens=self._skip))
        stop = self._cut(before) if self._stops and may_stop else None
        self.ready = len(self.text) if stop or not self._stops else self._safe()
        return stop

    def close(self) -> str:
        """The whole text once no token follows: an unfinished character is added as U+FFFD."""
        window = self._decoder.decode(self._ids[self._start :], skip_special_tokens=self._skip)
        self.text += window[self._done :]
        self.ready = len(self.text)
        return self.text

    def _grow(self, window: str) -> None:
        """Take over what is final in the decoded window, then move the window's start."""
        unfinished = window.endswith(UNFINISHED)
        stable = window[:-1] if unfinished else window
        self.text += stable[self._done :]
        self._done = max(self._done, len(stable))
        if len(self._ids) - self._start > 2 * _CONTEXT:
            self._start = len(self._ids) - _CONTEXT
            tail = self._decoder.decode(self._ids[self._start :], skip_special_tokens=self._skip)
            self._done = len(tail) - unfinished

    def _cut(self, before: int) -> str | None:
        """End the text at the stop string that is complete first; of equals, the longest."""
        longest = max(map(len, self._stops))
        first = max(0, before - longest + 1)
        ends = []
        for stop in self._stops:
            at = self.text.find(stop, first)
            while at >= 0 and at + len(stop) <= before:
                at = self.text.find(stop, at + 1)
            if at >= 0:
                ends.append((at + len(stop), at, stop))
        if not ends:
            return None
        end, start, stop = min(ends)
        self.text = self.text[: end if self._keep_stop else start]
        return stop

    def _safe(self) -> int:
        """Characters that no stop string, begun at the end of the text, can cut off."""
        size = len(self.text)
        for kept in range(min(size, max(map(len, self._stops)) - 1), 0, -1):
            if any(stop.startswith(self.text[size - kept :]) for stop in self._stops):
                return size - kept
        return size
