"""A constant rate of turns, whatever becomes of them.

A latency counts from the instant at which the request was due, not from the one at which it could be sent, so a slow
answer is also charged to the requests that it delayed (coordinated omission). Sockets are waited for by `select`, whose
limit has microseconds; the timers of an event loop count whole milliseconds, which is the size of what is measured.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from bench.load import PROGRAMS, Connection, Endpoint, LoadFailed, Reply, collector_off, connections, percentile


class RateResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a constant rate met."""

    p50_s: float
    p99_s: float
    """A lower bound where requests stayed unanswered: they count with the time they had waited."""
    answered: int
    unanswered: int
    errors: int
    lateness_p99_s: float
    """How late this client itself was with a request for which a connection was free."""


class _Rate:
    """One run at a constant rate; the loop of `constant_rate` as an object, so that its parts have names."""

    def __init__(self, opened: list[Connection], requests: Sequence[bytes], rate_per_s: float, count: int) -> None:
        self._requests = [requests[i % len(requests)] for i in range(len(opened))]
        self._index = {connection: i for i, connection in enumerate(opened)}
        self._interval_s = 1.0 / rate_per_s
        self._count = count
        self._idle = deque(opened)
        self._busy: dict[Connection, float] = {}
        self._waiting: deque[float] = deque()
        self._made = 0
        self.latencies_s: list[float] = []
        self.lateness_s: list[float] = []
        self.errors = 0

    def run(self, grace_s: float) -> None:
        """Send what is due until all was sent, then wait for what is missing, but not for ever."""
        clock = time.perf_counter
        start_at_s = clock() + 0.01
        end_at_s = start_at_s + self._count * self._interval_s + grace_s
        while (now_s := clock()) < end_at_s:
            self._send_due(start_at_s, now_s)
            if self._made == self._count and not self._busy and not self._waiting:
                return
            next_due_s = start_at_s + self._made * self._interval_s if self._made < self._count else end_at_s
            for connection in select.select(list(self._busy), [], [], max(0.0, next_due_s - clock()))[0]:
                self._read(connection)
        # what was due and could not even be sent, because this client stood still, has waited like the rest
        self._waiting += [start_at_s + number * self._interval_s for number in range(self._made, self._count)]
        self._made = self._count
        # what never came is no better than what came last
        self.latencies_s += [end_at_s - due_s for due_s in (*self._busy.values(), *self._waiting)]

    def _send_due(self, start_at_s: float, now_s: float) -> None:
        while self._made < self._count and (due_s := start_at_s + self._made * self._interval_s) <= now_s:
            self._waiting.append(due_s)
            self._made += 1
            if self._idle:
                self.lateness_s.append(now_s - due_s)
        while self._waiting and self._idle:
            connection = self._idle.popleft()
            connection.send(self._requests[self._index[connection]])
            self._busy[connection] = self._waiting.popleft()

    def _read(self, connection: Connection) -> None:
        try:
            reply = connection.receive()
        except (LoadFailed, OSError):
            reply = Reply(whole=True)
            connection.reopen()
        if reply.whole:
            self.latencies_s.append(time.perf_counter() - self._busy.pop(connection))
            self.errors += reply.status != 200
            self._idle.append(connection)

    @property
    def unanswered(self) -> int:
        """How many requests had no whole answer at the end."""
        return len(self._busy) + len(self._waiting)


def constant_rate(
    endpoint: Endpoint, requests: Sequence[bytes], rate_per_s: float, duration_s: float, grace_s: float = 1.0
) -> RateResult:
    """Send requests at fixed instants over 32 connections, whatever becomes of them.

    Args:
        endpoint: where to.
        requests: one for each connection, so that each program keeps to its own.
        rate_per_s: how many a second.
        duration_s: for how long.
        grace_s: how long to wait for the last answers.

    A connection that closes in the middle counts as an error and is opened again.
    """
    with connections(endpoint.port, PROGRAMS) as opened, collector_off():
        rate = _Rate(opened, requests, rate_per_s, max(1, round(rate_per_s * duration_s)))
        rate.run(grace_s)
    return RateResult(
        p50_s=percentile(rate.latencies_s, 0.5),
        p99_s=percentile(rate.latencies_s, 0.99),
        answered=len(rate.latencies_s) - rate.unanswered,
        unanswered=rate.unanswered,
        errors=rate.errors,
        lateness_p99_s=percentile(rate.lateness_s, 0.99) if rate.lateness_s else 0.0,
    )
