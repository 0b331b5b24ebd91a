"""What rank 0 and the other ranks' processes say to each other, one message at a time.

Messages travel over a Unix socket, whose end tells either side that the other one is gone, and which
carries descriptors of memory too, right behind a message that announces them.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from inkling_engine.runtime import errors
from inkling_engine.runtime.errors import FailedError, UserError

REMEDY = "load the engine again; a batch job that is run again goes on where it stopped"


class Start(msgspec.Struct, tag=True, frozen=True):
    """Rank 0: who you are, of how many, and what to load, with rank 0's options."""

    rank: int
    world: int
    folder: str
    steps_per_replay: int = 1
    device_index: int | tuple[int, ...] = 0
    memory: float | None = None
    random_weights: int | None = None


class Proceed(msgspec.Struct, tag=True, frozen=True):
    """Rank 0: native code may be opened."""


class Peers(msgspec.Struct, tag=True, frozen=True):
    """Rank 0: descriptors of the other ranks' blocks follow, in rank order."""


class Replay(msgspec.Struct, tag=True, frozen=True):
    """Rank 0: replay `steps` steps of `program`. `step` is the first one's number, `rows` the row
    buffer if it has changed since its last sending, `digest` that of the buffer as it now is."""

    program: str
    steps: int
    step: int
    rows: bytes
    digest: int


class Digest(msgspec.Struct, tag=True, frozen=True):
    """Rank 0: tell the digests of your replicated pools, once all replays have ended."""


class Measure(msgspec.Struct, tag=True, frozen=True):
    """Rank 0: tell what you take of memory."""


class Confirm(msgspec.Struct, tag=True, frozen=True):
    """Rank 0: wait for all replays so far; say that you are ready, if they had the parts of all ranks."""


class Block(msgspec.Struct, tag=True, frozen=True):
    """A rank: all programs are warm; a descriptor of the exchange block follows."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """A rank: waiting for replays."""


class Digests(msgspec.Struct, tag=True, frozen=True):
    """A rank: SHA-256 by pool."""

    digests: dict[str, str]


class Measured(msgspec.Struct, tag=True, frozen=True):
    """A rank: `usage.describe`."""

    usage: dict[str, Any]


class Left(msgspec.Struct, tag=True, frozen=True):
    """A rank, last: it ends because it waited for rank `missing` in vain."""

    missing: int


class Failure(msgspec.Struct, tag=True, frozen=True):
    """A rank, last: what it ended of, as the four parts of a UserError of class `kind`."""

    kind: str
    field: str
    found: str
    expected: str
    remedy: str

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        """Rank `rank` ends because of `error`."""
        if isinstance(error, UserError):
            kind, field = type(error).__name__, f"rank {rank}: {error.field}"
            return cls(kind, field, str(error.found), error.expected, error.remedy)
        found = f"{type(error).__name__} ({error})"
        return cls("FailedError", f"rank {rank}", found, "a rank that goes on", REMEDY)

    def error(self) -> UserError:
        """The same as an exception."""
        kind = getattr(errors, self.kind, FailedError)
        assert issubclass(kind, UserError)
        return kind(self.field, self.found, self.expected, self.remedy)


Command = Start | Proceed | Peers | Replay | Digest | Measure | Confirm
Answer = Block | Ready | Digests | Measured | Left | Failure


def send_handles(connection: Connection, handles: Sequence[int]) -> None:
    """Give descriptors to the other side, which gets ones of its own for the same memory."""
    with socket_of(connection) as one:
        socket.send_fds(one, [b"+"], handles)


def receive_handles(connection: Connection, count: int) -> list[int]:
    """What `send_handles` sent there; EOFError when the other side is gone."""
    try:
        with socket_of(connection) as one:
            found = socket.recv_fds(one, 1, count)[1]
    except OSError:
        raise EOFError from None
    if len(found) != count:
        raise EOFError
    return found


def socket_of(connection: Connection) -> socket.socket:
    """A connection's socket; closing it leaves the connection open."""
    return socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)


class Commands:
    """A rank's end: takes commands, gives answers."""

    def __init__(self, handle: int) -> None:
        """Speak over the socket `handle`."""
        self._connection = Connection(handle)

    def next(self) -> Command:
        """The next command; EOFError when rank 0 is gone."""
        try:
            return msgspec.msgpack.decode(self._connection.recv_bytes(), type=Command)
        except ConnectionError:
            raise EOFError from None

    def answer(self, answer: Answer, handles: Sequence[int] = ()) -> None:
        """Say something to rank 0, if it is there."""
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(answer))
            if handles:
                send_handles(self._connection, handles)
        except OSError:
            raise EOFError from None

    def handles(self, count: int) -> list[int]:
        """The descriptors behind the last command."""
        return receive_handles(self._connection, count)

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._connection.fileno()
