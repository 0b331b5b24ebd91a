"""One run of a batch job: lines come in from the left, answers leave in order.

The window holds the lines between the next one to read and the next one to write: few enough to
fit in memory, enough to keep the scheduler fed while a slow line holds up those behind it. What a
part file holds already is taken over, line by line, as far as it answers the input.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Final

import msgspec

from inkling_engine.artifacts.errors import UsageError
from inkling_engine.runtime.batch_input import Input, SeenIds
from inkling_engine.runtime.batch_output import Part
from inkling_engine.runtime.batch_progress import Meter, Watch
from inkling_engine.runtime.batch_reply import Replies, failure, line_id
from inkling_engine.runtime.batch_request import (
    Chat,
    Envelope,
    LineError,
    Work,
    read_line,
    read_request,
)
from inkling_engine.runtime.requests import Request

if TYPE_CHECKING:
    from inkling_engine.runtime.engine import Engine

_WINDOW, _HELD = 16, 256 << 20  # lines not written yet for each in flight, bytes of them
_BURST: Final = 64  # lines read between two steps, so that the engine does not wait for all
_CANCELLED: Final = "found the job cancelled before its end; send the line again in another job"
_EXPIRED: Final = "found the deadline passed; send the line again in another job"


class StoppedError(Exception):
    """The run was told to stop: the output can be gone on with. `signum` is the signal's number."""

    def __init__(self, signum: int, written: int, total: int) -> None:
        """Say how far it came."""
        self.signum = signum
        name = signal.Signals(signum).name
        super().__init__(f"{name}: {written} of {total} lines are written; run again to go on")


