"""What a running request holds besides its tokens, and how many tokens a cache really has, learned from its usage.

Hybrid-attention engines keep a fixed state for each running request; block rounding costs every engine something. A sum
of tokens does not see it: usage = tokens / capacity + n_running * overhead / capacity. It can be learned only while the
engine is not saturated: a full cache reads 1 whatever is in it.

Reference: ORACLE, appendix B.2 (delta, R² .79 to .91; "identifiable only while the engine is not saturated").
"""

import math

import msgspec

from loadwise.kernel.pool import CAPACITY_MAX

SATURATED_RATIO = 0.85
WEIGHT = 0.05
OVERHEAD_MAX_TOKENS = 8000
MIN_RUNNING = 2
READINGS_MIN = 30


class Overhead(msgspec.Struct, kw_only=True):
    """The allowance delta of one backend, in tokens per running request, and its calibrated capacity.

    >>> overhead = Overhead()
    >>> for _ in range(200):
    ...     overhead.read(kv_usage_ratio=0.5, n_running=10, tokens=20_000, capacity=100_000, n_preemptions=0.0)
    >>> round(overhead.tokens, -1)
    3000
    """

    start_tokens: float = 0.0
    reads_saturated: bool = False
    """Believe a full cache, too, and one that has just preempted: a control that shows why not to."""
    learned_tokens: float | None = None
    n_read: int = 0
    n_preemptions: float | None = None
    sums: list[float] = msgspec.field(default_factory=lambda: [0.0] * 5)
    """Of t², tn, n², tu, nu over readings: t tokens, n running, u usage."""

    @property
    def tokens(self) -> int:
        """The estimate."""
        return round(self.start_tokens if self.learned_tokens is None else self.learned_tokens)

    def read(
        self, *, kv_usage_ratio: float, n_running: int, tokens: int, capacity: int, n_preemptions: float | None
    ) -> None:
        """Take one reading of the engine.

        Args:
            n_running: calls in flight, all of them ours.
            tokens: of their contexts.
            capacity: tokens that the cache is believed to hold.
            n_preemptions: the engine's counter; where it has changed since the last reading, this one is passed over.
        """
        is_calm = self.n_preemptions is None or n_preemptions is None or n_preemptions == self.n_preemptions
        self.n_preemptions = n_preemptions
        is_told = self.reads_saturated or (is_calm and kv_usage_ratio < SATURATED_RATIO)
        if not is_told or n_running < MIN_RUNNING or not kv_usage_ratio > 0.0:
            return
        seen = (kv_usage_ratio * capacity - tokens) / n_running
        known = self.start_tokens if self.learned_tokens is None else self.learned_tokens
        self.learned_tokens = known + WEIGHT * (min(max(seen, 0.0), float(OVERHEAD_MAX_TOKENS)) - known)
        self.n_read += 1
        t, n, u = float(tokens), float(n_running), kv_usage_ratio
        self.sums = [kept + new for kept, new in zip(self.sums, (t * t, t * n, n * n, t * u, n * u), strict=True)]

    def calibrated(self) -> tuple[int, int] | None:
        """Capacity and overhead by least squares over all readings, in tokens; None where they do not tell them apart.

        usage = a t + b n, capacity = 1/a, overhead = b/a.
        """
        tt, tn, nn, tu, nu = self.sums
        determinant = tt * nn - tn * tn
        if self.n_read < READINGS_MIN or determinant <= 1e-3 * tt * nn:
            return None
        a, b = (nn * tu - tn * nu) / determinant, (tt * nu - tn * tu) / determinant
        if not a >= 1.0 / CAPACITY_MAX or not math.isfinite(b):
            return None
        return max(round(1.0 / a), 1), round(min(max(b / a, 0.0), float(OVERHEAD_MAX_TOKENS)))
