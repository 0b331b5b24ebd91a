"""The batch runner: order, bounds, resumption, shards, ends on the way; its verb."""

from __future__ import annotations

import errno
import gc
import io
import json
import math
import os
import signal
import threading
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batch_rig import (
    SPEC,
    Stops,
    line,
    mixed,
    read_lines,
    stub,
    write_lines,
)
from support.fake_spec import build_spec, tiny_tokenizer
from support.fake_step import open_engine, run_oracle

from inkling_engine.artifacts.errors import FailedError, UsageError
from inkling_engine.runtime import batch_output
from inkling_engine.runtime.batch import BatchRunner, StoppedError, stopped_by_signals
from inkling_engine.runtime.batch_input import Shard
from inkling_engine.runtime.batch_progress import Meter
from inkling_engine.runtime.sampling import SamplingParams

ODD = st.sampled_from(
    [b"", b"\r", b"{}", b"null", b'{"custom_id": "a"}', json.dumps(line("a")).encode()]
)
PIECES = st.lists(st.one_of(ODD, st.binary(max_size=40).map(lambda b: b.replace(b"\n", b""))))


def run(source: Path, output: Path, options: Any = None, **rest: Any) -> bytes:
    """A whole job on a new stub; the output."""
    BatchRunner(stub()[0], options=options).run(source, output, **rest)
    return output.read_bytes()


def part_of(source: Path, output: Path, written: int, options: Any = None, **rest: Any) -> None:
    """A job that is stopped once as many lines are written."""
    engine, seen = stub()
    runner = BatchRunner(engine, options=options)
    with pytest.raises(StoppedError, match="run again to go on"):
        runner.run(source, output, watch=Stops(runner, written), **rest)
    assert not seen.live, "what still ran is aborted"


def test_answers_come_in_order_whatever_ends_first(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", mixed(500))
    engine, _ = stub(tiny_tokenizer())
    summary = BatchRunner(engine).run(source, tmp_path / "out")
    answers = read_lines(tmp_path / "out")
    wanted = [one["custom_id"] if isinstance(one, dict) else None for one in mixed(500)]
    assert [one["custom_id"] for one in answers] == wanted
    assert all((one["response"] is None) != (one["error"] is None) for one in answers)
    assert len({one["id"] for one in answers}) == 500
    failed = [one["error"]["code"] for one in answers if one["error"]]
    assert summary["requests"]["failed"] == len(failed) == 99
    assert summary["errors"] == {code: failed.count(code) for code in set(failed)}
    usages = [one["response"]["body"]["usage"] for one in answers if one["response"]]
    assert summary["tokens"]["completion"] == sum(one["completion_tokens"] for one in usages)
    assert len(summary["latency_seconds"]) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_the_scheduler_is_fed_but_not_flooded(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", [line(str(at)) for at in range(300)])
    engine, seen = stub()
    BatchRunner(engine).run(source, tmp_path / "out")
    assert seen.most == 4 * SPEC.max_running
    engine, seen = stub()
    BatchRunner(engine, max_in_flight=3).run(source, tmp_path / "other")
    assert seen.most == 3
    assert (tmp_path / "out").read_bytes() == (tmp_path / "other").read_bytes()


@pytest.mark.parametrize(("held", "most"), [(1 << 20, 16 * 2), (4000, 10)])
def test_a_slow_line_does_not_let_answers_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int, most: int
) -> None:
    monkeypatch.setattr("inkling_engine.runtime.batch_job._HELD", held)
    source = write_lines(tmp_path / "in", [line(str(at)) for at in range(200)])
    engine, seen = stub()
    runner, ahead = BatchRunner(engine, max_in_flight=2), []
    step = seen.step

    def slow_first() -> Any:
        first = seen.submitted[0]
        if not first.finished and seen.steps < 300:
            seen.live = [(one, 300 if one is first else at) for one, at in seen.live]
        return step()

    seen.step = slow_first  # type: ignore[method-assign]
    runner.run(
        source, tmp_path / "out", watch=lambda m: ahead.append(len(seen.submitted) - m.written)
    )
    assert max(ahead) == most
    assert len(read_lines(tmp_path / "out")) == 200


@settings(max_examples=60)
@given(PIECES, st.booleans(), st.integers(1, 3))
def test_any_bytes_give_one_answer_a_line(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], last: bool, shards: int
) -> None:
    folder = tmp_path_factory.mktemp("job")
    data = b"\n".join(pieces) + b"\n" * (last and bool(pieces))
    (folder / "in").write_bytes(data)
    whole = run(folder / "in", folder / "out")
    stripped = data.removeprefix(b"\xef\xbb\xbf")
    assert whole.count(b"\n") == len(stripped.split(b"\n")) - (stripped.endswith(b"\n") or not data)
    parts = [run(folder / "in", folder / f"{at}", shard=Shard(at, shards)) for at in range(shards)]
    assert b"".join(parts) == whole


