"""Ranks that torchrun started: every one runs the same script, and rank 0's engine adopts the others.

`RANK`, `WORLD_SIZE` and `LOCAL_RANK` say so. Rank 0 listens on a Unix socket without a file, named after
the launch; in the other processes the load of an engine does not come back: they connect, serve rank 0
until it is done with the engine, and end. What one user's processes say, no other user's can.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Final, NoReturn

from inkling_engine.artifacts.errors import show
from inkling_engine.runtime.errors import FailedError, IncompatibleError, UsageError, UserError

_PATIENCE: Final = 300.0  # seconds until all processes must have come to their load
_PAUSE: Final = 0.05
_HELLO: Final = struct.Struct("!i")
_adopted = False


def place(ranks: int) -> int | None:
    """This process's rank, if torchrun started the `ranks` ranks of an engine; None if an engine starts
    its own. Raises a UserError for another number of processes, or several machines."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    if ranks == 1 or not all(name in os.environ for name in names):
        return None
    rank, world, local = map(_number, names[:3])
    if world != ranks:
        expected = f"{ranks}, one for each rank of the engine"
        raise UsageError("torchrun", f"{world} processes", expected, f"--nproc-per-node {ranks}")
    if rank != local or "LOCAL_WORLD_SIZE" in os.environ and world != _number("LOCAL_WORLD_SIZE"):
        expected, remedy = "all ranks on one machine", "use --nnodes 1"
        raise IncompatibleError("torchrun", "processes on several machines", expected, remedy)
    return rank


def _number(name: str) -> int:
    """The number that a variable of the environment holds."""
    try:
        return int(os.environ[name])
    except ValueError:
        remedy = f"start it with torchrun, or unset {name}"
        raise UsageError(name, show(os.environ[name]), "a number", remedy) from None


def adopt(world: int) -> dict[int, Connection]:
    """Rank 0: a socket to each of the other ranks, once they have all come. UsageError the second time:
    the others have served an engine and ended."""
    global _adopted
    if _adopted:
        expected, remedy = "one engine in a process", "start it without torchrun"
        raise UsageError("torchrun", "a second engine of several ranks", expected, remedy)
    found: dict[int, Connection] = {}
    until = time.monotonic() + _PATIENCE
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(_name())
        door.listen(world)
        while len(found) < world - 1:
            door.settimeout(max(_PAUSE, until - time.monotonic()))
            try:
                one = door.accept()[0]
            except TimeoutError:
                raise _late({*range(1, world)} - found.keys()) from None
            one.settimeout(None)
            if not _ours(one):
                one.close()
                continue
            (rank,) = _HELLO.unpack(one.recv(_HELLO.size, socket.MSG_WAITALL))
            found[rank] = Connection(one.detach())
    _adopted = True
    return found


def serve(rank: int) -> NoReturn:
    """Another rank: serve rank 0 until it is done, and end. What goes wrong is for rank 0 to say, whose
    exit code is the one that counts."""
    from inkling_engine.runtime.rank import load_start, run_over
    from inkling_engine.runtime.rank_messages import Commands

    run_over(load_start, Commands(_join(rank)), code=0)


def _join(rank: int) -> int:
    """A socket to rank 0."""
    until = time.monotonic() + _PATIENCE
    while True:
        one = socket.socket(socket.AF_UNIX)
        try:
            one.connect(_name())
        except OSError:
            one.close()
            if time.monotonic() > until:
                raise _late({0}) from None
            time.sleep(_PAUSE)
            continue
        if not _ours(one):
            raise FailedError("torchrun", "another user's rank 0", "this one's", "start it again")
        one.sendall(_HELLO.pack(rank))
        return one.detach()


def _name(environment: Mapping[str, str] = os.environ) -> str:
    """A name without a file, the same in all processes of a launch and in no others."""
    run, again = (environment.get(f"TORCHELASTIC_{n}", "") for n in ("RUN_ID", "RESTART_COUNT"))
    return f"\0inkling-engine-{os.getuid()}-{environment['MASTER_PORT']}-{run}-{again}"


def _ours(one: socket.socket) -> bool:
    """Whether the other end is a process of the same user."""
    size = struct.calcsize("3i")
    user = struct.unpack("3i", one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1]
    return bool(user == os.getuid())


def _late(ranks: set[int]) -> UserError:
    found = f"no rank {', '.join(map(str, sorted(ranks)))} after {_PATIENCE:.0f} s"
    return FailedError("torchrun", found, "every process to load the engine", "load it in all")
