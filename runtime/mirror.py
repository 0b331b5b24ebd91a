"""A row buffer that several ranks read: filled once, sent to all when it has changed.

The step clears the one-shot lines of the buffer that it reads, so the host fills one of its own, on
the CPU as for a GPU. No torch here.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inkling_engine.runtime.metadata import Upload


class Copy:
    """An `Upload` to memory that the host can write."""

    def __init__(self, host: memoryview, own: memoryview) -> None:
        """`host` is what is filled, `own` what the step reads; both are zeroed bytes."""
        self._host, self._own = host, own

    def send(self) -> None:
        """Send all of it."""
        self._own[:] = self._host

    def wait(self) -> None:
        """Nothing to wait for."""


class Mirror:
    """The host's buffer of one program, which goes to this rank's step and to other ranks; an `Upload`."""

    def __init__(self, host: memoryview, upload: Upload) -> None:
        """`host` is what is filled, zeroed bytes; `upload` sends it to where this rank reads it."""
        self.host, self._upload = host, upload
        self._changed, self.digest = False, zlib.crc32(host)

    def send(self) -> None:
        """The host's buffer has changed."""
        self._upload.send()
        self._changed, self.digest = True, zlib.crc32(self.host)

    def wait(self) -> None:
        """Until the last sending is over."""
        self._upload.wait()

    def news(self) -> bytes:
        """The bytes that the other ranks do not have yet: all of the buffer, or none."""
        changed, self._changed = self._changed, False
        return bytes(self.host) if changed else b""

    def receive(self, news: bytes) -> None:
        """Take over what another rank's `news` said."""
        if news:
            self.wait()
            self.host[:] = news
            self.send()
