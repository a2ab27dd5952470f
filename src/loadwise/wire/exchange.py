"""One request and its one answer, as the gateway's handler sees it.

An exchange is handed to the handler when its request is complete (head and body). It stays open until exactly
one of these happens: `respond`, `end` (after `start`), `abort`, or the client leaves. Answering twice is a
bug and raises; answering a client who has left does nothing, because that race is nobody's fault.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loadwise.wire.connection import Connection

CLOSE = b"connection: close\r\n"
KEEP = b"connection: keep-alive\r\n"

_WAITING, _STREAMING, _ANSWERED, _GONE = range(4)
_WITHOUT_BODY = frozenset((204, 304))


class Exchange:
    """A request, the means to answer it, and news of the client while it waits.

    All header arguments are header blocks (see `loadwise.wire.heads`): bytes of complete lines, trusted. Length,
    framing, date and connection lines are written by the exchange, never by the caller.
    """

    __slots__ = (
        "_chunked",
        "_connection",
        "_held_bytes",
        "_http10",
        "_mute",
        "_persistence",
        "_state",
        "answer_headers",
        "body",
        "context",
        "headers",
        "method",
        "on_disconnect",
        "on_pause",
        "on_resume",
        "path",
        "query",
    )

    def __init__(
        self,
        connection: Connection,
        method: bytes,
        target: bytes,
        headers: dict[bytes, bytes],
        body: bytes,
        persistence: bytes,
    ) -> None:
        self._connection = connection
        self._persistence = persistence
        self._state = _WAITING
        self._chunked = True
        self._http10 = False
        self._mute = method == b"HEAD"
        self._held_bytes = 0
        self.answer_headers = b""
        """A header block that whatever answer is given has besides its own."""
        self.method = method
        """Upper-case bytes, b"POST"."""
        self.path, _, self.query = target.partition(b"?")
        """As sent, still percent-encoded; the query without its question mark."""
        self.headers = headers
        """Lower-case name to value; repeated headers joined by b", "."""
        self.body = body
        """Complete and free of chunk framing."""
        self.context: Any = None
        """Free for the handler."""
        self.on_disconnect: Callable[[], None] | None = None
        """Called once, at once, when the client leaves before its answer is complete."""
        self.on_pause: Callable[[], None] | None = None
        """The client reads more slowly than we write: stop producing."""
        self.on_resume: Callable[[], None] | None = None
        """The client has caught up."""

    @property
    def is_open(self) -> bool:
        """An answer is still owed and the client is still there."""
        return self._state < _ANSWERED

    @property
    def is_started(self) -> bool:
        """`start` has been called: the status can no longer change."""
        return self._state == _STREAMING

    @property
    def is_writable(self) -> bool:
        """False between `on_pause` and `on_resume`."""
        return not self._connection.is_write_paused

    @property
    def peer(self) -> Any:
        """Address of the client, as the transport tells it."""
        return self._connection.peer

    def respond(self, status: int, headers: bytes = b"", body: bytes = b"") -> None:
        """Answer completely, in one write.

        Raises:
            RuntimeError: The exchange is already answered or streaming.
        """
        if self._state != _WAITING:
            return self._refuse_second_answer()
        if self.answer_headers:
            headers += self.answer_headers
        connection = self._connection
        lines = connection.status_lines[status]
        persistence = self._persistence
        if connection.is_draining:
            persistence = self._persistence = CLOSE
        if self._mute or status in _WITHOUT_BODY:
            length = b"\r\n" if status in _WITHOUT_BODY else b"content-length: %d\r\n\r\n" % len(body)
            body = b""
        else:
            length = b"content-length: %d\r\n\r\n" % len(body)
        connection.write(b"".join((lines, headers, persistence, length, body)))
        self._finish()

    def start(self, status: int, headers: bytes = b"") -> None:
        """Begin a streamed answer; `write` pieces of it, then `end`.

        Raises:
            RuntimeError: The exchange is already answered or streaming.
        """
        if self._state != _WAITING:
            return self._refuse_second_answer()
        self._state = _STREAMING
        if self.answer_headers:
            headers += self.answer_headers
        connection = self._connection
        if self._http10:
            # HTTP/1.0 knows no chunks: the end of the body is the end of the connection.
            self._chunked = False
            self._persistence = CLOSE
        if connection.is_draining:
            self._persistence = CLOSE
        self._mute = self._mute or status in _WITHOUT_BODY
        framing = b"transfer-encoding: chunked\r\n\r\n" if self._chunked and status not in _WITHOUT_BODY else b"\r\n"
        connection.write(b"".join((connection.status_lines[status], headers, self._persistence, framing)))

    def write(self, data: bytes) -> None:
        """Send a piece of a streamed answer; an empty piece sends nothing.

        A handler that goes on writing to a paused client until the bound on buffered bytes is passed loses
        the client (`on_disconnect`).

        Raises:
            RuntimeError: The answer has not been started or has already ended.
        """
        if self._state != _STREAMING:
            return self._refuse_piece()
        if not data or self._mute:
            return
        if self._chunked:
            self._connection.write_piece(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            self._connection.write_piece(data)

    def end(self) -> None:
        """Complete a streamed answer.

        Raises:
            RuntimeError: The answer has not been started or has already ended.
        """
        if self._state != _STREAMING:
            return self._refuse_piece()
        if self._chunked and not self._mute:
            self._connection.write(b"0\r\n\r\n")
        self._finish()

    def abort(self) -> None:
        """Give up: what was written is flushed and the connection closed, so that the client sees a broken
        answer."""
        if self._state < _ANSWERED:
            self._persistence = CLOSE
            self._finish()

    def _finish(self) -> None:
        self._state = _ANSWERED
        # Callbacks are bound methods of whoever holds this exchange: dropping them here leaves no cycle to
        # collect.
        self.on_disconnect = self.on_pause = self.on_resume = None
        self._connection.finish(self._persistence is CLOSE, self._held_bytes)

    def _vanish(self) -> Callable[[], None] | None:
        """The client is gone; returns whom to tell."""
        told = self.on_disconnect
        self._state = _GONE
        self.on_disconnect = self.on_pause = self.on_resume = None
        return told

    def _refuse_second_answer(self) -> None:
        if self._state != _GONE:
            raise RuntimeError(f"{self.method!r} {self.path!r} has already been answered")

    def _refuse_piece(self) -> None:
        if self._state != _GONE:
            raise RuntimeError(f"{self.method!r} {self.path!r}: no streamed answer is open")
