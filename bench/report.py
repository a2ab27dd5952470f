"""What every bench prints: one JSON object (the schema of INTERFACES), or the same as a table for people.

A bench collects figures into `values` (and `peers`), states its bounds as `Check`s, and calls `print_report`:
exactly one object on stdout with `--json`, everything else on stderr. It exits 0 iff it ran; a bound that
does not hold is a finding, not a failure of the bench.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec

Op = Literal["<=", ">="]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A bound on one figure, and whether it holds."""

    key: str
    op: Op
    bound: float
    holds: bool


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one bench."""

    name: str
    version: str
    commit: str
    machine: dict[str, Any]
    """Kind of processor, cores, Python, and the load average before and after."""
    seeds: list[int]
    config: dict[str, Any]
    """Every switch that differs from what a user runs."""
    values: dict[str, float]
    ci95: dict[str, tuple[float, float]]
    peers: dict[str, dict[str, float]]
    checks: list[Check]


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """An argument parser with the options of every bench: `--json` and `--quick`."""
    made = argparse.ArgumentParser(prog=f"python -m {name}", description=description)
    made.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    made.add_argument("--quick", action="store_true", help="finish within a minute, with wider error")
    return made


def check(values: Mapping[str, float], key: str, op: Op, bound: float) -> Check:
    """State a bound on `values[key]`; a figure that was not measured does not hold it."""
    value = values.get(key)
    holds = value is not None and (value <= bound if op == "<=" else value >= bound)
    return Check(key=key, op=op, bound=bound, holds=holds)


def middle(runs: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Median and range of a few runs: with five of them the range covers the median with 94 %."""
    return median(runs), (min(runs), max(runs))


def load_average() -> float:
    """Of the last minute."""
    return round(os.getloadavg()[0], 2)


def report(
    name: str,
    values: Mapping[str, float],
    *,
    load_before: float,
    config: Mapping[str, Any] | None = None,
    seeds: Sequence[int] = (),
    ci95: Mapping[str, tuple[float, float]] | None = None,
    peers: Mapping[str, Mapping[str, float]] | None = None,
    checks: Sequence[Check] = (),
) -> Report:
    """Put figures into the schema; values are rounded to five significant digits.

    Args:
        load_before: `load_average()` when the bench began.
    """
    machine = {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "load_1m": [load_before, load_average()],
    }
    return Report(
        name=name,
        version=_version(),
        commit=_commit(),
        machine=machine,
        seeds=list(seeds),
        config=dict(config or {}),
        values={key: _rounded(value) for key, value in values.items()},
        ci95={key: (_rounded(low), _rounded(high)) for key, (low, high) in (ci95 or {}).items()},
        peers={
            peer: {key: _rounded(value) for key, value in figures.items()} for peer, figures in (peers or {}).items()
        },
        checks=list(checks),
    )


def print_report(made: Report, *, as_json: bool) -> None:
    """Print it on stdout, for machines or for people."""
    if as_json:
        print(msgspec.json.encode(made).decode())
        return
    machine = made.machine
    print(f"{made.name}  commit {made.commit}")
    print(f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_1m']}")
    rows = [("", made.values), *made.peers.items()]
    for peer, figures in rows:
        for key, value in figures.items():
            spread = made.ci95.get(key) if not peer else None
            note = f"  [{spread[0]:g}, {spread[1]:g}]" if spread else ""
            print(f"  {f'{peer} ' if peer else ''}{key:<40} {value:>12g}{note}")
    for stated in made.checks:
        print(f"  {'holds ' if stated.holds else 'BROKEN'} {stated.key} {stated.op} {stated.bound:g}")


def say(message: str) -> None:
    """Talk, on stderr."""
    print(message, file=sys.stderr, flush=True)


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _version() -> str:
    import loadwise

    return str(getattr(loadwise, "__version__", "unknown"))


def _commit() -> str:
    """Short hash of what was measured, with a + if the tree differs from it."""
    root = Path(__file__).parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