def test_shards_add_up_to_the_whole(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", mixed(203))
    whole = run(source, tmp_path / "out")
    shards = [run(source, tmp_path / f"out{at}", shard=Shard(at, 7)) for at in range(7)]
    assert all(shards) and b"".join(shards) == whole


@pytest.mark.parametrize("cuts", [[0], [1], [60], [3, 40, 41, 99]])
def test_a_stopped_job_goes_on_where_it_was(tmp_path: Path, cuts: list[int]) -> None:
    source, output = write_lines(tmp_path / "in", mixed(150)), tmp_path / "out"
    whole = run(source, tmp_path / "whole")
    for cut in cuts:
        part_of(source, output, cut)
        assert whole.startswith((tmp_path / "out.part").read_bytes())
        assert not output.exists()
    lines = (tmp_path / "out.part").read_bytes().count(b"\n")
    engine, seen = stub()
    summary = BatchRunner(engine).run(source, output)
    assert output.read_bytes() == whole
    assert summary["requests"]["resumed"] == lines >= cuts[-1]
    answers = read_lines(output)
    assert len(seen.submitted) == sum(
        one["response"] is not None or one["error"]["code"] == "non_finite_logits"
        for one in answers[lines:]
    )
    usages = [one["response"]["body"]["usage"] for one in answers if one["response"]]
    assert summary["tokens"]["prompt"] == sum(one["prompt_tokens"] for one in usages)
    assert summary["requests"]["failed"] == sum(one["error"] is not None for one in answers)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:-7],
        lambda data: data + b'{"id": "half',
        lambda data: data + b"\0" * 5000,
        lambda data: data + b"\0\n" + data,
        lambda data: data.replace(b"batch_req_", b"batch_rex_"),
        lambda data: b"".join(data.splitlines(keepends=True)[1:]),
        lambda data: data + data.splitlines(keepends=True)[-1],
    ],
)
def test_torn_and_foreign_lines_are_done_again(tmp_path: Path, damage: Any) -> None:
    source, part = write_lines(tmp_path / "in", mixed(100)), tmp_path / "out.part"
    whole = run(source, tmp_path / "whole")
    part_of(source, tmp_path / "out", 30)
    part.write_bytes(damage(part.read_bytes()))
    assert run(source, tmp_path / "out") == whole


def test_other_jobs_are_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = write_lines(tmp_path / "in", mixed(100)), tmp_path / "out"
    part_of(source, output, 30, options={"random_weights": 1}, shard=Shard(0, 2))
    before = (tmp_path / "out.part").read_bytes()
    other = write_lines(tmp_path / "other", mixed(101))
    same: dict[str, Any] = {"options": {"random_weights": 1}, "shard": Shard(0, 2)}
    for words, arguments, path in (
        (
            "found a job of random_weights 1; expected random_weights 2",
            {"random_weights": 2},
            source,
        ),
        ("random_weights 1; expected random_weights None", {}, source),
        ("input_bytes .*input_sha256 ", same["options"], other),
    ):
        with pytest.raises(UsageError, match=words):
            run(path, output, options=arguments, shard=Shard(0, 2))
    with pytest.raises(UsageError, match="shard 0/2; expected shard 1/2"):
        run(source, output, options=same["options"], shard=Shard(1, 2))
    monkeypatch.setattr("inkling_engine.runtime.batch.FORMAT", 2)
    with pytest.raises(UsageError, match="format 1; expected format 2"):
        run(source, output, **same)
    monkeypatch.undo()
    owner = tmp_path / "out.part.json"
    written = owner.read_text()
    owner.write_text(written.replace('"weights":"', '"weights":"others '))
    with pytest.raises(UsageError, match="a job of weights others .*; expected weights "):
        run(source, output, **same)
    owner.write_text(written.replace("00000000", "11111111"))
    with pytest.raises(UsageError, match="engine_id .*11111111; expected .*00000000"):
        run(source, output, **same)
    owner.unlink()
    with pytest.raises(UsageError, match="without a readable out.part.json"):
        run(source, output, **same)
    assert (tmp_path / "out.part").read_bytes() == before


