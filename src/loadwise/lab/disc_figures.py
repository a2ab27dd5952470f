"""Figures to reach with admission and divert, as checks: what is compared, the bound, and whether it holds.

Ratios are of means over the seeds that both presets ran (paired); intervals are bootstraps over those seeds. The best
peer is the one with the best mean of the figure at that load, so it may be another for programs and for resolved ones.
A figure holds by its value; it is `sure` where the whole interval is on one side of the bound. `None` says that a
figure was not asked for there: it is shown beside the others. One seed has no interval: its figures are shown beside
their bounds, and nobody is said to have missed one.

Reference: ORACLE, 5.4 and Fig. 6 (1.8 times ThunderAgent at 64 on the Qwen pair; 102 : 107 at 32 and 117 : 84 : 50 at
64 on the Mistral pair; waits of about two minutes at 32).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .bootstrap import interval
from .disc import CellResult

PEERS = ("vllm_alone", "static_cap", "thunderagent", "thunderagent_state", "admission_only", "oracle")
N_DRAWS = 2000
QWEN, MISTRAL = ("qwen-gh200", "qwen-gh200-tight"), ("mistral-h200",)
"""Worlds made after the paper's two pairs."""
LONG_WAIT_S = 50.0
WAITS_MIN = 100
"""Fewer waits than that say nothing about a share of 80 %."""

Results = Mapping[tuple[str, str, int], Mapping[int, CellResult]]
"""By world, preset and load: results by seed."""


class Estimate(NamedTuple):
    """A figure over seeds, with its 95 % interval (as wide as the line with one seed)."""

    value: float
    low: float
    high: float
    n_seeds: int

    def as_object(self) -> dict[str, Any]:
        """For JSON, which knows no infinity."""
        numbers = [number if math.isfinite(number) else None for number in self[:3]]
        return {"value": numbers[0], "ci95": numbers[1:]}


class Check(NamedTuple):
    """One line of the verdict."""

    key: str
    """World, load, what is compared."""
    op: str
    """`>=`, `<=` or `in`."""
    bound: float | tuple[float, float]
    holds: bool | None
    sure: bool | None
    estimate: Estimate
    published: float | None = None

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "key": self.key,
            "op": self.op,
            "bound": list(self.bound) if isinstance(self.bound, tuple) else self.bound,
            "holds": self.holds,
            "sure": self.sure,
            "n_seeds": self.estimate.n_seeds,
            "published": self.published,
            **self.estimate.as_object(),
        }


def columns_of(
    results: Results, cells: Sequence[tuple[str, str, int]], field: str
) -> list[npt.NDArray[np.float64]] | None:
    """A figure of several cells on the seeds they share, in order of seeds; None where they share none."""
    found = [results.get(cell, {}) for cell in cells]
    seeds = sorted(set(found[0]).intersection(*found[1:]))
    if not seeds:
        return None
    return [np.array([getattr(by_seed[seed], field) for seed in seeds], dtype=np.float64) for by_seed in found]


def estimate(
    columns: Sequence[npt.NDArray[np.float64]],
    combine: Callable[..., Any],
    rng: np.random.Generator,
    n_draws: int = N_DRAWS,
) -> Estimate:
    """`combine` of the means of columns, and its bootstrap over their common rows.

    >>> ones = np.ones(4)
    >>> estimate([3 * ones, 2 * ones], lambda a, b: a - b, np.random.default_rng(0)).high
    1.0
    """
    n = len(columns[0])
    value = float(combine(*(column.mean() for column in columns)))
    if n == 1:
        return Estimate(value, -math.inf, math.inf, 1)
    draws = rng.integers(n, size=(n_draws, n))
    low, high = interval(np.asarray(combine(*(column[draws].mean(axis=1) for column in columns))))
    return Estimate(value, low, high, n)


def quotient(ours: Any, theirs: Any) -> Any:
    """Ours over theirs; nothing over nothing is as good, something over nothing without bound."""
    ours, theirs = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    empty = np.where(ours > 0.0, np.inf, 1.0)
    return np.where(theirs > 0.0, ours / np.where(theirs > 0.0, theirs, 1.0), empty)


def difference(ours: Any, theirs: Any) -> Any:
    """Ours minus theirs."""
    return ours - theirs


