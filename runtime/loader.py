"""From an engine folder to something that runs, in checked phases, each timed.

manifest -> compatibility -> digests -> (a probe in a child process) -> torch and the device's
context -> weights -> programs -> pools -> bind -> (warm-up and capture). No native code of the
folder is opened here before its digests hold and the probe has come back, or is remembered. An engine
of several ranks starts the others' processes once its manifest and programs are known to be sound;
each rank then checks and reads weights of its own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from inkling_engine.artifacts import layout
from inkling_engine.artifacts.compat import Environment, machine_memory, require
from inkling_engine.artifacts.errors import show
from inkling_engine.artifacts.manifest import Manifest
from inkling_engine.artifacts.store import open_manifest, verify_file, verify_files
from inkling_engine.runtime import debug, launched, probe
from inkling_engine.runtime.drafts import replay_steps
from inkling_engine.runtime.errors import DoesNotFitError, IncompatibleError, UsageError
from inkling_engine.runtime.timing import Timings
from inkling_engine.runtime.tokens import Tokenizer
from inkling_engine.runtime.usage import planned

if TYPE_CHECKING:
    from torch import Tensor

    from inkling_engine.runtime.binding import Loaded
    from inkling_engine.runtime.replay import RunnerFactory
    from inkling_engine.runtime.seat import Seat

log = logging.getLogger("inkling_engine.load")
_WORD = 2**63


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Choices of a load.

    random_weights: seed to draw weights with, for engines that have none; all ranks draw shares of one
    model. memory: the most that
    the engine may take, in bytes, or up to 1 as a fraction of the machine's; None is what is free
    now; all ranks together on the CPU, each rank on its GPU. programs: makes what runs the steps in place
    of the folder's programs (then no native code of the folder is opened). steps_per_replay: how many
    steps (tokens, or rounds of drafting) a replay of decoding rows takes while no prompt waits; the same
    tokens come, in larger portions. device_index: which of the GPUs that CUDA shows; of several ranks
    rank 0's, with those behind it for the others, or one for each rank, the same again if wanted.
    alone: rank 0 of several runs without the others, to be measured: what it says means nothing.
    """

    random_weights: int | None = None
    memory: float | None = None
    programs: RunnerFactory | None = None
    steps_per_replay: int = 1
    device_index: int | tuple[int, ...] = 0
    alone: bool = False


def load(folder: Path, options: LoadOptions) -> Loaded:
    """Open, check and bind the engine in `folder`; every refusal is a UserError. Under torchrun this
    comes back in rank 0 alone."""
    _check_words(options)
    place = None if options.alone else launched.place(open_manifest(folder).spec.tp)
    if place:
        launched.serve(place)
    timings = Timings()
    manifest = _open(folder, options, timings)
    if not _all_ranks(manifest, options):
        return _load(folder, manifest, options, timings, None)
    from inkling_engine.runtime.ranks import Ranks

    tp = manifest.spec.tp
    ranks = Ranks.spawn(tp) if place is None else Ranks(launched.adopt(tp))
    try:
        ranks.start(
            str(folder.absolute()),
            steps=options.steps_per_replay,
            device=options.device_index,
            memory=options.memory,
            drawn=options.random_weights,
        )
        return _load(folder, manifest, options, timings, ranks)
    except BaseException:
        ranks.close()
        raise


def load_rank(folder: Path, options: LoadOptions, seat: Seat) -> Loaded:
    """Load rank `seat.rank`, while rank 0 checks and probes all but its weights."""
    manifest = open_manifest(folder)
    if options.random_weights is None:
        verify_file(folder, manifest, layout.weights_file(seat.rank))
    return _load(folder, manifest, options, Timings(), seat)


