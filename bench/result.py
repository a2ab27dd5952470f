"""The one JSON object that every bench prints, as outside checks read it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import loadwise

_ROOT = Path(__file__).resolve().parents[1]


def machine() -> dict[str, object]:
    """Return what the figures were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    processors = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": processors[0] if processors else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def commit() -> str:
    """Return the commit that was measured, with a mark if files differ from it; empty outside a repository."""
    argv = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def build(
    name: str,
    *,
    values: Mapping[str, float],
    config: Mapping[str, Any],
    seeds: Sequence[int] = (),
    ci95: Mapping[str, Sequence[float]] | None = None,
    peers: Mapping[str, Mapping[str, float]] | None = None,
    checks: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the report of one bench."""
    return {
        "name": name,
        "version": loadwise.__version__,
        "commit": commit(),
        "machine": machine(),
        "seeds": list(seeds),
        "config": dict(config),
        "values": dict(values),
        "ci95": {key: list(bounds) for key, bounds in (ci95 or {}).items()},
        "peers": {peer: dict(figures) for peer, figures in (peers or {}).items()},
        "checks": [dict(entry) for entry in checks],
    }


def show(result: Mapping[str, Any], *, as_json: bool) -> None:
    """Print a report: one JSON object, or lines for a reader."""
    if as_json:
        print(json.dumps(result))
        return
    columns = {"": result["values"], **result["peers"]}
    width = max(map(len, result["values"]), default=0)
    keys = dict.fromkeys(key for figures in columns.values() for key in figures)
    print(" " * width, *(f"{name or result['name']:>24}" for name in columns))
    for key in keys:
        print(
            f"{key:<{width}}",
            *(f"{figures[key]:>24,.3f}" if key in figures else " " * 24 for figures in columns.values()),
        )
    for entry in result["checks"]:
        print("holds " if entry["holds"] else "MISSED", entry["key"], entry["op"], entry["bound"])
    print("load average", result["config"].get("load_average"), file=sys.stderr)
