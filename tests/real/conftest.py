"""Scripts that other interpreters run are not collected here; benches are found; what was not asked is counted."""

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
collect_ignore = ["vllm_steps.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests had no real engine to ask, and which one each lacked: a skip is not a pass."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.getreports("skipped"):
        if isinstance(report.longrepr, tuple) and Path(str(report.fspath)).parent.name == "real":
            reasons[str(report.longrepr[2]).removeprefix("Skipped: ")] += 1
    if reasons:
        terminalreporter.write_line(f"{reasons.total()} tests had no real engine to ask:")
        for reason, n in sorted(reasons.items()):
            terminalreporter.write_line(f"  {n}: {reason}")
