"""Dead reckoning: what an engine's last reading means now, corrected by what we have sent and got back since.

Between two polls of half a second dozens of decisions are made. If each saw the same reading, all would go to the same
backend. So of a reading only *others'* calls are believed to stand still; ours we count ourselves at every instant.

A call on the wire is in one count and not in the other. A reading is therefore compared with the most that we had in
flight within `WIRE_S` before it: calls of ours are never taken for others'.
"""

import msgspec

WIRE_S = 0.5
HISTORY_MAX = 512


class OwnLoad(msgspec.Struct, kw_only=True):
    """Our calls at one backend, and what the last reading said of the rest.

    >>> load = OwnLoad()
    >>> load.change(0.0, 1, 1000)
    >>> load.read(1.0, {"n_running": 3.0, "kv_usage_ratio": 0.5})
    >>> load.change(1.2, 1, 2000)
    >>> load.n_others, load.n_calls, load.kv_usage_ratio(10_000)
    (2.0, 2, 0.7)
    """

    n_calls: int = 0
    tokens: int = 0
    """Of the contexts of our calls in flight."""
    history: list[tuple[float, int, int]] = []
    """(instant, calls, tokens) after each change, oldest first; as far back as a reading may refer to."""
    n_others: float | None = None
    """Calls of other clients, running or waiting, at the last reading; None where it did not tell."""
    kv_read_ratio: float | None = None
    kv_tokens_then: int = 0
    """Of our calls in flight when the KV usage was read."""

    def change(self, at_s: float, n_calls: int, tokens: int) -> None:
        """Our calls become more or fewer."""
        history = self.history
        if not history:
            history.append((float("-inf"), self.n_calls, self.tokens))
        self.n_calls += n_calls
        self.tokens += tokens
        history.append((at_s, self.n_calls, self.tokens))
        if len(history) > HISTORY_MAX:
            del history[: HISTORY_MAX // 2]

    def read(self, observed_at_s: float, values: dict[str, float]) -> None:
        """A reading that was made at `observed_at_s`, perhaps some time ago."""
        since = 0
        for i, (at_s, _, _) in enumerate(self.history):
            if at_s <= observed_at_s - WIRE_S:
                since = i
        if since:
            del self.history[:since]
        then = [entry for entry in self.history if entry[0] <= observed_at_s] or self.history[:1]
        if "n_running" in values:
            most_own = max((n for _, n, _ in then), default=self.n_calls)
            self.n_others = max(values["n_running"] + values.get("n_waiting", 0.0) - most_own, 0.0)
        if "kv_usage_ratio" in values:
            self.kv_read_ratio = values["kv_usage_ratio"]
            self.kv_tokens_then = then[-1][2] if then else self.tokens

    def kv_usage_ratio(self, kv_tokens: int | None) -> float | None:
        """The KV usage now; as it was read where the capacity is unknown."""
        if self.kv_read_ratio is None or not kv_tokens:
            return self.kv_read_ratio
        return min(max(self.kv_read_ratio + (self.tokens - self.kv_tokens_then) / kv_tokens, 0.0), 1.0)
