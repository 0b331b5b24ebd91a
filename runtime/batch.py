"""`BatchRunner`: a file of requests in, a file of answers out, line for line and in order.

Lines are read, checked and submitted just far enough ahead to keep the scheduler fed; answers wait
for their turn in a bounded window and are then written for good (`batch_output`). What is wrong
with a line is that line's answer; what is wrong with the engine or the disk ends the run, and the
lines that were not written are done by the next one. No wall clock and no chance reaches the
output, so that a job interrupted anywhere and resumed writes what an undisturbed one writes.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import chain, islice
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from inkling_engine.artifacts.errors import UsageError
from inkling_engine.runtime.batch_input import WHOLE, Input, SeenIds, Shard
from inkling_engine.runtime.batch_output import Part, require_absent
from inkling_engine.runtime.batch_progress import Meter, Watch, shown
from inkling_engine.runtime.batch_reply import Replies, failure, line_id
from inkling_engine.runtime.batch_request import (
    Chat,
    Envelope,
    LineError,
    Work,
    read_line,
    read_request,
)
from inkling_engine.runtime.debug import check
from inkling_engine.runtime.requests import Request
from inkling_engine.runtime.trace import tracing

if TYPE_CHECKING:
    from inkling_engine.runtime.engine import Engine

FORMAT: Final = 1  # of the output's lines: part files of another one are not gone on with
_AHEAD: Final = 4  # sequences in flight for each one that can run
_WINDOW, _HELD = 16, 256 << 20  # lines not written yet for each in flight, bytes of them


class StoppedError(Exception):
    """The run was told to stop: the output can be gone on with. `signum` is the signal's number."""

    def __init__(self, signum: int, written: int, total: int) -> None:
        """Say how far it came."""
        self.signum = signum
        name = signal.Signals(signum).name
        super().__init__(f"{name}: {written} of {total} lines are written; run again to go on")


