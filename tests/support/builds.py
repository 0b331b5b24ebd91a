"""A two-layer model built twice side by side with one compiler cache: once undisturbed, once killed
ten times on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from support.checkpoints import Config, tiny_config
from support.compiler import Done, Watched, compile_engine, watched

BUCKETS: Final = ("--decode-buckets", "2", "--extend-buckets", "16x2")
PAGES: Final = ("--device", "cpu", "--page-size", "4", "--snapshot-grid", "8")
DECODE, EXTEND = "decode-r0002", "extend-t00016-r0002"
ITEMS: Final = ("kernels", EXTEND, DECODE, "weights-rank0", "golden")
MOMENTS: Final = (
    ("", 0.2),
    ("kernels: started", 0),
    (f"{EXTEND}: started", 0),
    (f"{EXTEND}: started", 2),
    (f"{EXTEND}: started", 5),
    (f"{EXTEND}: done", 0),
    (f"{DECODE}: started", 3),
    ("weights-rank0: started", 0),
    ("golden: started", 0),
    ("verify: started", 0.3),
)


@dataclass
class Builds:
    """Two builds of one engine: `whole` undisturbed, `killed` at MOMENTS, `runs` its progress.

    `left` are the folders beside it after each kill, `second` what a second build of `whole` said
    meanwhile.
    """

    folder: Path
    options: tuple[str, ...]
    left: list[list[Path]] = field(default_factory=list)
    runs: list[list[str]] = field(default_factory=list)
    second: Done | None = None

    @property
    def whole(self) -> Path:
        return self.folder / "whole"

    @property
    def killed(self) -> Path:
        return self.folder / "beside" / "killed"

    def start(self, out: Path) -> Watched:
        """Start a build into `out`."""
        return Watched(*self.options, "--out", out)


def two_layers() -> Config:
    """A window layer with a dense MLP, a full layer with experts, and one draft depth."""
    config = tiny_config()
    config["text_config"] |= {"num_hidden_layers": 2, "local_layer_ids": [0], "dense_mlp_idx": 1}
    config["text_config"] |= {"model_max_length": 64}
    config["mtp_config"] = {"num_nextn_predict_layers": 1, "local_layer_ids": [0]}
    return config


def build_both(folder: Path, checkpoint: Path) -> Builds:
    """Run both builds in `folder` to their ends."""
    builds = Builds(folder, ("--model", str(checkpoint), *PAGES, *BUCKETS))
    with watched(builds.start(builds.whole)) as undisturbed:
        undisturbed.wait_for("kernels: started")
        builds.second = compile_engine(*builds.options, "--out", builds.whole)
        for text, after in MOMENTS:
            _kill(builds, text, after)
        with watched(builds.start(builds.killed)) as last:
            assert last.finish() == 0, last.lines
            builds.runs.append(last.lines)
        assert undisturbed.finish() == 0, undisturbed.lines
    return builds


def _kill(builds: Builds, text: str, after: float) -> None:
    """Start the build again, kill it, and note what is left."""
    with watched(builds.start(builds.killed)) as build:
        build.wait_for(text)
        build.kill(after)
        builds.runs.append(build.lines)
    found = builds.killed.parent.iterdir() if builds.killed.parent.exists() else ()
    builds.left.append([path for path in found if path.is_dir()])