class Control:
    """What may end a run early, from another thread or a signal handler."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.signum, self.cancelled = 0, False
        self.deadline = float("inf")  # of time.monotonic()

    def require_going(self, written: int = 0, total: int = 0) -> None:
        """Raise StoppedError if the run is to stop."""
        if self.signum:
            raise StoppedError(self.signum, written, total)

    def verdict(self) -> LineError | None:
        """What lines that are not done are answered with, once that is decided."""
        if self.cancelled:
            return LineError("cancelled", _CANCELLED)
        return LineError("expired", _EXPIRED) if time.monotonic() > self.deadline else None


class _Entry:
    """A line in the window: the request that will answer it, then the answer."""

    __slots__ = ("answer", "code", "envelope", "request", "started", "usage", "work")

    def __init__(self, envelope: Envelope) -> None:
        self.envelope, self.started = envelope, 0.0
        self.work: Work | None = None
        self.request: Request | None = None
        self.answer: bytes | None = None
        self.code: str | None = None
        self.usage: dict[str, int] = {}


class Job:
    """One run over one input; `control` ends it early."""

    def __init__(
        self,
        engine: Engine,
        chat: Chat | None,
        files: tuple[Input, Part],
        lines: range,
        most: int,
        control: Control,
    ) -> None:
        """Answer these `lines` of the input in the part file, `most` sequences at a time."""
        self._engine, self._chat, self._control, self._most = engine, chat, control, most
        (self._input, self._part), self._span = files, lines
        self._replies = Replies(engine.manifest.engine_id, engine.tokenizer, chat)
        self._seen, self._job = SeenIds(), self._input.sha256
        self._window: deque[_Entry] = deque()  # in input order, written from the left
        self._live: dict[Request, _Entry] = {}
        self._sequences = self._held = 0
        self.meter = Meter(len(lines))

    def run(self, watch: Watch | None) -> None:
        """Resume, then read, step and write until every line is written."""
        ahead = self._resume()
        self.meter.start()
        while self._admit(ahead) or self._window:
            if self._live and (verdict := self._control.verdict()):
                self._end_live(verdict)
            self._flush()
            if self._live:
                for request in self._engine.step():
                    if entry := self._live.get(request):
                        self._finish(request, entry)
                self._flush()
            if watch:
                watch(self.meter)
            self._require_going()
        self._engine.step()  # the idle self-check
        self._input.require_unchanged()  # nor after the last line was written

    def abandon(self) -> None:
        """Abort what still runs."""
        for request in self._live:
            self._engine.abort(request)

    def _end_live(self, verdict: LineError) -> None:
        """Answer what still runs with `verdict`."""
        self.abandon()
        for entry in self._live.values():
            entry.request = None
            self._fail(entry, verdict)
        self._live.clear()
        self._sequences = 0

    def _require_going(self) -> None:
        self._control.require_going(self.meter.written, self.meter.total)

    def _envelopes(self) -> Iterator[Envelope]:
        """The shard's lines. Those before it are read too: custom_ids are of the whole input."""
        for line in islice(self._input.lines(), self._span.stop):
            envelope = read_line(line, self._job, self._seen)
            if line.index >= self._span.start:
                yield envelope
            else:
                self._require_going()

    def _resume(self) -> Iterator[Envelope]:
        """Take over what the part file holds; the lines that are still to be done.

        A written line counts if it answers its input line and all before it count; the rest is
        cut off.
        """
        size, lines, written = 0, self._envelopes(), self._part.finished()
        for envelope in lines:
            line = next(written, b"")
            if not self._take_over(envelope, line):
                self._part.cut(size)
                return chain([envelope], lines)
            size += len(line)
            self._require_going()
        self._part.cut(size)
        return lines

    def _take_over(self, envelope: Envelope, line: bytes) -> bool:
        try:
            known = msgspec.json.decode(line, type=_Written)
        except msgspec.MsgspecError:
            return False
        if known.id != line_id(envelope):
            return False
        usage = known.response.body.usage if known.response else {}
        self.meter.count(known.error.code if known.error else None, usage)
        return True

    def _admit(self, lines: Iterator[Envelope]) -> bool:
        """Take in some lines if there is room; whether there may be more."""
        most = self._most
        for _ in range(_BURST):
            full = len(self._window) >= _WINDOW * most or self._held >= _HELD
            if full or self._sequences >= most:
                break
            if (envelope := next(lines, None)) is None:
                return False
            entry = _Entry(envelope)
            self._window.append(entry)
            self._submit(entry)
        return True

    def _submit(self, entry: _Entry) -> None:
        """Begin a line's request, or answer it with what is wrong."""
        engine, envelope = self._engine, entry.envelope
        entry.envelope = replace(envelope, fields={}, error=None)  # what waits holds no body
        if error := envelope.error or self._control.verdict():
            self._fail(entry, error)
            return
        try:
            work = entry.work = read_request(envelope, self._job, engine.tokenizer, self._chat)
            request = entry.request = engine.submit(work.prompt, work.params)
        except LineError as caught:
            self._fail(entry, caught)
        except UsageError as caught:
            self._fail(entry, LineError.of(caught, entry.work.names if entry.work else None))
        else:
            entry.started = time.perf_counter()
            self._live[request] = entry
            self._sequences += len(request.sequences)

    def _finish(self, request: Request, entry: _Entry) -> None:
        """Turn an ended request into its line's answer."""
        assert entry.work is not None
        del self._live[request]
        self._sequences -= len(request.sequences)
        self.meter.latencies.append(time.perf_counter() - entry.started)
        self.meter.cached_tokens += sum(sequence.cached for sequence in request.sequences)
        done, entry.request = request.completion(), None
        try:
            answer, usage = self._replies.answer(entry.envelope, entry.work, done)
        except LineError as error:
            self._fail(entry, error)
        else:
            entry.usage = usage
            self._hold(entry, answer)

    def _fail(self, entry: _Entry, error: LineError) -> None:
        entry.code = error.code
        self._hold(entry, failure(entry.envelope, error))

    def _hold(self, entry: _Entry, answer: bytes) -> None:
        entry.answer, entry.work = answer, None
        self._held += len(answer)

    def _flush(self) -> None:
        """Write the answers whose turn has come."""
        lines: list[bytes] = []
        while self._window:
            entry = self._window[0]
            if entry.request and entry.request.finished:  # by somebody's abort
                self._finish(entry.request, entry)
            if entry.answer is None:
                break
            lines.append(entry.answer)
            self.meter.count(entry.code, entry.usage)
            self._held -= len(entry.answer)
            self._window.popleft()
        if lines:  # they were read before now: an edit between was not seen by them
            self._input.require_unchanged()
            self._part.write(lines)


class _Body(msgspec.Struct):
    usage: dict[str, int]


class _Response(msgspec.Struct):
    body: _Body


class _Error(msgspec.Struct):
    code: str


class _Written(msgspec.Struct):
    """What a resume reads of an output line."""

    id: str
    response: _Response | None
    error: _Error | None