class BatchRunner:
    """Runs batch files on an open engine, one after the other."""

    def __init__(
        self, engine: Engine, chat: Chat | None = None, *, max_in_flight: int | None = None
    ) -> None:
        """Run on `engine`, with `chat` for its messages if the model has such.

        `max_in_flight` is how many sequences (choices of requests) are submitted at a time; by
        default four times what the engine runs together.
        """
        self.engine, self.chat = engine, chat
        self.max_in_flight = max_in_flight or _AHEAD * engine.spec.max_running
        self._signum = 0

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Make the run end after its current step with StoppedError; from any thread, or a signal
        handler."""
        self._signum = signum

    def run(
        self,
        source: str | Path,
        output: str | Path,
        *,
        shard: Shard = WHOLE,
        options: Mapping[str, Any] | None = None,
        watch: Watch | None = None,
    ) -> dict[str, Any]:
        """Answer each line of `source` (of its `shard`) with a line of `output`; the summary.

        A part file left by an earlier run of the same job is gone on with; the job is the input's
        bytes, the engine, the shard and `options`, whatever else decides the answers. Raises
        UsageError for an unreadable input, an existing output and a part file of another job,
        StoppedError after `stop`, and what `Engine.step` raises.
        """
        try:
            return self._run(Path(source), Path(output), shard, options or {}, watch)
        finally:
            self._signum = 0

    def require_going(self, written: int = 0, total: int = 0) -> None:
        """Raise StoppedError after `stop`."""
        if self._signum:
            raise StoppedError(self._signum, written, total)

    def _run(
        self,
        source: Path,
        output: Path,
        shard: Shard,
        options: Mapping[str, Any],
        watch: Watch | None,
    ) -> dict[str, Any]:
        require_absent(output)
        with closing(Input(source, self.require_going)) as lines:
            identity = {
                "format": FORMAT,
                "input_bytes": lines.size,
                "input_sha256": lines.sha256,
                "engine_id": self.engine.manifest.engine_id,
                "shard": str(shard),
                **options,
            }
            with closing(Part(output, identity)) as part:
                job = _Job(self, lines, part, shard)
                try:
                    job.run(watch)
                finally:
                    job.abandon()
                    part.sync()
                part.commit()
        summary = {"engine_id": identity["engine_id"], "shard": str(shard)}
        return summary | job.meter.summary()


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


class _Job:
    """One run over one input."""

    def __init__(self, runner: BatchRunner, lines: Input, part: Part, shard: Shard) -> None:
        self._runner, self._engine, self._part, self._lines = runner, runner.engine, part, lines
        engine_id = self._engine.manifest.engine_id
        self._replies = Replies(engine_id, self._engine.tokenizer, runner.chat)
        self._seen, self._job = SeenIds(), lines.sha256
        self._span = shard.span(lines.total)
        self._window: deque[_Entry] = deque()  # in input order, written from the left
        self._live: dict[Request, _Entry] = {}
        self._sequences = self._held = 0
        self.meter = Meter(len(self._span))

    def run(self, watch: Watch | None) -> None:
        """Resume, then read, step and write until every line is written."""
        ahead = self._resume()
        self.meter.start()
        while self._admit(ahead) or self._window:
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
        self._lines.require_unchanged()

    def abandon(self) -> None:
        """Abort what still runs."""
        for request in self._live:
            self._engine.abort(request)

    def _require_going(self) -> None:
        self._runner.require_going(self.meter.written, self.meter.total)

    def _envelopes(self) -> Iterator[Envelope]:
        """The shard's lines. Those before it are read too: custom_ids are of the whole input."""
        for line in islice(self._lines.lines(), self._span.stop):
            envelope = read_line(line, self._job, self._seen)
            if line.index >= self._span.start:
                yield envelope
            elif line.index % 1024 == 0:
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
        """Take in lines while there is room; whether there may be more."""
        most = self._runner.max_in_flight
        while self._sequences < most and len(self._window) < _WINDOW * most and self._held < _HELD:
            if (envelope := next(lines, None)) is None:
                return False
            entry = _Entry(envelope)
            self._window.append(entry)
            self._submit(entry)
        return True

    def _submit(self, entry: _Entry) -> None:
        """Begin a line's request, or answer it with what is wrong."""
        engine = self._engine
        try:
            work = entry.work = read_request(
                entry.envelope, self._job, engine.tokenizer, self._runner.chat
            )
            request = entry.request = engine.submit(work.prompt, work.params)
        except LineError as error:
            self._fail(entry, error)
        except UsageError as error:
            self._fail(entry, LineError.of(error, entry.work.names if entry.work else None))
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
        if lines:
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


def run_batch(
    folder: Path,
    source: Path,
    output: Path,
    *,
    shard: Shard,
    max_in_flight: int | None,
    trace: Path | None = None,
    **load: Any,
) -> dict[str, Any]:
    """Load the engine and run one job, progress on stderr; SIGINT and SIGTERM stop it."""
    require_absent(output)  # before the load, which takes its time
    from inkling_engine.runtime.engine import Engine

    options = {"random_weights": load.get("random_weights")}
    with Engine.load(folder, **load) as engine, tracing(engine, trace), shown() as watch:
        runner = BatchRunner(engine, max_in_flight=max_in_flight)
        with stopped_by_signals(runner):
            report = runner.run(source, output, shard=shard, options=options, watch=watch)
        check(engine)
        return report


@contextmanager
def stopped_by_signals(runner: BatchRunner) -> Iterator[None]:
    """The first SIGINT or SIGTERM stops the run; a second one does what it did before."""
    before: dict[int, Any] = {}

    def stop(signum: int, frame: FrameType | None) -> None:
        runner.stop(signum)
        signal.signal(signum, before[signum])

    for name in (signal.SIGINT, signal.SIGTERM):
        before[name] = signal.signal(name, stop)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
