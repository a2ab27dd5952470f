"""From the samples of several runs to the figures of the gateway's report, and to whether each reaches its bound."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Mapping, Sequence
from typing import TypedDict

from bench.answers import Verified

ENGINE = "engine"
BOUNDS = (("added_p50_ms", "<=", 0.5), ("added_p99_ms", "<=", 5.0))
PEER_BOUNDS = {"litellm": 100.0, "smg": 1.5, "vllm-router": 1.0}
"""How many times a peer's rate ours must be, streamed and not; the last is the aim, not a promise."""
KINDS = ("plain", "stream")

_HOLDS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}


class Samples:
    """Per target and figure one value a run; a run that did not count has none."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, dict[int, float]]] = {}
        self.errors: dict[str, dict[str, int]] = {}

    def put(self, target: str, key: str, run: int, value: float) -> None:
        """Keep what one run measured."""
        self._values.setdefault(target, {}).setdefault(key, {})[run] = value

    def count(self, target: str, what: str, number: int) -> None:
        """Count what went wrong; nothing wrong leaves no trace."""
        if number:
            of_target = self.errors.setdefault(target, {})
            of_target[what] = of_target.get(what, 0) + number

    def series(self, target: str, key: str) -> dict[int, float]:
        """Return run -> value, empty if no run counted."""
        return self._values.get(target, {}).get(key, {})

    def added(self, target: str, key: str) -> dict[int, float]:
        """Return, for each run, what the target adds to the engine's own figure."""
        engine = self.series(ENGINE, key)
        return {run: value - engine[run] for run, value in self.series(target, key).items() if run in engine}

    def ratio(self, target: str, other: str, key: str) -> dict[int, float]:
        """Return, for each run in which both counted, the target's figure over the other's."""
        others = self.series(other, key)
        return {run: value / others[run] for run, value in self.series(target, key).items() if others.get(run)}


class Figures(TypedDict):
    """The parts of a report that are figures."""

    values: dict[str, float]
    ci95: dict[str, list[float]]
    peers: dict[str, dict[str, float]]
    checks: list[dict[str, object]]


def check(key: str, op: str, bound: float, value: float | None) -> dict[str, object]:
    """Return one entry of the report's `checks`; what could not be measured does not hold."""
    return {"key": key, "op": op, "bound": bound, "holds": value is not None and bool(_HOLDS[op](value, bound))}


def _of_gateway(samples: Samples, target: str, verified: Mapping[str, Verified]) -> dict[str, Sequence[float]]:
    """Return the series of one gateway; a rate that no run reached without error is 0.

    `busy_ratio` is the part of the time in which the gateway used its core: below about 0.95 the load, or somebody
    else on the machine, was the limit. `rps_per_core` is the rate over that part, so it stands on a machine that is
    shared, where the plain rate falls.
    """
    found = {
        "added_p50_ms": samples.added(target, "p50_ms"),
        "added_p99_ms": samples.added(target, "p99_ms"),
        "added_first_turn_p50_ms": samples.added(target, "first_turn_p50_ms"),
        "first_turn_embedded_p50_ms": samples.series(target, "first_turn_embedded_p50_ms"),
        "rps.plain": samples.series(target, "rps.plain") or {0: 0.0},
        "rps.stream": samples.series(target, "rps.stream") or {0: 0.0},
        "rps.first_turn": samples.series(target, "rps.first_turn"),
        **{
            f"{what}.{kind}": samples.series(target, f"{what}.{kind}")
            for what in ("busy_ratio", "rps_per_core")
            for kind in (*KINDS, "first_turn")
        },
        "resident_mb": samples.series(target, "resident_mb"),
        "stream_chunks": {0: float(verified[target].stream.chunks)},
    }
    return {key: list(by_run.values()) for key, by_run in found.items() if by_run}


def _of_engine(samples: Samples) -> dict[str, Sequence[float]]:
    found = {
        "direct_p50_ms": samples.series(ENGINE, "p50_ms"),
        "direct_p99_ms": samples.series(ENGINE, "p99_ms"),
        "load_lateness_p99_ms": samples.series(ENGINE, "lateness_p99_ms"),
        **{f"stub_rps.{kind}": samples.series(ENGINE, f"rps.{kind}") for kind in (*KINDS, "first_turn")},
    }
    return {key: list(by_run.values()) for key, by_run in found.items() if by_run}


def summarise(
    samples: Samples, ours: str | None, peers: Sequence[str], verified: Mapping[str, Verified], chunks: int
) -> Figures:
    """Return `values`, `ci95`, `peers` and `checks` of the report.

    Args:
        samples: what was measured.
        ours: the name of our gateway, or None where only peers were measured.
        peers: the peers that were measured.
        verified: what each one's answers look like.
        chunks: in how many pieces the engine streams an answer.
    """
    series = _of_engine(samples)
    if ours is not None:
        series |= _of_gateway(samples, ours, verified)
        for peer in peers:
            for kind in KINDS:
                ratio = samples.ratio(ours, peer, f"rps.{kind}")
                if ratio:
                    series[f"ratio.{peer}.{kind}"] = list(ratio.values())
    values = {key: statistics.median(found) for key, found in series.items()}
    of_peers = {
        peer: {key: statistics.median(found) for key, found in _of_gateway(samples, peer, verified).items()}
        for peer in peers
    }
    checks = []
    if ours is not None:
        bounds = [*BOUNDS, ("stream_chunks", "==", float(chunks))]
        bounds += [
            (f"ratio.{peer}.{kind}", ">=", PEER_BOUNDS[peer]) for peer in peers if peer in PEER_BOUNDS for kind in KINDS
        ]
        checks = [check(key, op, bound, values.get(key)) for key, op, bound in bounds]
    return {
        "values": values,
        "ci95": {key: [min(found), max(found)] for key, found in series.items() if len(found) > 1},
        "peers": of_peers,
        "checks": checks,
    }
