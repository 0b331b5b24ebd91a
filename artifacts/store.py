"""Engine folders on disk: stage, seal, open, verify, add.

A build writes into a staging folder beside its target. `seal` lists every file with size and
SHA-256 in `manifest.json`, written last, makes everything durable and renames the folder: a target
is whole or absent. `manifest_sha256` is the digest of the manifest's canonical JSON with that one
field empty, so a manifest edited by hand is caught too. `open_manifest` only reads; `verify_files`
proves, and comes after the compatibility check, which may then name the better reason.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from inkling_engine.artifacts.digest import digest, file_digest
from inkling_engine.artifacts.errors import CorruptError, IncompatibleError, UsageError
from inkling_engine.artifacts.layout import MANIFEST, PROGRAMS, REPORT, TOKENIZER, WEIGHTS
from inkling_engine.artifacts.manifest import SCHEMA_VERSION, FileEntry, Manifest

STAGING_PREFIX: Final = ".staging-"
_SCRATCH: Final = STAGING_PREFIX + MANIFEST
_REBUILD: Final = "restore the folder from a sound copy or build it again"
_TAKEN: Final = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


class _Version(msgspec.Struct):
    schema_version: int


def stage(final: Path) -> Path:
    """Return the staging folder of the target `final`, on the same file system.

    The name depends on nothing but the target's, so a later build finds what a dead one left and
    may use or `discard` it. Whoever builds or adds holds a lock of its own meanwhile.
    """
    staging = final.parent / f"{STAGING_PREFIX}{final.name}"
    staging.mkdir(parents=True, exist_ok=True)
    for name in (MANIFEST, _SCRATCH):
        (staging / name).unlink(missing_ok=True)
    return staging


def discard(staging: Path) -> None:
    """Delete a staging folder; anything else is refused by assertion."""
    assert staging.name.startswith(STAGING_PREFIX), f"{staging} is no staging folder"
    shutil.rmtree(staging, ignore_errors=True)


def seal(staging: Path, manifest: Manifest, final: Path) -> Manifest:
    """List the staged files in `manifest`, store it and rename `staging` to `final`.

    Returns the completed manifest. A `final` that holds the same engine already is kept and its
    manifest returned. Raises UsageError if `final` holds anything else.
    """
    _assert_expected(_paths(staging), manifest)
    complete = _completed(manifest, _entries(staging))
    _write_manifest(staging, complete)
    for folder, _, _ in os.walk(staging):
        sync(Path(folder))
    try:
        os.rename(staging, final)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        complete = _existing(final, complete)
        discard(staging)
    sync(final.parent)
    return complete


def open_manifest(folder: Path) -> Manifest:
    """Read a folder's manifest; its files and its own digest are for `verify_files`.

    Raises UsageError without a folder, CorruptError for one that was never sealed or whose
    manifest cannot be read, IncompatibleError for a manifest of a newer schema.
    """
    if not folder.is_dir():
        remedy = "build it with compile-engine"
        raise UsageError("engine folder", folder, "an existing folder", remedy)
    path = folder / MANIFEST
    if not path.is_file() or folder.name.startswith(STAGING_PREFIX):
        found = f"{folder}, which was never sealed"
        raise CorruptError("engine folder", found, f"a build with {MANIFEST}", "build it again")
    return _decode(path.read_bytes(), path)


def verify_files(folder: Path, manifest: Manifest, unread: Collection[str] = ()) -> None:
    """Check the manifest's own digest, then every file: present, listed, right size, right bytes.

    The bytes of `unread` files are left to `verify_file`, which other processes may call meanwhile.
    Raises one CorruptError that names every fault. The rest of an interrupted `add_files` is none.
    """
    verify_manifest(folder, manifest)
    listed = {entry.path: entry for entry in manifest.files}
    found = _paths(folder)
    present = found - {MANIFEST} - _rest(found, manifest)
    faults = [f"extra {path}" for path in sorted(present - listed.keys())]
    for entry in manifest.files:
        if fault := _fault(folder, entry, read=entry.path not in unread):
            faults.append(fault)
    _require_none(faults, folder, manifest)


def verify_file(folder: Path, manifest: Manifest, path: str) -> None:
    """Check one listed file as `verify_files` does; CorruptError if it is not as listed."""
    entry = next(entry for entry in manifest.files if entry.path == path)
    fault = _fault(folder, entry, read=True)
    _require_none([fault] if fault else [], folder, manifest)


def _require_none(faults: list[str], folder: Path, manifest: Manifest) -> None:
    if faults:
        count = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
        found = f"{count}: {', '.join(faults)}"
        expected = f"the {len(manifest.files)} files that {MANIFEST} lists"
        raise CorruptError(f"engine folder {folder}", found, expected, _REBUILD)


def verify_manifest(folder: Path, manifest: Manifest) -> None:
    """Check the manifest's own digest; CorruptError if it was edited after the build."""
    if (expected := _own_digest(manifest)) != manifest.manifest_sha256:
        found = manifest.manifest_sha256 or "none"
        raise CorruptError(f"{folder / MANIFEST} manifest_sha256", found, expected, _REBUILD)


