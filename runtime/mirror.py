"""A row buffer that several ranks read: filled once, sent to all when it has changed.

The step clears the one-shot lines of the buffer that it reads, so the host fills one of its own, as
it does for a GPU. No torch here.
"""

from __future__ import annotations

import zlib


class Mirror:
    """The host's buffer of one program and the copy that this rank's step reads; an `Upload`."""

    def __init__(self, host: memoryview, own: memoryview) -> None:
        """`host` is what is filled, `own` what the step reads; both are zeroed bytes."""
        self.host, self._own = host, own
        self._changed, self.digest = False, zlib.crc32(host)

    def send(self) -> None:
        """The host's buffer has changed."""
        self._own[:] = self.host
        self._changed, self.digest = True, zlib.crc32(self.host)

    def wait(self) -> None:
        """Nothing to wait for: sending copies."""

    def news(self) -> bytes:
        """The bytes that the other ranks do not have yet: all of the buffer, or none."""
        changed, self._changed = self._changed, False
        return bytes(self.host) if changed else b""

    def receive(self, news: bytes) -> None:
        """Take over what another rank's `news` said."""
        if news:
            self.host[:] = news
            self.send()
