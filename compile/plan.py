"""From options to a Plan: the spec, the work items, the identity and the memory bill.

Planning needs neither torch nor weights, so `--dry-run` answers in a moment on any machine.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from inkling_engine.artifacts.errors import UsageError, show
from inkling_engine.artifacts.layout import engine_id, program_name
from inkling_engine.artifacts.spec import EngineSpec, ModelShape
from inkling_engine.compile.checkpoint import Checkpoint, open_checkpoint, require_shape
from inkling_engine.compile.memory import Bill, fit_pools, memory_bill, require_fit
from inkling_engine.compile.models.inkling.shape import PRESETS, first_layers, preset
from inkling_engine.compile.options import BuildOptions, default_device, make_spec

TINY = Path(__file__).parent / "models" / "inkling" / "tiny"
WHOLE_FILE = 1 << 30
SAMPLES, SAMPLE_BYTES = 64, 1 << 20


@dataclass(frozen=True)
class Plan:
    """What a build will do: `checkpoint` is None for a programs-only engine."""

    options: BuildOptions
    spec: EngineSpec
    checkpoint: Checkpoint | None
    ranks: tuple[int, ...]
    bill: Bill

    @property
    def whole(self) -> bool:
        """Whether the weights of all ranks are converted: the engine can then answer."""
        return self.ranks == tuple(range(self.spec.tp))

    @property
    def items(self) -> tuple[str, ...]:
        """Names of the work items, in order."""
        programs = tuple(program_name(bucket) for bucket in self.spec.buckets)
        weights = tuple(f"weights-rank{rank}" for rank in self.ranks)
        kernels = ("kernels",) if self.spec.device == "cpu" else ()
        return (*kernels, *programs, *weights, "golden")

    def folder(self, digest: str) -> Path:
        """Where the engine goes: `--out`, or a folder named by the engine id."""
        default = Path("artifacts") / engine_id(self.spec, digest)
        return Path(self.options.out) if self.options.out else default


def make_plan(options: BuildOptions, device_memory: int | None = None) -> Plan:
    """Resolve `options`. Raises UsageError, CorruptError or DoesNotFitError."""
    folder = _weights_folder(options)
    checkpoint = open_checkpoint(folder) if folder else None
    shape = preset(options.model)
    if shape is None:
        if checkpoint is None:
            raise _unknown_model(options.model)
        shape = checkpoint.shape
    elif checkpoint:
        require_shape(checkpoint, shape, options.model)
        shape = checkpoint.shape
    name = options.model if options.model in PRESETS else Path(options.model).resolve().name
    if options.layers is not None:
        _require_layers(options.layers, shape, checkpoint)
        name, shape = f"{name}-{options.layers}-layers", first_layers(shape, options.layers)
    device = default_device(options, has_weights=checkpoint is not None)
    spec = make_spec(options, name, shape, device)
    spec = fit_pools(spec, device_memory)
    ranks = _ranks(options, checkpoint)
    return Plan(options, spec, checkpoint, ranks, memory_bill(spec, device_memory))


def fingerprint(checkpoint: Checkpoint | None) -> str:
    """SHA-256 that names the weights: whole files up to 1 GiB, evenly spaced samples above."""
    digest = hashlib.sha256()
    for path in sorted(checkpoint.folder.glob("*.safetensors")) if checkpoint else ():
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as stream:
            if size <= WHOLE_FILE:
                digest.update(stream.read())
                continue
            for i in range(SAMPLES):
                stream.seek((size - SAMPLE_BYTES) * i // (SAMPLES - 1))
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _weights_folder(options: BuildOptions) -> Path | None:
    if options.model in PRESETS:
        if options.checkpoint:
            return Path(options.checkpoint)
        return TINY if options.model == "inkling-tiny" else None
    if options.checkpoint:
        remedy = "drop --checkpoint: the folder given as --model holds its own weights"
        raise UsageError("--checkpoint", options.checkpoint, "a preset as --model", remedy)
    if "/" not in options.model and not Path(options.model).exists():
        raise _unknown_model(options.model)
    return Path(options.model)


def _require_layers(layers: int, shape: ModelShape, checkpoint: Checkpoint | None) -> None:
    """Raise UsageError unless so many first layers can be built by themselves."""
    if checkpoint is not None:
        expected = "a preset without weights: a part of a model answers nothing"
        raise UsageError("layers", f"{layers} of {checkpoint.folder}", expected, "drop layers")
    if not 1 <= layers <= shape.layers:
        raise UsageError("layers", layers, f"1 to {shape.layers}", "choose one of them")


def _unknown_model(model: str) -> UsageError:
    expected = f"a preset ({', '.join(PRESETS)}) or a checkpoint folder"
    return UsageError("--model", show(model), expected, "name one of them")


def _ranks(options: BuildOptions, checkpoint: Checkpoint | None) -> tuple[int, ...]:
    """The ranks whose weights are converted: none for a preset without a checkpoint."""
    if options.rank_weights in (None, "all"):
        return tuple(range(options.tp)) if checkpoint else ()
    if checkpoint is None:
        found, remedy = f"{options.rank_weights} without weights", "add --checkpoint or drop it"
        raise UsageError("--rank-weights", found, "a checkpoint to convert", remedy)
    try:
        ranks = tuple(sorted({int(item) for item in str(options.rank_weights).split(",")}))
    except ValueError:
        ranks = (-1,)
    if not all(0 <= rank < options.tp for rank in ranks):
        expected = f"all, or ranks below --tp {options.tp} such as 0,1"
        raise UsageError("--rank-weights", options.rank_weights, expected, "correct the list")
    return ranks


def require_buildable(plan: Plan) -> None:
    """Refuse, by name, what can be planned but not compiled here."""
    spec = plan.spec
    if spec.device == "cuda":
        import torch

        if torch.version.cuda is None:
            found = f"cuda (for model {spec.model}), with torch {torch.__version__}"
            expected = "a GPU, or at least a CUDA build of torch"
            remedy = "install one, add --dry-run, or build a CPU engine with --device cpu"
            raise UsageError("--device", found, expected, remedy)
    require_fit(spec, plan.bill)


def plan_json(plan: Plan) -> dict[str, object]:
    """The plan as plain JSON values."""
    return {
        "model": plan.spec.model,
        "tp": plan.spec.tp,
        "device": plan.spec.device,
        "arch": plan.spec.arch,
        "dtype": plan.spec.dtype,
        "items": list(plan.items),
        "weights": str(plan.checkpoint.folder) if plan.checkpoint else None,
        "memory": msgspec.to_builtins(plan.bill),
        "spec": msgspec.to_builtins(plan.spec),
    }
