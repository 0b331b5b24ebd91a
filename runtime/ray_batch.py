"""Batch jobs on many machines with Ray Data (extra `ray`): rows are shard files, actors are engines.

A shard is an input file of its own. Each actor loads one engine and answers the shards that it is
handed, one after another. An actor that dies is started again and its shard handed out anew; a job
that is run again skips the shards that have their output. In both cases the runner goes on where the
part file of the shard ends, so nothing is done twice. Shards and outputs lie where all nodes see them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from inkling_engine.runtime.debug import check
from inkling_engine.runtime.errors import UsageError

Columns = dict[str, list[str]]


class ShardRunner(Protocol):
    """What answers a file: `batch.BatchRunner`."""

    def run(self, source: Path, output: Path, /) -> Mapping[str, Any]:
        """Answer each line of `source` with a line of `output`, which appears whole at the end, or
        go on where an earlier run was cut short. The summary."""


class EngineRunner:
    """An engine that answers files."""

    def __init__(self, folder: Path, load: Mapping[str, Any]) -> None:
        """Load the engine in `folder` with the keywords `load`."""
        from inkling_engine.runtime.batch import BatchRunner

        self._runner = BatchRunner.load(folder, **load)

    def run(self, source: Path, output: Path, /) -> Mapping[str, Any]:
        """Answer `source` with `output`; the summary."""
        summary = self._runner.run(source, output)
        check(self._runner.engine)
        return summary


class ShardActor:
    """A callable for `Dataset.map_batches`: it opens one engine and answers shard files."""

    def __init__(self, make_runner: Callable[[], ShardRunner], outputs: str) -> None:
        """Answer with what `make_runner` opens here, into the folder `outputs`."""
        self._runner, self._outputs = make_runner(), Path(outputs)

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> Columns:
        """Answer the files in column `shard`: columns `shard`, `output` and `summary`, which is JSON,
        `{}` for a shard that had its output."""
        shards = [str(shard) for shard in batch["shard"]]
        outputs = [output_of(Path(shard), self._outputs) for shard in shards]
        summaries = [
            {} if output.exists() else self._runner.run(Path(shard), output)
            for shard, output in zip(shards, outputs, strict=True)
        ]
        return {
            "shard": shards,
            "output": [str(output) for output in outputs],
            "summary": [json.dumps(dict(summary)) for summary in summaries],
        }


def output_of(shard: Path, outputs: Path) -> Path:
    """Where a shard's answers go: its own name, in the folder of outputs."""
    return outputs / shard.name


def run_shards(
    folder: Path,
    shards: Sequence[Path],
    outputs: Path,
    *,
    actors: int = 1,
    cpus: float = 1,
    gpus: float = 0,
    load: Mapping[str, Any] | None = None,
    make_runner: Callable[[], ShardRunner] | None = None,
) -> list[dict[str, str]]:
    """Answer `shards` into the folder `outputs` with `actors` engines, each on `cpus` and `gpus`.

    The rows of `ShardActor`, in the order of `shards`. Joins the Ray cluster of the environment or
    starts one here. `load` are keywords of `Engine.load`; `make_runner` stands in for the engine.
    Raises UsageError for shards that are no files or would share an output, or without Ray.
    """
    require_shards(shards, outputs)
    try:
        import ray.data
    except ImportError as error:
        remedy = "pip install 'inkling-engine[ray]'"
        raise UsageError("ray", f"none ({error})", "Ray Data", remedy) from error
    outputs = outputs.resolve()
    outputs.mkdir(parents=True, exist_ok=True)
    rows = [{"shard": str(shard.resolve())} for shard in shards]
    opener = make_runner or partial(EngineRunner, folder.resolve(), dict(load or {}))
    answered = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        ShardActor,
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=actors, max_tasks_in_flight_per_actor=1),
        fn_constructor_args=(opener, str(outputs)),
        num_cpus=cpus,
        num_gpus=gpus,
    )  # Ray Data's defaults: an actor that died comes back, and its shard with it
    found = {row["shard"]: row for row in answered.take_all()}
    return [found[row["shard"]] for row in rows]


def require_shards(shards: Sequence[Path], outputs: Path) -> None:
    """Raise UsageError unless `shards` are files, each with an output of its own."""
    if not shards:
        raise UsageError("shards", "none", "at least one file", "name them")
    for shard in shards:
        if not shard.is_file():
            raise UsageError("shards", shard, "a file", "correct the path")
        if shard.resolve().parent == outputs.resolve():
            remedy = "choose another folder for outputs"
            raise UsageError("outputs", outputs, "a folder without shards", remedy)
    name, count = Counter(shard.name for shard in shards).most_common(1)[0]
    if count > 1:
        found = f"{count} files called {name}"
        raise UsageError("shards", found, "file names that differ", "rename them")