class Judge:
    """Draws lines of the verdict from results; each has random numbers of its own, so lines do not depend on others."""

    def __init__(self, results: Results) -> None:
        self.results = results

    def ratio(self, world: str, load: int, ours: str, theirs: str, field: str) -> Estimate | None:
        """One preset's figure over another's."""
        return self._pair(world, load, ours, theirs, field, quotient)

    def gain(self, world: str, load: int, ours: str, theirs: str, field: str) -> Estimate | None:
        """One preset's figure minus another's."""
        return self._pair(world, load, ours, theirs, field, difference)

    def mean(self, world: str, load: int, preset: str, field: str) -> Estimate | None:
        """One preset's figure."""
        columns = columns_of(self.results, [(world, preset, load)], field)
        return None if columns is None else estimate(columns, lambda column: column, np.random.default_rng(0))

    def best(self, world: str, load: int, presets: Iterable[str], field: str) -> str | None:
        """The preset with the largest mean."""
        means = {preset: one.value for preset in presets if (one := self.mean(world, load, preset, field)) is not None}
        return max(means, key=lambda preset: means[preset]) if means else None

    def _pair(
        self, world: str, load: int, ours: str, theirs: str, field: str, combine: Callable[..., Any]
    ) -> Estimate | None:
        columns = columns_of(self.results, [(world, ours, load), (world, theirs, load)], field)
        return None if columns is None else estimate(columns, combine, np.random.default_rng(0))


def checked(
    key: str,
    found: Estimate | None,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    published: float | None = None,
    is_asked: bool = True,
) -> list[Check]:
    """A line, or none where there is nothing to compare."""
    if found is None:
        return []
    op: str = "in"
    bound: float | tuple[float, float] = (low, high)
    if high == math.inf:
        op, bound = ">=", low
    elif low == -math.inf:
        op, bound = "<=", high
    holds = low <= found.value <= high if is_asked else None
    sure = None
    if is_asked:
        is_inside, is_outside = low <= found.low and found.high <= high, found.high < low or found.low > high
        sure = is_inside if holds else is_outside
    return [Check(key, op, bound, holds, sure, found, published)]


def fast_checks(judge: Judge, world: str, load: int) -> list[Check]:
    """Throughput preset: both rates at least the best peer's - 2 %, resolved at least `oracle` - 4 %."""
    found: list[Check] = []
    for field, said in (("programs_per_h", "programs/h"), ("resolved_per_h", "resolved/h")):
        peer = judge.best(world, load, PEERS, field)
        if peer is None:
            continue
        is_lost = load == 32 and world.startswith("mistral") and field == "programs_per_h"
        ratio = judge.ratio(world, load, "fast", peer, field)
        found += checked(f"{world}.{load} fast/{peer} {said}", ratio, low=1.0 if is_lost else 0.98)
    ratio = judge.ratio(world, load, "fast", "oracle", "resolved")
    return found + checked(f"{world}.{load} fast/oracle resolved", ratio, low=0.96)


def quality_checks(judge: Judge, world: str, load: int) -> list[Check]:
    """Quality preset: resolved at least admission only's - 1 %, programs/h the better's of it and caps - 1 %."""
    ratio = judge.ratio(world, load, "quality", "admission_only", "resolved")
    found = checked(f"{world}.{load} quality/admission_only resolved", ratio, low=0.99)
    peer = judge.best(world, load, ("static_cap", "admission_only"), "programs_per_h")
    if peer is not None:
        ratio = judge.ratio(world, load, "quality", peer, "programs_per_h")
        found += checked(f"{world}.{load} quality/{peer} programs/h", ratio, low=0.99)
    return found


def oracle_checks(judge: Judge, world: str, load: int) -> list[Check]:
    """The paper's own figures, losses included, in the worlds that were made after its pools."""
    found: list[Check] = []
    if world in QWEN and load == 64:
        for peer, low, high, published in (("thunderagent", 1.5, 2.1, 1.8), ("thunderagent_state", 1.1, 1.7, 1.4)):
            ratio = judge.ratio(world, load, "oracle", peer, "programs_per_h")
            key = f"{world}.{load} oracle/{peer} programs/h"
            found += checked(key, ratio, low=low, high=high, published=published, is_asked=peer == "thunderagent")
        ratio = judge.ratio(world, load, "oracle", "thunderagent", "output_tokens_per_h")
        key = f"{world}.{load} oracle/thunderagent output tokens/h"
        found += checked(key, ratio, published=1.5, is_asked=False)
    if world in MISTRAL and load == 32:
        ratio = judge.ratio(world, load, "oracle", "thunderagent", "programs_per_h")
        found += checked(f"{world}.{load} oracle/thunderagent programs/h", ratio, high=1.0, published=102 / 107)
    if world in MISTRAL and load == 64:
        for ours, theirs, published in (("oracle", "thunderagent", 117 / 84), ("thunderagent", "vllm_alone", 84 / 50)):
            ratio = judge.ratio(world, load, ours, theirs, "programs_per_h")
            found += checked(f"{world}.{load} {ours}/{theirs} programs/h", ratio, low=1.0, published=published)
    if load == 32 and world in QWEN + MISTRAL:
        wait = judge.mean(world, load, "oracle", "wait_mean_s")
        found += checked(f"{world}.{load} oracle wait, s", wait, low=50.0, high=130.0)
    return found


