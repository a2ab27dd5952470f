"""A paid API shows no metrics: what is known of it is what we sent, how it answered, and what its headers say.

Everything is bounded: calls in flight are counted, the last minute's sends are kept as far as they matter, the latency
is a running average (weight .2 of the newest).
"""

import math
import re
from collections import deque
from collections.abc import Mapping

WINDOW_S = 60.0
SENDS_MAX = 65_536
LATENCY_WEIGHT = 0.2
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class ApiMeter:
    """One paid backend's traffic as the gateway sees it.

    >>> meter = ApiMeter(requests_per_minute=10)
    >>> meter.sent(0.0)
    >>> meter.answered(0.0, 2.0, {b"x-ratelimit-remaining-requests": b"7"})
    >>> values = meter.read(2.0)
    >>> values["n_running"], values["request_window_ratio"], values["e2e_s"], values["ratelimit_requests"]
    (0.0, 0.1, 2.0, 7.0)
    """

    def __init__(self, requests_per_minute: int | None) -> None:
        self._limit = requests_per_minute
        self._sends: deque[float] = deque(maxlen=SENDS_MAX)
        self._n_running = 0
        self._latency_s: float | None = None
        self._by_header: dict[str, tuple[float, float]] = {}
        """Signal → (value, when it stops to hold)."""

    def sent(self, at_s: float) -> None:
        """A call goes out."""
        self._sends.append(at_s)
        self._n_running += 1

    def ended(self) -> None:
        """A call is over, however."""
        self._n_running -= 1

    def answered(self, sent_at_s: float, at_s: float, headers: Mapping[bytes, bytes]) -> None:
        """A call was answered whole."""
        self.ended()
        took_s = at_s - sent_at_s
        old_s = took_s if self._latency_s is None else self._latency_s
        self._latency_s = old_s + LATENCY_WEIGHT * (took_s - old_s)
        self.heard(at_s, headers)

    def heard(self, at_s: float, headers: Mapping[bytes, bytes]) -> None:
        """An answer's headers, good or bad: what is left of the rate limits, and for how long that holds."""
        for kind in ("requests", "tokens"):
            left = _number(headers.get(b"x-ratelimit-remaining-%b" % kind.encode()))
            if left is not None:
                resets_s = seconds_of(headers.get(b"x-ratelimit-reset-%b" % kind.encode()))
                self._by_header[f"ratelimit_{kind}"] = (left, at_s + (WINDOW_S if resets_s is None else resets_s))
        asked_s = seconds_of(headers.get(b"retry-after"))
        if asked_s is not None:
            self._by_header["retry_at_s"] = (at_s + asked_s, at_s + asked_s)

    def read(self, at_s: float) -> dict[str, float]:
        """The signals now; what a header said no longer holds after its reset."""
        while self._sends and self._sends[0] <= at_s - WINDOW_S:
            self._sends.popleft()
        values = {"n_running": float(max(self._n_running, 0)), "request_window": float(len(self._sends))}
        if self._limit is not None:
            values["request_window_ratio"] = len(self._sends) / self._limit
        if self._latency_s is not None:
            values["e2e_s"] = self._latency_s
        for name, (value, holds_until_s) in list(self._by_header.items()):
            if holds_until_s <= at_s:
                del self._by_header[name]
            elif name == "retry_at_s":
                values["retry_after_s"] = value - at_s
            else:
                values[name] = value
        return values


def seconds_of(value: bytes | None) -> float | None:
    """Seconds from now, as rate-limit headers write them: `12`, `1.5`, `6m0s`, `120ms`; None where it is neither.

    >>> seconds_of(b"6m0s"), seconds_of(b"120ms"), seconds_of(b"12"), seconds_of(b"soon")
    (360.0, 0.12, 12.0, None)
    """
    plain = _number(value)
    if plain is not None or value is None:
        return plain
    text = value.decode("latin-1").strip().lower()
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def _number(value: bytes | None) -> float | None:
    try:
        number = None if value is None else float(value)
    except ValueError:
        return None
    return number if number is not None and math.isfinite(number) and number >= 0 else None
