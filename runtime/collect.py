"""What a replay's results do to its sequences: tokens, text, and their ends.

Result lines are read step by step, and token by token: a round of drafting gives several. A
sequence that has ended, on the device or by its text, takes nothing more from later tokens and
lines: they are zeros, or tokens that the one-step loop would not have drawn. One that was preempted
after a replay had begun takes that replay's tokens while it waits.
"""

from __future__ import annotations

from collections import Counter
from time import perf_counter
from typing import Protocol

from inkling_engine.kernels import table
from inkling_engine.kernels.table import SAMPLE, Finish
from inkling_engine.runtime.drafts import DraftStats
from inkling_engine.runtime.plan import Plan
from inkling_engine.runtime.requests import FinishReason, Request, Sequence, Status
from inkling_engine.runtime.results import ResultRing
from inkling_engine.runtime.scheduler import Scheduler
from inkling_engine.runtime.tokens import Tokenizer

_REASONS: dict[int, FinishReason] = {
    Finish.STOP: "stop",
    Finish.LENGTH: "length",
    Finish.NON_FINITE: "error",
}


class StepObserver(Protocol):
    """What wants to know of each replay; see `Engine.observers`."""

    def __call__(self, plan: Plan, began: float, ended: float, tokens: int) -> None:
        """A replay of `plan` was launched at `began`, its results were there at `ended`
        (`time.perf_counter`), and they were handed out: `tokens` of them were sampled ones."""


class Collector:
    """Hands results to sequences, and ends them; `tokens` counts what was sampled so far,
    `finished` sequences by reason, `drafts` what was drafted."""

    def __init__(
        self, results: ResultRing, scheduler: Scheduler, tokenizer: Tokenizer | None
    ) -> None:
        """Read from `results`, give back to `scheduler`, decode with `tokenizer`."""
        self._results, self._scheduler, self._tokenizer = results, scheduler, tokenizer
        self.tokens, self.drafts = 0, DraftStats.none(scheduler.drafts)
        self.finished: Counter[FinishReason] = Counter()
        self.observers: list[StepObserver] = []

    def collect(self, plan: Plan, first: int, began: float) -> list[Request]:
        """Read a completed replay, launched at `began`, whose first step has number `first`; the
        requests it ended."""
        ended, before = perf_counter(), self.tokens
        finished = self._read(plan, first)
        self._scheduler.settle(plan)
        for observer in self.observers:
            observer(plan, began, ended, self.tokens - before)
        return finished

    def _read(self, plan: Plan, first: int) -> list[Request]:
        """Hand a replay's result lines to its sequences; the requests that ended."""
        finished: list[Request] = []
        for step in range(first, first + plan.steps):
            places = self._results.rows(step, len(plan.sequences))
            for sequence, flag, at in zip(plan.sequences, plan.flags, places, strict=True):
                if flag & SAMPLE and sequence.status is not Status.FINISHED:
                    self._take(plan, sequence, at)
                    if sequence.finish_reason and sequence.request.finished:
                        finished.append(sequence.request)
        return finished

    def end(self, request: Request, reason: FinishReason) -> bool:
        """End the unfinished choices of a request; whether there were any."""
        left = [s for s in request.sequences if s.status is not Status.FINISHED]
        for sequence in left:
            self.finish(sequence, reason)
        return bool(left)

    def finish(
        self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End a sequence: its text becomes final, its slot and pages are free."""
        self._scheduler.release(sequence)
        self.finished[reason] += 1
        if sequence.stream:
            cut = isinstance(stop_reason, str)
            sequence.text = sequence.stream.text if cut else sequence.stream.close()
        elif self._tokenizer and sequence.params.detokenize:
            hidden = reason == "stop" and not sequence.params.include_stop_str_in_output
            ids = sequence.tokens[:-1] if hidden else sequence.tokens
            skip = sequence.params.skip_special_tokens
            sequence.text = self._tokenizer.decode(ids, skip_special_tokens=skip)
        sequence.finish(reason, stop_reason)

    def _take(self, plan: Plan, sequence: Sequence, at: int) -> None:
        """Add the tokens of the line at `at` of the result ring, until one ends the sequence."""
        slot, count, code, _, drafted = self._results.ints[at : at + table.RESULT_HEADER]
        assert slot == sequence.slot, "the result line belongs to another slot"
        before, tokens = self.tokens, at + table.RESULT_HEADER
        for index in range(count):
            end = code if index == count - 1 else Finish.NONE
            self._add(sequence, at, index, self._results.ints[tokens + index], end)
            if sequence.finish_reason:
                break
        if drafted:
            plan.drafted += drafted
            ended = sequence.finish_reason is not None
            self.drafts.add(drafted, self.tokens - before, ended=ended)

    def _add(self, sequence: Sequence, at: int, index: int, token: int, code: int) -> None:
        """Add token `index` of the line at `at`; a `code` says that it is the last one."""
        if code == Finish.NON_FINITE:
            self.finish(sequence, "error")
            return
        if sequence.logprobs is not None:
            top = sequence.params.logprobs or 0
            sequence.logprobs.append(self._results.logprob(at, index, top))
        sequence.tokens.append(token)
        self.tokens += 1
        if code or sequence.stream:
            self._advance_text(sequence, token, code)

    def _advance_text(self, sequence: Sequence, token: int, code: int) -> None:
        """Add a token to the text, and end the sequence if it or the text says so."""
        params, stream = sequence.params, sequence.stream
        ended = code == Finish.STOP
        if stream and not (ended and not params.include_stop_str_in_output):
            may_stop = len(sequence.tokens) > params.min_tokens
            if stop := stream.push(token, may_stop=may_stop):
                self.finish(sequence, "stop", stop)
                return
        if code:
            listed = ended and token in (params.stop_token_ids or ())
            self.finish(sequence, _REASONS[code], token if listed else None)
