"""What counters and histograms say of the last half minute: differences between readings, never lifetime values.

A counter that falls has been reset by a restart: what was seen before is forgotten, and nothing is known until the next
reading. So it is where several engines are behind one target and one of them restarts, or joins with all that it has
counted so far.
"""

from collections import deque
from collections.abc import Mapping

WINDOW_S = 30.0
Parts = Mapping[frozenset[tuple[str, str]], float]
"""Counts by labels."""
NO_PARTS: Parts = {}
READINGS_MAX = 256
"""Readings kept of one ratio; a probe looks every half second."""


class Ratio:
    """Growth of one counter over growth of another, over the window: seconds per request, hits per query.

    >>> ratio = Ratio()
    >>> ratio.at(0.0, 100.0, 10.0), ratio.at(1.0, 104.0, 12.0), ratio.at(2.0, 1.0, 1.0), ratio.at(3.0, 4.0, 2.0)
    (None, 2.0, None, 3.0)
    """

    def __init__(self) -> None:
        self._readings: deque[tuple[float, float, float]] = deque(maxlen=READINGS_MAX)
        self._parts: Parts = {}

    def at(self, at_s: float, total: float | None, count: float | None, parts: Parts = NO_PARTS) -> float | None:
        """Take a reading and say the ratio; None where nothing has been counted within the window.

        Args:
            parts: what each engine has counted, where there are several.
        """
        known, self._parts = self._parts, parts
        if total is None or count is None:
            self._readings.clear()
            return None
        readings = self._readings
        if parts.keys() != known.keys() or any(parts[name] < known[name] for name in parts):
            readings.clear()
        if readings and (count < readings[-1][2] or total < readings[-1][1]):
            readings.clear()
        readings.append((at_s, total, count))
        while len(readings) > 2 and at_s - readings[1][0] >= WINDOW_S:
            readings.popleft()
        _, first_total, first_count = readings[0]
        n = count - first_count
        return (total - first_total) / n if n > 0 else None


class Ratios:
    """Ratios by the name of their signal."""

    def __init__(self) -> None:
        self._by_name: dict[str, Ratio] = {}

    def read(
        self,
        values: dict[str, float],
        name: str,
        at_s: float,
        total: float | None,
        count: float | None,
        parts: Parts = NO_PARTS,
    ) -> None:
        """Put the ratio into `values` under `name`, where it is known."""
        ratio = self._by_name.setdefault(name, Ratio()).at(at_s, total, count, parts)
        if ratio is not None:
            values[name] = ratio
