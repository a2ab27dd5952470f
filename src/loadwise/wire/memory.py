"""A transport in memory: drives the server or the upstream client without a socket, for tests.

The test plays the peer: it `deliver`s bytes, reads `sent`, stops reading (`stall`), hangs up. As with a real
transport the protocol hears of its own `close` later, not inside the call: at the next `deliver` or `settle`.
"""

from __future__ import annotations

import asyncio
from typing import Any


class MemoryTransport(asyncio.Transport):
    """One end of a connection whose other end is the test."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.sent = bytearray()
        """Everything the peer has received."""
        self.is_paused = False
        """The protocol does not want to read."""
        self.is_ended = False
        """The protocol has closed its sending side, or everything."""
        self.is_lost = False
        """The protocol has been told that the connection is gone."""
        self._protocol = protocol
        self._undelivered: list[bytes] = []
        self._stalled = bytearray()
        self._is_stalled = self._is_write_paused = self._is_closing = False
        self._high, self._low = 64 * 1024, 16 * 1024
        protocol.connection_made(self)

    # ---- the peer ----

    def deliver(self, data: bytes) -> None:
        """The peer sends bytes; they wait while the protocol does not read."""
        self.settle()
        if not self._is_closing:
            self._undelivered.append(data)
            self._hand_over()
        self.settle()

    def stall(self) -> None:
        """The peer stops reading."""
        self._is_stalled = True

    def catch_up(self) -> None:
        """The peer reads everything and goes on reading."""
        self._is_stalled = False
        self.sent += self._stalled
        self._stalled.clear()
        if self._is_write_paused:
            self._is_write_paused = False
            self._protocol.resume_writing()
        self.settle()

    def hang_up(self, problem: Exception | None = None) -> None:
        """The peer closes, or the connection breaks."""
        if not self.is_lost:
            if problem is None and not self._is_closing:
                self._protocol.eof_received()
            self._lose(problem)

    def settle(self) -> None:
        """Let the protocol hear of what it has closed."""
        if self._is_closing and not self._stalled and not self.is_lost:
            self._lose(None)

    def take(self) -> bytes:
        """What the peer has received since the last time."""
        taken = bytes(self.sent)
        self.sent.clear()
        return taken

    def _hand_over(self) -> None:
        while self._undelivered and not self.is_paused and not self._is_closing:
            self._protocol.data_received(self._undelivered.pop(0))

    def _lose(self, problem: Exception | None) -> None:
        self.is_lost = self.is_ended = self._is_closing = True
        self._protocol.connection_lost(problem)

    # ---- asyncio.Transport ----

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self._is_closing:
            return
        if not self._is_stalled:
            self.sent += data
            return
        self._stalled += data
        if len(self._stalled) > self._high and not self._is_write_paused:
            self._is_write_paused = True
            self._protocol.pause_writing()

    def close(self) -> None:
        self._is_closing = self.is_ended = True

    def abort(self) -> None:
        self._stalled.clear()
        self.close()

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False
        if not self._is_closing:
            self._hand_over()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.is_ended = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high is not None and low is not None
        self._high, self._low = high, low

    def get_write_buffer_size(self) -> int:
        return len(self._stalled)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("memory", 0) if name == "peername" else default