def add_files(folder: Path, staging: Path, manifest: Manifest) -> Manifest:
    """Move the staged files into a sealed folder and replace its manifest in one step.

    `manifest` is the folder's manifest with what the new files change (its weights, say); the new
    files are added to its list. Interrupted at any moment, the folder is still the old engine.
    Raises CorruptError if the folder's manifest was edited, UsageError if a file is there already.
    """
    current = open_manifest(folder)
    verify_manifest(folder, current)
    new = _entries(staging)
    if taken := sorted({entry.path for entry in new} & {entry.path for entry in current.files}):
        found, remedy = ", ".join(taken), "an engine's files never change: build another engine"
        raise UsageError(f"engine folder {folder}", found, "none of these files yet", remedy)
    complete = _completed(manifest, (*current.files, *new))
    _assert_expected({entry.path for entry in complete.files}, complete)
    for path in _rest(_paths(folder), current) - {entry.path for entry in new}:
        (folder / path).unlink()
    for entry in new:
        target = folder / entry.path
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(staging / entry.path, target)
        sync(target.parent)
    sync(folder)
    _write_manifest(folder, complete)
    discard(staging)
    return complete


def _decode(data: bytes, path: Path) -> Manifest:
    """Decode a manifest whose schema this version knows; `path` is for messages."""
    known = f"schema {SCHEMA_VERSION}"
    try:
        version = msgspec.json.decode(data, type=_Version).schema_version
        if version > SCHEMA_VERSION:
            remedy = "update inkling-engine or build the engine again with this version"
            raise IncompatibleError(f"{path} schema_version", version, known, remedy)
        if version < SCHEMA_VERSION:
            raise CorruptError(f"{path} schema_version", version, known, _REBUILD)
        return msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(str(path), str(error), f"a manifest of {known}", _REBUILD) from None


def _paths(folder: Path) -> set[str]:
    """Relative paths of all that is not a folder, links included; a dead writer's scratch is not."""
    found = set()
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        found |= {(Path(parent) / name).relative_to(folder).as_posix() for name in files + links}
    return found - {_SCRATCH}


def _rest(found: set[str], manifest: Manifest) -> set[str]:
    """Of the paths `found` what an interrupted `add_files` left: unlisted files beside which no weights are listed."""
    if manifest.weights:
        return set()
    unlisted = found - {entry.path for entry in manifest.files}
    return {path for path in unlisted if path.startswith((f"{TOKENIZER}/", f"{WEIGHTS}/"))}


def _entries(folder: Path) -> tuple[FileEntry, ...]:
    """Sync and digest every file of a staging folder, in the order of their paths."""
    entries = []
    for name in sorted(_paths(folder) - {MANIFEST}):
        path = folder / name
        assert path.is_file() and not path.is_symlink(), f"{path} is not a regular file"
        sync(path)
        entries.append(FileEntry(path=name, size=path.stat().st_size, sha256=file_digest(path)))
    return tuple(entries)


def _assert_expected(paths: set[str], manifest: Manifest) -> None:
    """The programs and weights on disk are exactly those that the manifest names."""
    named = {program.file for program in manifest.programs}
    named |= {weights.file for weights in manifest.weights} | {manifest.kernel_library} - {""}
    found = {path for path in paths if path.startswith((f"{PROGRAMS}/", f"{WEIGHTS}/"))}
    assert found == named, f"manifest and disk differ in {sorted(found ^ named)}"


def _own_digest(manifest: Manifest) -> str:
    return digest(msgspec.structs.replace(manifest, manifest_sha256=""))


def _completed(manifest: Manifest, files: tuple[FileEntry, ...]) -> Manifest:
    ordered = tuple(sorted(files, key=lambda entry: entry.path))
    listed = msgspec.structs.replace(manifest, files=ordered)
    return msgspec.structs.replace(listed, manifest_sha256=_own_digest(listed))


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write beside the name, make durable, then take the name: readers see old or new."""
    scratch = folder / _SCRATCH
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
    sync(scratch)
    os.replace(scratch, folder / MANIFEST)
    sync(folder)


def sync(path: Path) -> None:
    """Make a file's or folder's content durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _existing(final: Path, wanted: Manifest) -> Manifest:
    """The manifest at `final` if it is the engine `wanted`, built earlier; else UsageError."""
    try:
        found = open_manifest(final)
        verify_files(final, found)
        same = _essence(found) == _essence(wanted)
    except (CorruptError, IncompatibleError, UsageError):
        same = False
    if not same:
        remedy = "choose another --out or delete it"
        raise UsageError("--out", f"{final}, which holds something else", "a free name", remedy)
    return found


def _essence(manifest: Manifest) -> str:
    """Digest of all but the times: two builds of one engine agree in it."""
    files = tuple(entry for entry in manifest.files if not entry.path.startswith(f"{REPORT}/"))
    return _own_digest(msgspec.structs.replace(manifest, created="", files=files))


def _fault(folder: Path, entry: FileEntry, *, read: bool) -> str:
    """What is wrong with one listed file, or nothing; its bytes count if they are `read`."""
    pure, path = PurePosixPath(entry.path), folder / entry.path
    if pure.is_absolute() or ".." in pure.parts:
        return f"{entry.path} lies outside the folder"
    if path.is_symlink() or not path.is_file():
        return f"missing {entry.path}"
    try:
        if (size := path.stat().st_size) != entry.size:
            return f"{entry.path} has {size} bytes, not {entry.size}"
        same = not read or file_digest(path) == entry.sha256
        return "" if same else f"{entry.path} has other content"
    except OSError as error:
        return f"{entry.path} cannot be read ({error.strerror})"
