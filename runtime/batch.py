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
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from inkling_engine.artifacts.errors import FailedError, UsageError, show
from inkling_engine.runtime import usage
from inkling_engine.runtime.batch_input import WHOLE, Input, Shard, open_input
from inkling_engine.runtime.batch_job import Control, Job, StoppedError
from inkling_engine.runtime.batch_output import Part, require_absent
from inkling_engine.runtime.batch_paths import require_apart, require_writable, write_summary
from inkling_engine.runtime.batch_progress import Watch, shown
from inkling_engine.runtime.batch_request import Chat
from inkling_engine.runtime.chat import open_chat
from inkling_engine.runtime.debug import check
from inkling_engine.runtime.trace import tracing

if TYPE_CHECKING:
    from inkling_engine.runtime.engine import Engine

__all__ = ["BatchRunner", "Shard", "StoppedError", "run_batch", "stopped_by_signals"]

FORMAT: Final = 1  # of the output's lines: part files of another one are not gone on with
_AHEAD: Final = 4  # sequences in flight for each one that can run


class BatchRunner:
    """Runs batch files on an open engine, one after the other."""

    def __init__(
        self,
        engine: Engine,
        chat: Chat | None = None,
        *,
        max_in_flight: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Run on `engine`, with `chat` for its messages if the model has such.

        `max_in_flight` is how many sequences (choices of requests) are submitted at a time; by
        default four times what the engine runs together; UsageError below 1. `options` are what
        else decides the answers, beside the engine id: a job is not gone on with under other ones.
        """
        _require_count(max_in_flight)
        self.engine, self.chat, self.options = engine, chat, dict(options or {})
        self.max_in_flight = max_in_flight or _AHEAD * engine.spec.max_running
        self._control = Control()

    @classmethod
    def load(cls, folder: str | Path, *, max_in_flight: int | None = None, **load: Any) -> Self:
        """A runner on the engine in `folder`, opened with the keywords of `Engine.load`."""
        from inkling_engine.runtime.engine import Engine

        _require_count(max_in_flight)
        options = {"random_weights": load.get("random_weights"), "alone": load.get("alone") or None}
        engine = Engine.load(folder, **load)
        try:
            chat = open_chat(engine.tokenizer, Path(folder))
        except BaseException:
            engine.close()
            raise
        return cls(engine, chat, max_in_flight=max_in_flight, options=options)

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Make the run end after its current step with StoppedError: it can be gone on with."""
        self._control.signum = signum

    def cancel(self) -> None:
        """Make the run end after its current step: lines not done are answered `cancelled`."""
        self._control.cancelled = True

    def run(
        self,
        source: str | Path,
        output: str | Path,
        *,
        shard: Shard = WHOLE,
        deadline: float | None = None,
        watch: Watch | None = None,
    ) -> dict[str, Any]:
        """Answer each line of `source` (of its `shard`) with a line of `output`; the summary.

        A part file left by an earlier run of the same job is gone on with; the job is the input's
        bytes, the engine, its weights, `options` and the shard. Lines not done `deadline` seconds from now
        are answered `expired`. Raises UsageError for a deadline that is no time to come, an
        unreadable input, an existing output and a part file of another job, StoppedError after
        `stop`, and what `Engine.step` raises.
        """
        _require_seconds(deadline)
        if deadline is not None:
            self._control.deadline = time.monotonic() + deadline
        try:
            return self._run(Path(source), Path(output), shard, watch)
        finally:
            self._control = Control()

    def _run(self, source: Path, output: Path, shard: Shard, watch: Watch | None) -> dict[str, Any]:
        require_absent(output)
        require_apart(source, output, {})
        manifest, before = self.engine.manifest, self.engine.drafts.copy()
        with closing(Input(source, self._control.require_going)) as lines:
            identity = {
                "format": FORMAT,
                "input_bytes": lines.size,
                "input_sha256": lines.sha256,
                "engine_id": manifest.engine_id,
                "weights": manifest.source,  # those that were attached are not in the id
                "shard": str(shard),
                **self.options,
            }
            with closing(Part(output, identity)) as part:
                files, span, most = (lines, part), shard.span(lines.total), self.max_in_flight
                job = Job(self.engine, self.chat, files, span, most, self._control)
                try:
                    job.run(watch)
                except BaseException:
                    job.abandon()
                    with suppress(FailedError):  # it would hide why the job ends
                        part.sync()
                    raise
                part.commit()
        report = {"engine_id": manifest.engine_id, "shard": str(shard), **job.meter.summary()}
        if before.proposed:
            report["drafts"] = self.engine.drafts.since(before).report()
        return report


def run_batch(
    folder: Path,
    source: Path,
    output: Path,
    *,
    shard: Shard,
    deadline: float | None,
    trace: Path | None = None,
    summary: Path | None = None,
    **load: Any,
) -> dict[str, Any]:
    """Load the engine and run one job, progress on stderr; SIGINT and SIGTERM stop it.

    The summary, which is written to the file `summary` too if one is given. Raises what
    `BatchRunner.run` raises, UsageError for files that are one or cannot be written.
    """
    _require_seconds(deadline)  # before the load, which takes its time
    require_absent(output)
    open_input(source).close()
    files = {"--summary": summary, "--trace": trace}
    require_apart(source, output, files)
    for name, path in files.items():
        require_writable(name, path)
    runner = BatchRunner.load(folder, **load)
    with runner.engine as engine, tracing(engine, trace):
        with shown() as watch, stopped_by_signals(runner):
            report = runner.run(source, output, shard=shard, deadline=deadline, watch=watch)
        check(engine)
        report |= usage.report(engine)
    if summary:
        write_summary(summary, msgspec.json.encode(report).decode() + "\n")
    return report


@contextmanager
def stopped_by_signals(runner: BatchRunner) -> Iterator[None]:
    """The first SIGINT or SIGTERM stops the run; a second one does what it did before.

    One that is ignored, as a parent wished, stays so.
    """
    before: dict[int, Any] = {}

    def stop(signum: int, frame: FrameType | None) -> None:
        runner.stop(signum)
        signal.signal(signum, before[signum])

    for name in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(name) is not signal.SIG_IGN:
            before[name] = signal.signal(name, stop)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _require_count(max_in_flight: int | None) -> None:
    if max_in_flight is not None and not max_in_flight >= 1:
        remedy = "change it or leave it out"
        raise UsageError("max_in_flight", show(max_in_flight), "at least 1", remedy)


def _require_seconds(deadline: float | None) -> None:
    if deadline is not None and not deadline >= 0:  # nor is NaN
        raise UsageError(
            "deadline", show(deadline), "seconds from 0 on", "change it or leave it out"
        )