def wait_checks(judge: Judge, world: str, load: int) -> list[Check]:
    """At 32, where `oracle` waits long: `fast` hardly waits and loses next to nothing."""
    wait = judge.mean(world, load, "oracle", "wait_mean_s")
    if load != 32 or wait is None or wait.value < LONG_WAIT_S:
        return []
    name = f"{world}.{load} long waits: fast"
    ratios = [
        checked(f"{name}/oracle {said}", judge.ratio(world, load, "fast", "oracle", field), low=low)
        for field, said, low in (("programs_per_h", "programs/h", 0.98), ("resolved", "resolved", 0.96))
    ]
    return [
        *checked(f"{name} wait, s", judge.mean(world, load, "fast", "wait_mean_s"), high=30.0),
        *checked(f"{name} - oracle hit", judge.gain(world, load, "fast", "oracle", "hit_ratio"), low=-0.02),
        *(check for found in ratios for check in found),
    ]


def forecast_checks(judge: Judge, world: str, load: int) -> list[Check]:
    """Forecast waits: the 80 % interval holds 75 to 85 %, the point is within a factor of two for 80 %."""
    found: list[Check] = []
    for preset in ("fast", "quality"):
        n_waits = judge.mean(world, load, preset, "forecast_n")
        if n_waits is None or n_waits.value * n_waits.n_seeds < WAITS_MIN:
            continue
        for part, whole, said, low, high in (
            ("forecast_covered", "forecast_n", "waits within their interval", 0.75, 0.85),
            ("forecast_within_2", "forecast_n_far", "waits within a factor of two", 0.8, math.inf),
        ):
            columns = [columns_of(judge.results, [(world, preset, load)], field) for field in (part, whole)]
            known = [column[0] for column in columns if column is not None]
            share = estimate(known, quotient, np.random.default_rng(0))
            found += checked(f"{world}.{load} {preset} {said}", share, low=low, high=high)
    return found


def figures(results: Results) -> list[Check]:
    """Every line that the results have something for, world by world and load by load."""
    judge = Judge(results)
    found: list[Check] = []
    for world, load in sorted({(world, load) for world, _, load in results}):
        for part in (oracle_checks, fast_checks, quality_checks, wait_checks, forecast_checks):
            found += part(judge, world, load)
    return found


def is_monotone(values: Sequence[Estimate], *, rises: bool) -> bool:
    """Whether no step goes the wrong way by more than chance, given each step's change, and the whole way is right.

    >>> is_monotone([Estimate(-1.0, -2.0, 0.0, 9), Estimate(0.2, -1.0, 1.0, 9)], rises=False)
    True
    """
    sign = 1.0 if rises else -1.0
    is_wrong = any(max(sign * one.low, sign * one.high) < 0.0 for one in values)
    return not is_wrong and sign * sum(one.value for one in values) >= 0.0


def check_rows(checks: Sequence[Check]) -> list[tuple[str, ...]]:
    """The table's cells, a heading first."""
    rows: list[tuple[str, ...]] = [("figure", "value", "95 %", "bound", "paper", "verdict")]
    for one in checks:
        interval_ = f"[{shown(one.estimate.low)}, {shown(one.estimate.high)}]" if one.estimate.n_seeds > 1 else ""
        published = "" if one.published is None else shown(one.published)
        rows.append((one.key, shown(one.estimate.value), interval_, _bound(one), published, verdict_of(one)))
    return rows


def verdict_of(check: Check) -> str:
    """`holds` or `MISSED`, with a mark where chance may have decided it; nothing where nothing was asked.

    >>> [verdict_of(checked("key", Estimate(0.9, -math.inf, math.inf, n), low=1.0)[0]) for n in (1, 2)]
    ['one seed', 'MISSED ?']
    """
    if check.holds is None:
        return ""
    if check.estimate.n_seeds == 1:
        return "one seed"
    return ("holds" if check.holds else "MISSED") + ("" if check.sure else " ?")


def shown(value: float) -> str:
    """A number as a table has it.

    >>> shown(0.9123), shown(117.36), shown(math.inf)
    ('0.912', '117', 'inf')
    """
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"


def _bound(check: Check) -> str:
    if check.holds is None:
        return ""
    if isinstance(check.bound, tuple):
        return f"{shown(check.bound[0])} .. {shown(check.bound[1])}"
    return f"{check.op} {shown(check.bound)}"
