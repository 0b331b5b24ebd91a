"""Traces: what they say of a run, whether their process ended or died; and the chart of one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.fake_spec import build_spec
from support.fake_step import open_engine

from inkling_engine.artifacts.errors import UsageError
from inkling_engine.runtime.engine import Engine
from inkling_engine.runtime.report import Bucket, Run, chart, render, summarise
from inkling_engine.runtime.sampling import SamplingParams
from inkling_engine.runtime.trace import Trace, read_events, tracing

FACTS = {"tokens": 1, "steps": 1, "drafted": 0, "bucket_tokens": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
ENDLESS = """
import itertools, sys
from pathlib import Path
from support.fake_spec import build_spec
from support.fake_step import open_engine
from inkling_engine.runtime.sampling import SamplingParams
from inkling_engine.runtime.trace import Trace
engine = open_engine(build_spec())
Trace(engine, Path(sys.argv[1]))
for n in itertools.count():
    engine.generate([[30 + n % 90] * 9] * 3, SamplingParams(max_tokens=4))
    print(n, flush=True)
"""


def run(path: Path, *, steps: int = 1, overlap: bool = False) -> Engine:
    with open_engine(build_spec(results=16), steps=steps, overlap=overlap) as engine:
        with tracing(engine, path):
            engine.generate([[30] * 20, [31] * 3, [32] * 2], GREEDY)
        engine.generate([40], GREEDY)  # not traced
    return engine


def spans(events: list[dict[str, Any]], category: str) -> list[dict[str, Any]]:
    return [event for event in events if event.get("cat") == category]


@pytest.mark.parametrize(("steps", "overlap"), [(1, False), (1, True), (5, True)])
def test_a_trace_tells_every_replay_and_row(tmp_path: Path, steps: int, overlap: bool) -> None:
    run(tmp_path / "run.json", steps=steps, overlap=overlap)
    events = json.loads((tmp_path / "run.json").read_text())
    assert events == list(read_events(tmp_path / "run.json"))
    replays = spans(events, "replay")
    assert sum(replay["args"]["prompt_tokens"] for replay in replays) == 25
    assert sum(replay["args"]["new_tokens"] for replay in replays) == 15
    assert {replay["tid"] for replay in replays} == {0}
    rows = spans(events, "prompt") + spans(events, "decode")
    assert len(rows) == sum(replay["args"]["rows"] for replay in replays)
    prompt = [
        row["args"]["tokens"] for row in spans(events, "prompt") if row["name"] == "prompt 0.0"
    ]
    assert prompt == [16, 4]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slots = {row["tid"] for row in rows}
    assert names == {0: "replays", **{slot: f"slot {slot}" for slot in slots}} and 0 not in slots
    for earlier, later in pairwise(replays):
        assert earlier["ts"] + earlier["dur"] <= later["ts"] + 0.2, "spans of a track lie apart"
    assert all(event["args"]["ahead_us"] >= 0 for event in replays)


def test_counters_follow_the_pools(tmp_path: Path) -> None:
    run(tmp_path / "run.json")
    events = list(read_events(tmp_path / "run.json"))
    slots = [event["args"]["live"] for event in events if event["name"] == "slots"]
    assert (max(slots), slots[-1], len(slots)) == (3, 0, len(spans(events, "replay")))
    assert all(sum(e["args"].values()) == 39 for e in events if e["name"] == "full_pages")
    assert [e["args"] for e in events if e["name"] == "queue"][-1] == {"waiting": 0}


def test_a_killed_process_leaves_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    command = [sys.executable, "-c", ENDLESS, str(path)]
    search = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": search}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout
        assert [process.stdout.readline() for _ in range(3)][-1] == b"2\n"
        process.send_signal(signal.SIGKILL)
    events = json.loads(path.read_text() + "]")
    assert len(spans(events, "replay")) >= 12
    assert list(read_events(path)) == events
    chart(path, tmp_path / "chart.svg")


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run(path)
    whole = list(read_events(path))
    text = path.read_text().removesuffix("\n]\n")
    path.write_text(text[:-5])
    assert list(read_events(path)) == whole[:-1]
    path.write_text(text.replace('"dur"', "dur", 1))
    with pytest.raises(UsageError, match="TRACE"):
        list(read_events(path))


@pytest.mark.parametrize("content", [None, "", "text", '{"traceEvents": []}', "[\n]\n"])
def test_what_is_no_trace_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "run.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match="TRACE"):
        chart(path, tmp_path / "chart.svg")
    assert not (tmp_path / "chart.svg").exists()


def test_a_trace_or_chart_that_cannot_be_written(tmp_path: Path) -> None:
    with open_engine(build_spec()) as engine:
        with pytest.raises(UsageError, match="--trace"):
            Trace(engine, tmp_path)
        assert engine.observers == []
    run(tmp_path / "run.json")
    with pytest.raises(UsageError, match="--out"):
        chart(tmp_path / "run.json", tmp_path)


@pytest.mark.parametrize(
    "event",
    [
        {"ph": "X", "cat": "replay"},
        {"ph": "X", "cat": "replay", "name": "a", "dur": 1, "args": {"tokens": 1}},
        {"ph": "X", "cat": "replay", "name": "a", "dur": "1", "args": FACTS},
        {"ph": "X", "cat": "replay", "name": "a", "dur": 1, "args": FACTS | {"bucket_tokens": 0}},
        {"ph": "C", "name": "slots", "ts": 1, "args": {"free": 1, "live": "x"}},
        {"ph": "C", "name": "slots", "ts": 1, "args": {"free": 1, "live": None}},
        {"ph": "C", "name": "slots", "ts": 1, "args": [1]},
    ],
)
def test_a_file_of_other_events_is_refused(tmp_path: Path, event: dict[str, Any]) -> None:
    path = tmp_path / "run.json"
    good = {"ph": "X", "cat": "replay", "name": "a", "dur": 1, "args": FACTS}
    path.write_text(f"[\n{json.dumps(good)},\n{json.dumps(event)},\n")
    with pytest.raises(UsageError, match="TRACE"):
        chart(path, tmp_path / "chart.svg")


def test_a_full_disk_ends_the_trace_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with open_engine(build_spec()) as engine, tracing(engine, Path("/dev/full")):
        (done,) = engine.generate([30, 31], GREEDY)
    assert len(done.choices[0].token_ids) == 5
    assert caplog.text.count("the trace ends here") == 1


def test_a_summary_is_that_of_the_run(tmp_path: Path) -> None:
    run(tmp_path / "run.json")
    found = chart(tmp_path / "run.json", tmp_path / "chart.svg")
    extend = found.buckets["extend-t00016-r0004"]
    assert (extend.replays, extend.used, extend.places) == (2, 25, 32)
    assert found.live.keys() == {"slots", "full_pages", "window_pages", "snapshots"}
    assert max(share for _, share in found.live["slots"]) == 3 / 4
    assert found.live["slots"][-1] == (found.end, 0.0)
    texts = [node.text for node in ElementTree.parse(tmp_path / "chart.svg").iter() if node.text]
    assert any("extend-t00016-r0004" in str(text) for text in texts)
    assert any("slots: peak 75.0%" in str(text) for text in texts)


def test_the_chart_shows_padding_and_peaks() -> None:
    run = Run({"decode-r0004": Bucket(3, 25, 100, 0.5)}, end=1e6)
    peak = 7 * 70_000
    run.live["slots"] = [(float(t), 0.9 if t == peak else 0.1) for t in range(0, 10**6, 7)]
    svg = render(run)
    root = ElementTree.fromstring(svg)
    assert "75.0% padding, 3 replays, 0.5 s" in svg and "peak 90.0%" in svg
    assert len(svg) < 20_000, "a long run is drawn by pixels"
    (line,) = [n.attrib["d"] for n in root.iter() if n.attrib.get("stroke-width")]
    heights = [float(point.split()[1]) for point in line[1:].split("L")]
    assert len(set(heights)) == 2, "and the peak is not lost"
    bars = [float(node.attrib["width"]) for node in root.iter() if node.tag.endswith("rect")][1:3]
    assert bars[0] / sum(bars) == pytest.approx(0.25, abs=0.001)


def test_the_cache_is_drawn_beside_what_is_live() -> None:
    args = {"free": 2, "live": 1, "pinned": 5}
    run = summarise([{"ph": "C", "name": "full_pages", "args": args, "ts": 1.0}])
    assert (run.live, run.held) == ({"full_pages": [(1.0, 1 / 8)]}, {"full_pages": [(1.0, 6 / 8)]})
    assert render(run).count("stroke-dasharray") == 1
    other: dict[str, Any] = {"ph": "C", "name": "queue", "args": {"waiting": 3}, "ts": 1.0}
    assert summarise([other]).live == {}