def _load(
    folder: Path, manifest: Manifest, options: LoadOptions, timings: Timings, seat: Seat | None
) -> Loaded:
    indices = _indices(options, manifest.spec.tp if seat else 1)
    index = indices[seat.rank if seat else 0]
    name = "cpu" if manifest.spec.device == "cpu" else f"cuda:{index}"
    follows = seat is not None and seat.rank > 0
    known = follows or (not debug.active() and probe.remembers(manifest))
    child = None if options.programs or known else probe.start(folder, name)
    try:
        with timings.phase("import"):
            import torch

            from inkling_engine.runtime import binding, graphs
        _require_devices(manifest.spec.device, indices)
        here = nullcontext() if name == "cpu" else torch.cuda.device(index)
        with here, _memory_errors(name):
            if name != "cpu":
                with timings.phase("context"):
                    torch.cuda.synchronize()
            if name != "cpu" or not follows:  # the machine's memory is for all ranks
                sharing = len(indices) if name == "cpu" else indices.count(index)
                need = sharing * sum(planned(manifest).values())
                _require_memory(need, options.memory, manifest.spec.device)
            torch.set_num_threads(manifest.spec.threads)
            values = _weights(folder, manifest, options, name, timings, seat)
            with timings.phase("probe"):
                if child:
                    probe.finish(child, folder)
                    probe.remember(manifest)
                if seat:
                    seat.proceed()
            with timings.phase("programs"):
                steps = options.steps_per_replay
                opened = options.programs or graphs.open_programs(folder, manifest, name, steps)
                tokenizer = None if follows else Tokenizer.open(folder)
            return binding.assemble(
                manifest, values, opened, tokenizer, timings, device=name, steps=steps, seat=seat
            )
    finally:
        if child and child.returncode is None:
            probe.stop(child)


def _weights(
    folder: Path,
    manifest: Manifest,
    options: LoadOptions,
    device: str,
    timings: Timings,
    seat: Seat | None,
) -> dict[str, Tensor]:
    """The rank's weights on `device`, read or drawn."""
    import torch

    from inkling_engine.runtime import weights

    with timings.phase("weights"):
        rank = seat.rank if seat else 0
        if options.random_weights is None:
            values = weights.read_weights(folder / layout.weights_file(rank), manifest, device)
        else:
            values = weights.random_weights(manifest, options.random_weights, device, rank)
        if device != "cpu":
            torch.cuda.synchronize()
    size, seconds = sum(value.nbytes for value in values.values()) / 1e9, timings["weights"]
    log.info("weights: %.3f GB in %.3f s, %.2f GB/s", size, seconds, size / seconds)
    return values


def _check_words(options: LoadOptions) -> None:
    """Raise UsageError for numbers that no machine has, and no message to a rank."""
    seed, memory, given = options.random_weights, options.memory, options.device_index
    if seed is not None and not -_WORD <= seed < _WORD:
        raise UsageError(
            "--random-weights", show(seed), "a seed of 64 bits", "choose a smaller one"
        )
    if memory is not None and not 0 < memory < _WORD:
        remedy = "give bytes, or up to 1 as a fraction"
        raise UsageError("--memory", show(memory), "more than nothing, in 64 bits", remedy)
    for index in (given,) if isinstance(given, int) else given:
        if not -_WORD <= index < _WORD:
            raise UsageError("--device-index", show(index), "the number of a GPU", "correct it")


def _indices(options: LoadOptions, ranks: int) -> tuple[int, ...]:
    """The number of each rank's device."""
    given = options.device_index
    found = tuple(range(given, given + ranks)) if isinstance(given, int) else given
    if len(found) != ranks:
        expected = f"one number, or one for each of {ranks} rank(s)"
        raise UsageError("--device-index", found, expected, "correct the list")
    return found


def _require_devices(kind: str, indices: tuple[int, ...]) -> None:
    """Raise unless the engine's device is here, and these numbers of it."""
    import torch

    if kind == "cuda" and not torch.cuda.is_available():
        remedy = "run it where an NVIDIA GPU and its driver are"
        raise IncompatibleError("device", "no usable CUDA device", "a GPU", remedy)
    count = torch.cuda.device_count() if kind == "cuda" else len(indices)
    if bad := [index for index in indices if not 0 <= index < count]:
        found = f"{bad[0]}, of {len(indices)} rank(s) with one device each"
        expected = f"0 to {count - 1}, of {count} {kind} device(s)"
        remedy = "choose one for each rank, or build with a smaller --tp"
        raise UsageError("--device-index", found, expected, remedy)


