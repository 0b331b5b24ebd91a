"""Requests and what becomes of them: `Request` -> `Sequence` (one a choice) -> `Completion`.

A sequence waits, runs (first its prompt, then token by token) and is finished, never anything
else again; only preemption sends it back to wait. Which slot and pages it holds is written by the scheduler, its tokens and text by the
engine loop; results belong to the object, never to a name, so a late one cannot reach another.
No torch here.
"""

from __future__ import annotations

import enum
from array import array
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from inkling_engine.artifacts.errors import UsageError, show
from inkling_engine.artifacts.spec import EngineSpec
from inkling_engine.runtime.sampling import SamplingParams, check_params, choice_seed

if TYPE_CHECKING:
    from inkling_engine.runtime.prefix import Snapshot
    from inkling_engine.runtime.tokens import TextStream

FinishReason = Literal["stop", "length", "abort", "deadline", "error"]
PageLine = tuple[int, int, int, int]  # table, slot, index, page
Prompt = str | ListLike[int] | Mapping[str, Any]


class Encoder(Protocol):
    """Whatever turns text into ids."""

    def encode(self, text: str) -> list[int]:
        """The ids of `text`."""


class Status(enum.Enum):
    """Where a sequence is in its life; it moves down this list, or by preemption back to waiting."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A generated token's log-probability, and the most likely tokens, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request; the prompt is counted once, tokens over all choices."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished sequence. `stop_reason` is the stop string or stop token id that ended it, None
    for the model's own end token; `cumulative_logprob` and `logprobs` are None if not asked for."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: tuple[TokenLogprob, ...] | None
    cumulative_logprob: float | None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request: its choices in order, its prompt as token ids, and counts."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    usage: Usage


@dataclass(frozen=True, slots=True)
class Delta:
    """What a stream adds to choice `index`; the last one of a choice has its finish reason."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class Sequence:
    """One choice of a request. Compared by identity; `rank` orders those that compete.

    `feed` are the tokens to compute before the next one is sampled: the prompt and, after a
    preemption, what was sampled before. `length` counts tokens whose state is in the pools once all
    replays that have begun are over, of which `cached` came from the prefix cache; with up to
    `drafts` accepted drafts a round it is the least that it can be, as each of the `rounds` under way
    gives one token, and `slack` more are possible. `full_pages[i]` is the physical page of logical
    page i; `window_pages` are those of logical pages `window_first` and up; `capacity` is how many
    tokens the pages taken so far hold, and up to length `quiet` nothing is to be done for growth.
    Of a hit, `source` is the snapshot to start from and `backlog` has page lines still to be sent;
    `pending` is a snapshot whose tokens are not known yet, pinned until it is sure to be written.
    """

    __slots__ = (
        "admit_floats",
        "admit_ints",
        "backlog",
        "cached",
        "capacity",
        "drafts",
        "feed",
        "finish_reason",
        "full_pages",
        "index",
        "length",
        "logprobs",
        "params",
        "pending",
        "prompt",
        "quiet",
        "rank",
        "request",
        "rounds",
        "seed",
        "slack",
        "slot",
        "source",
        "status",
        "stop_reason",
        "stream",
        "text",
        "tokens",
        "total",
        "window_end",
        "window_first",
        "window_pages",
    )

    def __init__(
        self, request: Request, index: int, total: int, seed: int, drafts: int = 0
    ) -> None:
        """A waiting sequence of at most `total` tokens, prompt included, drawn with `seed`."""
        self.request, self.index, self.total, self.seed = request, index, total, seed
        self.drafts, self.rounds, self.slack = drafts, 0, 0
        self.prompt, self.params = request.prompt, request.params
        self.rank = (request.priority, request.id, index)
        self.status = Status.WAITING
        self.feed = self.prompt
        self.slot = self.length = self.cached = self.capacity = self.quiet = 0
        self.window_first = self.window_end = 0
        self.full_pages: list[int] = []
        self.window_pages: deque[int] = deque()
        self.backlog: list[PageLine] = []
        self.source: Snapshot | None = None
        self.pending: Snapshot | None = None
        self.admit_ints: array[int] = array("i")
        self.admit_floats: array[float] = array("f")
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None if self.params.logprobs is None else []
        self.stream: TextStream | None = None
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def max_tokens(self) -> int:
        """How many tokens may be generated."""
        return self.total - len(self.prompt)

    @property
    def left(self) -> int:
        """Tokens yet to process, at most; the last one is sampled and never processed."""
        return self.total - 1 - self.length

    @property
    def reach(self) -> int:
        """The most that `length` can turn out to be."""
        return min(self.length + self.slack, self.total - 1)

    def ahead(self, steps: int, drafts: int) -> int:
        """`reach` after `steps` more rounds with up to `drafts` drafts."""
        width = 1 + min(drafts, self.drafts)
        return min(self.length + self.slack + steps * width, self.total - 1)

    @property
    def most_cached(self) -> int:
        """How many tokens may come from the prefix cache: the last one is always computed, and
        penalties need the tokens that they count to be fed."""
        if self.params.repetition_penalty != 1:
            return 0
        counted = self.params.presence_penalty or self.params.frequency_penalty
        return min(len(self.feed) - 1, len(self.prompt if counted else self.feed))

    def start(self, slot: int) -> None:
        """Enter the running state in `slot`."""
        assert self.status is Status.WAITING and slot > 0
        self.status, self.slot = Status.RUNNING, slot

    def wait(self) -> None:
        """Go back to wait; the results of replays that have begun still arrive, for `slot`."""
        assert self.status is Status.RUNNING
        self.status = Status.WAITING

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Enter the finished state, once."""
        assert self.status is not Status.FINISHED, "a sequence ends once"
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.status = Status.FINISHED

    def choice(self) -> Choice:
        """The result of a finished sequence."""
        assert self.finish_reason is not None, "the sequence is not finished"
        logprobs = None if self.logprobs is None else tuple(self.logprobs)
        return Choice(
            index=self.index,
            token_ids=tuple(self.tokens),
            text=self.text,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=logprobs,
            cumulative_logprob=None if logprobs is None else sum(item.logprob for item in logprobs),
        )


class Cursor:
    """How far a stream has handed out one sequence.

    May be read while a step runs in another thread: a token is counted after its logprob is
    there, a sequence is finished after its text is.
    """

    __slots__ = ("_characters", "_sequence", "_tokens", "exhausted")

    def __init__(self, sequence: Sequence) -> None:
        """At the beginning of `sequence`."""
        self._sequence = sequence
        self._tokens = self._characters = 0
        self.exhausted = False

    def take(self) -> Delta | None:
        """What is new since the last call, or None; the finish reason comes once, at the end."""
        sequence, start = self._sequence, self._tokens
        finished, count = sequence.status is Status.FINISHED, len(sequence.tokens)
        if self.exhausted or not (finished or count > start):
            return None
        text = sequence.text if finished else ""
        if not finished and sequence.stream:
            text = sequence.stream.text[: sequence.stream.ready]
        first, self._tokens = self._characters, count
        self._characters, self.exhausted = max(first, len(text)), finished
        return Delta(
            index=sequence.index,
            token_ids=tuple(sequence.tokens[start:count]),
            text=text[first:],
            logprobs=None if sequence.logprobs is None else tuple(sequence.logprobs[start:count]),
            finish_reason=sequence.finish_reason if finished else None,
            stop_reason=sequence.stop_reason if finished else None,
        )


class Request:
    """A submitted prompt with its sampling; `sequences` are its choices, in order, `arrived` is when
    it was made (`time.perf_counter`). Those of lower `priority` numbers go first, then those of
    lower `id`."""

    __slots__ = ("arrived", "id", "params", "priority", "prompt", "sequences")

    def __init__(
        self, request_id: int, prompt: ListLike[int], params: SamplingParams, priority: int = 0
    ) -> None:
        """A request without sequences yet; `open_request` makes whole ones."""
        self.id, self.prompt, self.params, self.priority = request_id, prompt, params, priority
        self.arrived = perf_counter()
        self.sequences: list[Sequence] = []

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return all(sequence.status is Status.FINISHED for sequence in self.sequences)

    def completion(self) -> Completion:
        """The result; every choice must have ended."""
        choices = tuple(sequence.choice() for sequence in self.sequences)
        count = sum(len(choice.token_ids) for choice in choices)
        return Completion(self.id, tuple(self.prompt), choices, Usage(len(self.prompt), count))


class Feed:
    """A stream over all choices of a request."""

    def __init__(self, request: Request) -> None:
        """At the beginning of `request`."""
        self._cursors = [Cursor(sequence) for sequence in request.sequences]

    @property
    def exhausted(self) -> bool:
        """Whether every choice has been handed out to its end."""
        return all(cursor.exhausted for cursor in self._cursors)

    def take(self) -> list[Delta]:
        """What is new, at most one delta a choice."""
        return [delta for cursor in self._cursors if (delta := cursor.take())]


def open_request(
    request_id: int,
    prompt: ListLike[int],
    params: SamplingParams,
    spec: EngineSpec,
    seed: int,
    priority: int = 0,
) -> Request:
    """Check a prompt and its sampling against the engine and make the request.

    `seed` is used if the request has none. Raises UsageError for an empty prompt, an id outside
    the vocabulary, or more tokens than the context holds.
    """
    check_prompt(prompt, spec)
    check_params(params, spec)
    room = spec.max_context - len(prompt)
    count = room if params.max_tokens is None else params.max_tokens
    if count > room or room < 1:
        asked = f"{len(prompt)} + {max(count, 1)} = {len(prompt) + max(count, 1)}"
        limit = f"at most {spec.max_context} (max_context)"
        raise UsageError("prompt + max_tokens", asked, limit, "shorten one of them")
    request = Request(request_id, prompt, params, priority)
    base, total = seed if params.seed is None else params.seed, len(prompt) + count
    drafts = params.most_drafts(spec.spec_depth)
    for index in range(params.n):
        sequence = Sequence(request, index, total, choice_seed(base, index), drafts)
        request.sequences.append(sequence)
    return request


def read_prompt(prompt: Prompt, tokenizer: Encoder | None) -> ListLike[int]:
    """The token ids of a prompt in any of its forms."""
    if isinstance(prompt, Mapping):
        keys = prompt.keys() & {"prompt", "prompt_token_ids"}
        if len(keys) != 1 or len(prompt) != 1:
            expected = "exactly one of `prompt` and `prompt_token_ids`"
            found = f"an object with {show(list(prompt))}"
            raise UsageError("prompt", found, expected, "give that one")
        prompt = prompt[keys.pop()]
    if isinstance(prompt, str):
        if tokenizer is None:
            expected = "token ids: the engine has no tokenizer"
            raise UsageError("prompt", "text", expected, "give prompt_token_ids")
        return tokenizer.encode(prompt)
    if isinstance(prompt, (list, tuple)):
        return list(prompt)
    found = type(prompt).__name__
    raise UsageError("prompt", found, "text or a list of token ids", "give one of them")


def pair_prompts(
    prompts: Prompt | ListLike[Prompt], params: SamplingParams | ListLike[SamplingParams] | None
) -> tuple[list[Prompt], list[SamplingParams]]:
    """A list of prompts, and sampling for each: one prompt or one sampling may stand alone."""
    single = isinstance(prompts, (str, Mapping)) or (prompts and isinstance(prompts[0], int))
    listed = cast(list[Prompt], [prompts] if single else list(prompts))
    if params is None or isinstance(params, SamplingParams):
        return listed, [params or SamplingParams()] * len(listed)
    if len(params) != len(listed):
        found = f"{len(params)} for {len(listed)} prompts"
        raise UsageError("params", found, "one, or one for each prompt", "give as many of both")
    return listed, list(params)


def check_prompt(prompt: ListLike[Any], spec: EngineSpec) -> None:
    """Raise UsageError unless `prompt` is a non-empty list of ids of the real vocabulary."""
    if not prompt:
        raise UsageError("prompt", "no tokens", "at least one token", "give a prompt")
    vocab = spec.shape.real_vocab
    for token in prompt:
        if type(token) is not int or not 0 <= token < vocab:
            expected = f"integer ids from 0 to {vocab - 1}"
            raise UsageError("prompt token id", show(token), expected, "use the model's tokenizer")
