"""Requests that draft, over memory full of garbage: held to plain decoding and to fresh draft state.

After every round a request's tokens, logprobs and target state must be those of its `Trace`, which
was decoded without drafting, and its draft state that of a run which was fed the committed tokens in
one chunk and never drafted wrongly. A round's accepted count is chosen by planting right guesses
before a wrong one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from support.rig import Model, Rig, StepCode, Trace, bits, native_step, record
from torch import Tensor

from inkling_engine.artifacts.spec import Bucket
from inkling_engine.compile.driver import Chunk, Guesses
from inkling_engine.kernels import table

TARGET = ("conv_kv_full", "conv_kv_window", "conv_attn", "conv_mlp")
DRAFT = ("conv_kv_draft_full", "conv_kv_draft_window", "conv_draft_attn", "conv_draft_mlp")
DRAFT_KV = ("kv_draft_full", "kv_draft_window")
WINDOW = 3
Tensors = dict[str, Tensor]


class Round(NamedTuple):
    """One row of a round: its request, and how many guesses are right (None: the engine's own stay)."""

    request: Request
    right: int | None = None


@dataclass
class Request:
    """A request of `trace` in `slot`: `length` of its tokens are committed, the next one is its root.

    `source` is the snapshot slot that its next chunk starts from, `snapshots` the destinations given
    with its next step; `accepted` collects the right guesses of its rounds. Without `drafting` it
    makes no drafts.
    """

    trace: Trace
    slot: int
    length: int = 0
    source: int = 0
    snapshots: Sequence[int] = ()
    drafting: bool = True
    accepted: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """The committed tokens and the root."""
        return self.trace.tokens[: self.length + 1]


@dataclass
class DraftRig:
    """A drafting machine of `model`. Fresh runs are of `whole`, the same with chunks of any length;
    `fresh` keeps the draft state of every sequence of tokens seen so far. Steps run in the first of
    `buckets` that holds them, without any in one made for them."""

    model: Model
    whole: Model
    run: StepCode = native_step
    pages: int = 0
    tolerance: float = 0.0
    buckets: Sequence[Bucket] = ()
    fresh: dict[tuple[float, ...], Tensors] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rig = Rig(self.model, self.run, pages=self.pages)
        self.drafts = self.model.spec.spec_depth

    def extend(self, *batch: tuple[Request, int], spare: int = 2) -> None:
        """One extend step: so many prompt tokens of each request, 0 for its root after the prompt."""
        chunks = [self._chunk(request, count) for request, count in batch]
        tokens = sum(chunk.count for chunk in chunks) + spare
        bucket = self._bucket(Bucket(kind="extend", rows=len(chunks) + 1, tokens=tokens))
        rows = self.rig.rows(bucket, chunks, {r.slot: r.source for r, _ in batch})
        for (request, _), line in zip(batch, rows["admit_ints"], strict=False):
            if not request.drafting:
                line[table.ADMIT_HEADER + table.DRAFT_LIMIT] = 0
        self.rig.replay(bucket, rows)
        for request, _ in batch:
            request.source = 0
            self.check(request)

    def verify(self, *rounds: Round, spare: int = 1) -> None:
        """One round in a bucket with `spare` inert rows."""
        rows, width = len(rounds) + spare, 1 + self.drafts
        made = Bucket(kind="verify", rows=rows, tokens=rows * width, drafts=self.drafts)
        bucket = self._bucket(made)
        chunks = [self._round(item) for item in rounds]
        self.rig.machine.guess(chunks)
        guesses = [self.rig.pools["draft_tokens"][item.request.slot].tolist() for item in rounds]
        valid = [int(self.state(item.request)[table.DRAFTS]) for item in rounds]
        result = self.rig.step(bucket, chunks)
        for row, item in enumerate(rounds):
            self._check_result(item, result.ints[row], result.floats[row], guesses[row], valid[row])
            self.check(item.request)

    def state(self, request: Request) -> Tensor:
        """The request's line of the table."""
        return self.rig.pools["request_state"][request.slot]

    def check(self, request: Request) -> None:
        """Hold the request's state to plain decoding and to a fresh run."""
        self.same(
            target_state(self.rig, request.slot, request.length),
            expected_state(self.model, request.trace, request.length),
            f"length {request.length}: target",
        )
        if request.length >= request.trace.prompt:
            found, expected = (
                draft_state(self.rig, request.slot, request.length),
                self._fresh(request),
            )
            if not request.drafting:
                expected = expected | {"valid": torch.tensor(0, dtype=torch.int32)}
            self.same(found, expected, f"length {request.length}: draft")

    def same(self, found: Tensors, expected: Tensors, what: str) -> None:
        """Assert that both hold the same tensors, to the bit without a tolerance."""
        for name, tensor in expected.items():
            other = found[name]
            if self.tolerance and tensor.is_floating_point():
                equal = torch.allclose(other, tensor, rtol=0, atol=self.tolerance)
            else:
                equal = torch.equal(bits(other), bits(tensor))
            assert equal, f"{what} {name} differs"

    def _bucket(self, made: Bucket) -> Bucket:
        fitting = (
            bucket
            for bucket in self.buckets
            if (bucket.kind, bucket.drafts) == (made.kind, made.drafts)
            and bucket.rows >= made.rows
            and bucket.tokens >= made.tokens
        )
        return next(fitting) if self.buckets else made

    def _chunk(self, request: Request, count: int) -> Chunk:
        left = request.trace.prompt - request.length
        assert 0 <= count <= max(left, 0), "a chunk ends with the prompt"
        fed = request.trace.tokens[request.length : request.length + count]
        first = request.length == 0 or request.source > 0
        chunk = Chunk(
            request.slot,
            request.length,
            fed,
            admit=first,
            sample=count in (0, left),
            temperature=request.trace.temperature,
            snapshots=request.snapshots,
        )
        request.snapshots = ()
        request.length += chunk.count
        return chunk

    def _round(self, item: Round) -> Chunk:
        request, right = item.request, item.right
        guesses = Guesses((), 0)
        given, request.snapshots = request.snapshots, ()
        if right is not None and request.drafting:
            truth = request.trace.tokens[request.length + 1 :][: self.drafts]
            wrong = [(token + 1) % self.model.spec.shape.real_vocab for token in truth]
            guesses = Guesses([*truth[:right], *wrong[right:]], right)
        return Chunk(request.slot, request.length, guesses=guesses, snapshots=given)

    def _check_result(
        self, item: Round, ints: Tensor, floats: Tensor, guesses: list[int], valid: int
    ) -> None:
        """The result line against the trace: exactly the guesses that the target shares count."""
        request, trace, top = item.request, item.request.trace, self.model.spec.limits.top_logprobs
        truth = trace.tokens[request.length + 1 :][: self.drafts]
        right = next((i for i in range(valid) if guesses[i] != truth[i]), valid)
        emitted, start = 1 + right, request.length
        header = ints[: table.RESULT_HEADER].tolist()
        assert header == [request.slot, emitted, 0, start + emitted, valid]
        tokens = ints[table.RESULT_HEADER :]
        width = 1 + self.drafts
        for i in range(emitted):
            line = torch.cat([tokens[i : i + 1], tokens[width:].view(width, top)[i]])
            assert torch.equal(line, trace.ints[start + i]), f"token {i} after {start}"
            probs = torch.cat([floats[i : i + 1], floats[width:].view(width, top)[i]])
            self.same({"": probs}, {"": trace.floats[start + i]}, f"logprobs {i} after {start}")
        request.length += emitted
        request.accepted.append(right)

    def _fresh(self, request: Request) -> Tensors:
        """Draft state of the request's committed tokens, fed in one chunk."""
        key = (request.trace.temperature, *request.tokens)
        if key not in self.fresh:
            rig = Rig(self.whole, self.run, pages=3)
            fed = request.trace.tokens[: request.length]
            chunk = Chunk(1, 0, fed, admit=True, temperature=request.trace.temperature)
            rig.step(self._bucket(Bucket(kind="extend", rows=1, tokens=len(fed))), [chunk])
            self.fresh[key] = draft_state(rig, 1, request.length)
        return self.fresh[key]


DraftRigs = Callable[..., DraftRig]  # a rig that makes so many drafts a round


def feed_prompt(rig: DraftRig, request: Request, order: random.Random) -> None:
    """Feed the prompt in chunks of any size."""
    while left := request.trace.prompt - request.length:
        rig.extend((request, order.randint(1, min(left, 16))))


def run_rounds(rig: DraftRig, request: Request, order: random.Random) -> None:
    """Rounds with any number of right guesses, as far as the trace says what is right."""
    while request.length + 1 + rig.drafts < len(request.trace.tokens):
        rig.verify(Round(request, order.randint(0, rig.drafts)))


def start_from_snapshot(
    rig: DraftRig, giving: Request, snapshot: int, boundary: int, plain: Model
) -> None:
    """A request with the same beginning, then other tokens, takes the snapshot and drafts."""
    prompt = [*giving.trace.tokens[:boundary], 7, 9, 11]
    taking = Request(record(plain, prompt, 12), slot=2, length=boundary, source=snapshot)
    rig.rig.share(2, 1, boundary)
    rig.extend((taking, 1), spare=16)  # a bucket with lines for the shared pages
    feed_prompt(rig, taking, random.Random(boundary))
    run_rounds(rig, taking, random.Random(boundary))
    rig.check(giving)


def target_state(rig: Rig, slot: int, length: int) -> Tensors:
    """Target windows before `length`, oldest first, and the KV that may be seen again."""
    spec = rig.model.spec
    first = max(0, length - spec.shape.local.window + 1)
    return {
        "windows": torch.cat(
            [ring(rig.pools[name][:, slot], length, WINDOW).flatten() for name in TARGET]
        ),
        "kv_full": paged(rig, slot, "full", "", 0, length),
        "kv_window": paged(rig, slot, "window", "", first, length),
    }


def expected_state(model: Model, trace: Trace, length: int) -> Tensors:
    """The same of a trace."""
    first = max(0, length - model.spec.shape.local.window + 1)
    return {
        "windows": trace.windows[length - 1],
        "kv_full": trace.kv_full[:length],
        "kv_window": trace.kv_window[first:length],
    }


def draft_state(rig: Rig, slot: int, length: int) -> Tensors:
    """All that the next round may read of a slot: rings and KV of the depths, stash, tokens, drafts."""
    spec, pools = rig.model.spec, rig.pools
    drafts = spec.spec_depth
    first = max(0, length - drafts)  # of the rows that are computed again
    seen = max(drafts, length - spec.shape.local.window + 1)
    found = {name: ring(pools[name][:, slot], length, spec.conv_ring) for name in DRAFT}
    found["kv_draft_full"] = paged(rig, slot, "full", "draft_", drafts, length + drafts)
    found["kv_draft_window"] = paged(rig, slot, "window", "draft_", seen, length + drafts)
    again = torch.arange(first, length) % drafts
    found["draft_hidden"] = pools["draft_hidden"][slot, again]
    found["recent_tokens"] = pools["recent_tokens"][slot, again[1:]]
    found["draft_tokens"] = pools["draft_tokens"][slot].clone()
    state = pools["request_state"][slot]
    found["root"] = state[[table.LENGTH, table.LAST_TOKEN, table.FINISH]]
    found["valid"] = state[table.DRAFTS].clone()
    return found


def ring(rings: Tensor, length: int, count: int) -> Tensor:
    """The last `count` inputs before `length` of rings [.., RING, C], those before position 0 zeros."""
    positions = torch.arange(length - count, length)
    return rings[..., positions % rings.shape[-2], :].where((positions >= 0)[:, None], 0)


def paged(rig: Rig, slot: int, kind: str, family: str, first: int, end: int) -> Tensor:
    """k and v at KV positions [first, end) through the page table."""
    page, positions = rig.model.spec.page_size, torch.arange(first, end)
    line = rig.pools[f"{kind}_table"][slot]
    pages = line[positions // page % len(line)].long()
    return rig.pools[f"kv_{family}{kind}"][:, pages, :, :, positions % page]