def _open(folder: Path, options: LoadOptions, timings: Timings) -> Manifest:
    """Everything that can be refused without torch."""
    with timings.phase("manifest"):
        manifest = open_manifest(folder)
    with timings.phase("compat"):
        for mismatch in require(manifest, Environment.current()):
            log.warning(
                "%s: built %s, found %s; %s",
                mismatch.field,
                mismatch.built,
                mismatch.found,
                mismatch.remedy,
            )
    if not options.programs:
        _require_scratch()
    most = replay_steps(manifest.spec)
    if not 1 <= options.steps_per_replay <= most:
        remedy = "choose fewer steps"
        raise UsageError("--steps-per-replay", options.steps_per_replay, f"1 to {most}", remedy)
    with timings.phase("digests"):
        others = [layout.weights_file(rank) for rank in range(1, manifest.spec.tp)]
        verify_files(folder, manifest, unread=others if _all_ranks(manifest, options) else ())
    if not manifest.weights and options.random_weights is None:
        remedy = f"run `inkling-engine attach-weights {folder} CHECKPOINT`, or use --random-weights"
        raise UsageError(
            "engine folder", f"{folder}, programs only", "an engine with weights", remedy
        )
    if manifest.spec.tp > 1:
        _require_ranks(manifest, options)
    return manifest


def _all_ranks(manifest: Manifest, options: LoadOptions) -> bool:
    """Whether all ranks of several run."""
    return manifest.spec.tp > 1 and not options.alone


def _require_scratch() -> None:
    """Raise UsageError unless torch can unpack programs where the environment says."""
    given = (name for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR") if os.environ.get(name))
    name = next(given, "TMPDIR")
    folder = os.environ.get(name, "/tmp")
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(name, folder, "a writable folder for a while", f"set {name} to one")


def _require_ranks(manifest: Manifest, options: LoadOptions) -> None:
    """Raise unless all ranks can run here, or rank 0 alone."""
    tp = manifest.spec.tp
    if not _all_ranks(manifest, options):
        log.warning(
            "rank 0 of %d runs alone, without the sums over ranks: its tokens mean nothing", tp
        )
        return
    if options.programs:
        found, expected = f"tp {tp}, with code of your own for its programs", "tp 1"
        remedy = "build with --tp 1, or measure one rank with --alone"
        raise IncompatibleError("engine target", found, expected, remedy)
    absent = sorted({*range(tp)} - {entry.rank for entry in manifest.weights})
    if absent and options.random_weights is None:
        found = f"no weights of rank {', '.join(map(str, absent))}"
        expected = f"those of ranks 0 to {tp - 1}"
        raise UsageError("engine folder", found, expected, "build it without --rank-weights")


def _require_memory(need: int, limit: float | None, device: str) -> None:
    """Raise DoesNotFitError if `need` bytes are more than allowed, or than the device has."""
    free, whole = _device_memory() if device == "cuda" else (_free_memory(), machine_memory())
    if limit is None:
        allowed, what = free, "free memory"
    else:
        fraction = isinstance(limit, float) and limit <= 1
        allowed = int(limit * whole) if fraction else int(limit)
        what = "--memory"
    if need > allowed:
        found = f"{need:,} bytes for weights, pools and rows"
        remedy = "build with fewer --max-running or a smaller --max-context, or use more memory"
        raise DoesNotFitError("memory", found, f"at most {allowed:,} ({what})", remedy)


@contextmanager
def _memory_errors(device: str) -> Iterator[None]:
    """Raise DoesNotFitError if the driver has no memory, for more than the plan counts takes some: the
    context, the code of kernels, other processes."""
    try:
        yield
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        found = str(error).partition("\n")[0]
        remedy = "end what else runs there, or build with fewer --max-running"
        raise DoesNotFitError("memory", found, f"room on {device}", remedy) from error


def _device_memory() -> tuple[int, int]:
    """Free and all bytes of the current GPU."""
    import torch

    free, whole = torch.cuda.mem_get_info()
    return free, whole


def _free_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that can be had without swapping; the whole machine's where that is not told."""
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return machine_memory()
