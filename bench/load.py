"""Turns of agent programs as a small client sends them: what a request holds, one connection, one latency."""

from __future__ import annotations

import contextlib
import gc
import json
import secrets
import socket
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence

import httptools
import msgspec

PROGRAMS = 32
"""Programs, and connections, of the measured load."""
MARK = "@program-id-here-@"
"""Stands for the program's id in a request; `wrk.lua` knows it too."""
ANSWER_LIMIT_S = 60.0
"""How long one answer may take before the measurement is given up."""

_SYSTEM = (
    "You are an agent that repairs a small repository. Read the files that you are shown, say in one sentence what is "
    "wrong, then answer with one unified diff and nothing else. Never touch a file that you were not shown. Keep the "
    "public names and the order of arguments as they are, and add no dependency."
)
_TASK = "Task of {mark}: the test of the parser fails on an empty line. Which line of the parser is wrong, and why?"


class LoadFailed(RuntimeError):
    """The endpoint did not answer as a chat endpoint does; the message says what came instead."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where turns are sent, and what each must carry."""

    name: str
    port: int
    model: str
    headers: dict[str, str] = {}

    @property
    def url(self) -> str:
        """The address of the chat route."""
        return f"http://127.0.0.1:{self.port}/v1/chat/completions"


class Reply(msgspec.Struct, kw_only=True):
    """One answer, filled while it is read."""

    status: int = 0
    body: bytes = b""
    size_bytes: int = 0
    """Everything that came over the wire, head and framing included."""
    whole: bool = False


def body(model: str, program: str, *, stream: bool) -> bytes:
    """Return the body of one turn: a system prompt and a task of about 600 bytes together."""
    messages = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": _TASK.format(mark=program)},
    ]
    turn: dict[str, object] = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 64}
    if stream:
        turn |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(turn).encode()


def get(port: int, path: str) -> bytes | None:
    """Return the body of a page, or None where none is answered."""
    try:
        with connections(port, 1) as (connection,):
            reply = connection.exchange(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    except (OSError, LoadFailed):
        return None
    return reply.body if reply.status == 200 else None


def program_id(prefix: str, number: int) -> str:
    """Return an id as long as the mark, so that a request keeps its length."""
    return f"{prefix}-{number:09d}"


def new_prefix() -> str:
    """Return a prefix that no earlier run used, so that its programs are new to the gateway."""
    return secrets.token_hex(4)


def request(endpoint: Endpoint, program: str, *, stream: bool, extra: Mapping[str, str] | None = None) -> bytes:
    """Return one turn as bytes of HTTP/1.1."""
    content = body(endpoint.model, program, stream=stream)
    headers = {
        "Host": f"127.0.0.1:{endpoint.port}",
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        "X-Session-ID": program,
        **endpoint.headers,
        **(extra or {}),
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n".encode() + content


class Connection:
    """One keep-alive connection that carries one exchange at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket = self._open()
        self.reply = Reply()
        self._parser: httptools.HttpResponseParser

    def _open(self) -> socket.socket:
        opened = socket.create_connection(("127.0.0.1", self._port), ANSWER_LIMIT_S)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return opened

    def reopen(self) -> None:
        """Give up what was under way and begin with a new connection."""
        self._socket.close()
        self._socket = self._open()

    def fileno(self) -> int:
        """Let `select` wait for this connection."""
        return self._socket.fileno()

    def send(self, content: bytes) -> None:
        """Begin an exchange."""
        self.reply = Reply()
        self._parser = httptools.HttpResponseParser(self)
        self._socket.sendall(content)

    def receive(self) -> Reply:
        """Read what is there, waiting for something if nothing is.

        Raises:
            LoadFailed: the connection closed before the answer was whole.
        """
        content = self._socket.recv(262144)
        if not content:
            raise LoadFailed(f"the connection closed after {self.reply.size_bytes} bytes of an answer")
        self.reply.size_bytes += len(content)
        self._parser.feed_data(content)
        return self.reply

    def exchange(self, content: bytes) -> Reply:
        """Send one request and read the whole answer."""
        self.send(content)
        while not self.receive().whole:
            pass
        return self.reply

    def close(self) -> None:
        """Close the connection, answered or not."""
        self._socket.close()

    # what the parser calls
    def on_body(self, content: bytes) -> None:
        """Keep a piece of the body."""
        self.reply.body += content

    def on_message_complete(self) -> None:
        """Note that the answer is whole."""
        self.reply.status = self._parser.get_status_code()
        self.reply.whole = True


@contextlib.contextmanager
def connections(port: int, count: int) -> Iterator[list[Connection]]:
    """Open some connections and close them at the end."""
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            connection = Connection(port)
            stack.callback(connection.close)
            opened.append(connection)
        yield opened


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Keep the collector of this process out of the latencies that it measures."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def percentile(values: Sequence[float], ratio: float) -> float:
    """Return the smallest value that at least `ratio` of all values do not exceed (nearest rank)."""
    if not values:
        raise ValueError("a percentile of no values")
    ordered = sorted(values)
    rank = -int(-ratio * len(ordered) // 1)  # ceiling
    return ordered[max(0, min(len(ordered), rank) - 1)]


def one_connection(endpoint: Endpoint, requests: Iterator[bytes], duration_s: float) -> float:
    """Send one request after the other for a while.

    Args:
        endpoint: where to.
        requests: an endless supply; what it costs to make the next one is not counted.
        duration_s: when to stop.

    Returns:
        The median latency in seconds, from the first byte sent to the last byte read.

    Raises:
        LoadFailed: an answer other than 200.
    """
    latencies_s: list[float] = []
    clock = time.perf_counter
    with connections(endpoint.port, 1) as (connection,), collector_off():
        until_s = clock() + duration_s
        for content in requests:
            sent_at_s = clock()
            reply = connection.exchange(content)
            received_at_s = clock()
            if reply.status != 200:
                raise LoadFailed(f"{endpoint.name!r} answered {reply.status}: {reply.body[:300]!r}")
            latencies_s.append(received_at_s - sent_at_s)
            if received_at_s > until_s:
                break
    return statistics.median(latencies_s)