def test_outputs_that_cannot_be(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", [line("x")])
    (tmp_path / "out").write_text("precious")
    (tmp_path / "link").symlink_to("nowhere")
    for name, words in (("out", "exists"), ("link", "exists"), ("none/out", "no folder")):
        with pytest.raises(UsageError, match=words):
            run(source, tmp_path / name)
    assert (tmp_path / "out").read_text() == "precious"
    (tmp_path / "dir.part").mkdir()
    with pytest.raises(UsageError, match="a place to write"):
        run(source, tmp_path / "dir")


def test_an_output_that_appears_on_the_way_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = write_lines(tmp_path / "in", mixed(40)), tmp_path / "out"
    with pytest.raises(UsageError, match="exists"):
        BatchRunner(stub()[0]).run(source, output, watch=lambda _: output.write_text("x"))
    output = tmp_path / "other"
    monkeypatch.setattr(batch_output.Part, "_lock", lambda _: output.write_text("x"))
    engine, seen = stub()
    with pytest.raises(UsageError, match="exists"):  # its writer let go of the lock just now
        BatchRunner(engine).run(source, output)
    assert output.read_text() == "x" and not seen.submitted


def test_the_disk_has_the_output_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, sync, synced = (
        write_lines(tmp_path / "in", mixed(40)),
        os.fsync,
        list[tuple[int, int]](),
    )

    def fsync(handle: int) -> None:
        state = os.fstat(handle)
        synced.append((state.st_ino, state.st_size))
        sync(handle)

    part_of(source, tmp_path / "out", 40)  # all is written, but nobody says how far down
    monkeypatch.setattr(os, "fsync", fsync)
    run(source, tmp_path / "out")
    state, folder = (tmp_path / "out").stat(), tmp_path.stat()
    assert synced[-2] == (state.st_ino, state.st_size)
    assert synced[-1][0] == folder.st_ino


def test_one_process_at_a_time(tmp_path: Path) -> None:
    source, output = write_lines(tmp_path / "in", mixed(40)), tmp_path / "out"
    refused: list[str] = []

    def watch(meter: Meter) -> None:
        if not refused:
            with pytest.raises(UsageError) as caught:
                run(source, output)
            refused.append(str(caught.value))

    BatchRunner(stub()[0]).run(source, output, watch=watch)
    assert "in use" in refused[0] and len(read_lines(output)) == 40


def test_a_fatal_error_is_no_lines_error(tmp_path: Path) -> None:
    source, output = write_lines(tmp_path / "in", mixed(100)), tmp_path / "out"
    whole = run(source, tmp_path / "whole")
    engine, seen = stub()
    seen.fails_at = 9
    with pytest.raises(RuntimeError, match="the device is gone"):
        BatchRunner(engine).run(source, output)
    part = (tmp_path / "out.part").read_bytes()
    assert whole.startswith(part) and 0 < len(part) < len(whole)
    assert run(source, output) == whole


def test_a_full_disk_leaves_what_can_be_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = write_lines(tmp_path / "in", mixed(100)), tmp_path / "out"
    whole = run(source, tmp_path / "whole")

    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            if self.tell() > len(whole) // 2:
                super().write(data[:20])
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    monkeypatch.setattr(os, "fdopen", lambda handle, *_: Full(handle, "r+b"))
    with pytest.raises(
        FailedError, match=r"out\.part: found .*No space left.*run the same command"
    ):
        run(source, output)
    monkeypatch.undo()
    assert run(source, output) == whole


def test_somebodys_abort_is_that_lines_error(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", [line(str(at)) for at in range(5)])
    engine, seen = stub()
    step = seen.step

    def abort_one() -> Any:
        if seen.steps == 0:
            seen.abort(seen.submitted[2])
        return step()

    seen.step = abort_one  # type: ignore[method-assign]
    BatchRunner(engine).run(source, tmp_path / "out")
    codes = [(one["error"] or {}).get("code") for one in read_lines(tmp_path / "out")]
    assert codes == [None, None, "cancelled", None, None]


def test_a_runner_can_be_stopped_and_used_again(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", mixed(50))
    runner = BatchRunner(stub()[0])
    thread = threading.Thread(target=runner.stop)
    thread.start()
    thread.join()
    with pytest.raises(StoppedError):
        runner.run(source, tmp_path / "out")
    assert runner.run(source, tmp_path / "out")["requests"]["total"] == 50


def test_a_real_engine_answers_as_its_oracle(tmp_path: Path) -> None:
    lines = [line(f"{at}", prompt=[30 + at] * (1 + at % 20), max_tokens=4) for at in range(40)]
    source = write_lines(tmp_path / "in", lines)
    with open_engine(SPEC, tiny_tokenizer()) as engine:
        BatchRunner(engine).run(source, tmp_path / "out")
        assert engine.scheduler.accounting()["slots"].live == 0
    for one, answer in zip(lines, read_lines(tmp_path / "out"), strict=True):
        params = SamplingParams(temperature=0, max_tokens=4)
        tokens, reason, _ = run_oracle(SPEC, one["body"]["prompt"], params)
        choice = answer["response"]["body"]["choices"][0]
        hidden = tokens[:-1] if reason == "stop" else tokens
        text = tiny_tokenizer().decode(hidden, skip_special_tokens=True)
        assert (choice["text"], choice["finish_reason"]) == (text, reason)
        assert answer["response"]["body"]["usage"]["completion_tokens"] == len(tokens)


def test_hits_of_the_prefix_cache_are_counted(tmp_path: Path) -> None:
    lines = [line(f"{at}", prompt=[40] * 24 + [50 + at]) for at in range(12)]
    source = write_lines(tmp_path / "in", lines)
    with open_engine(build_spec(snapshots=8)) as engine:
        runner = BatchRunner(engine, max_in_flight=1)
        cached = runner.run(source, tmp_path / "out")["tokens"]["cached"]
        assert cached == engine.scheduler.cached_tokens >= 10 * 24


def test_a_cancelled_job_keeps_what_is_done(tmp_path: Path) -> None:
    source, output = write_lines(tmp_path / "in", mixed(200)), tmp_path / "out"
    whole = run(source, tmp_path / "whole").splitlines()
    engine, seen = stub()
    runner = BatchRunner(engine)

    def watch(meter: Meter) -> None:
        if meter.written > 50:
            runner.cancel()

    summary = runner.run(source, output, watch=watch)
    assert not seen.live and not (tmp_path / "out.part").exists()
    ends = [one.finish_reason for request in seen.submitted for one in request.sequences]
    assert "abort" in ends, "what runs does not go on"
    answers = output.read_bytes().splitlines()
    cancelled = [at for at, one in enumerate(answers) if b'"code":"cancelled"' in one]
    others = [at for at in range(200) if at not in cancelled]
    assert len(answers) == 200 and 50 < cancelled[0] < 100 < len(cancelled)
    assert [answers[at] for at in others] == [whole[at] for at in others]
    assert summary["errors"]["cancelled"] == len(cancelled)
    assert any(b"invalid_json" in answers[at] for at in others if at > cancelled[0])


def test_a_deadline_that_passed(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", [line("a"), b"{", line("b")])
    runner = BatchRunner(stub()[0])
    runner.run(source, tmp_path / "out", deadline=0.0)
    codes = [one["error"]["code"] for one in read_lines(tmp_path / "out")]
    assert codes == ["expired", "invalid_json", "expired"]
    runner.run(source, tmp_path / "again", deadline=1000.0)
    assert [one["error"] is None for one in read_lines(tmp_path / "again")] == [True, False, True]


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("deadline", lambda run, _: run(deadline=math.nan)),
        ("deadline", lambda run, _: run(deadline=-1.0)),
        ("max_in_flight", lambda _, engine: BatchRunner(engine, max_in_flight=-1)),
        ("max_in_flight", lambda _, engine: BatchRunner(engine, max_in_flight=0)),
        ("max_in_flight", lambda *_: BatchRunner.load("no-engine", max_in_flight=0)),
        ("shard", lambda run, _: run(shard=Shard(5, 4))),
        ("shard", lambda run, _: run(shard=Shard(4, 4))),
        ("shard", lambda run, _: run(shard=Shard(-1, 4))),
        ("shard", lambda run, _: run(shard=Shard(0, 0))),
    ],
)
def test_numbers_that_make_no_job_are_refused(tmp_path: Path, field: str, make: Any) -> None:
    source, engine = write_lines(tmp_path / "in", mixed(20)), stub()[0]
    with pytest.raises(UsageError) as caught:
        make(partial(BatchRunner(engine).run, source, tmp_path / "out"), engine)
    assert caught.value.field == field
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_job_is_the_same_however_it_says_that_it_is_not_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = write_lines(tmp_path / "in", mixed(40)), tmp_path / "out"
    monkeypatch.setattr("inkling_engine.runtime.engine.Engine.load", lambda *_, **__: stub()[0])
    monkeypatch.setattr("inkling_engine.runtime.batch.open_chat", lambda *_: None)
    part_of(source, output, 9, options={"random_weights": None, "alone": None})  # of before
    for load in ({}, {"alone": False}, {"alone": None}, {}):
        runner = BatchRunner.load(tmp_path, **load)
        with pytest.raises(StoppedError):
            runner.run(source, output, watch=Stops(runner, 0))
    with pytest.raises(UsageError, match="a job of alone (None|False); expected alone True"):
        BatchRunner.load(tmp_path, alone=True).run(source, output)


def test_a_closed_engine_is_no_lines_error(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", [line("a")])
    engine = open_engine(SPEC)
    engine.close()
    with pytest.raises(FailedError, match="an open engine"):
        BatchRunner(engine).run(source, tmp_path / "out")
    assert (tmp_path / "out.part").read_bytes() == b""


def test_an_input_that_changes_on_the_way_is_noticed(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", mixed(50))

    def watch(meter: Meter) -> None:
        with source.open("ab") as stream:
            stream.write(b"more")

    with pytest.raises(UsageError, match="changed"):
        BatchRunner(stub()[0]).run(source, tmp_path / "out", watch=watch)
    assert not (tmp_path / "out").exists()


def test_a_second_signal_does_what_it_did_before() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stopped_by_signals(BatchRunner(stub()[0])):
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_the_parent_ignores_stays_ignored(signum: signal.Signals) -> None:
    before, runner = signal.signal(signum, signal.SIG_IGN), BatchRunner(stub()[0])
    try:
        with stopped_by_signals(runner):
            assert signal.getsignal(signum) is signal.SIG_IGN
        assert signal.getsignal(signum) is signal.SIG_IGN
    finally:
        signal.signal(signum, before)


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    user, held = "x" * 1000, dict[int, int]()
    source = write_lines(
        tmp_path / "in", (line(f"{user[:200]}{i}", user=user) for i in range(9000))
    )

    def watch(meter: Meter) -> None:
        if (at := meter.written // 1000) not in held:
            gc.collect()  # requests and their choices name each other
            held[at] = tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        BatchRunner(stub()[0]).run(source, tmp_path / "out", watch=watch)
    finally:
        tracemalloc.stop()
    assert source.stat().st_size > 10_000_000
    assert max(held.values()) - held[2] < 1_000_000, held
