"""Scripts that other interpreters run are not collected here; benches are found; what was not asked is counted."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadwise.runner.sandbox import missing_for_bubblewrap

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
collect_ignore = ["vllm_steps.py"]
PATIENCE_S = 300.0


def lacking() -> str:
    """Why no sandbox can run here, whatever we do; empty where one can."""
    problem = missing_for_bubblewrap()
    if problem is not None:
        return problem
    plain = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
    if os.geteuid() == 0:
        plain = ["setpriv", "--reuid=61000", "--regid=61000", "--clear-groups", "--bounding-set=-all", *plain]
    done = subprocess.run(plain, capture_output=True, check=False)
    return "" if done.returncode == 0 else f"bwrap makes no namespaces here: {done.stderr[-100:].decode()}".strip()


@pytest.fixture(scope="module", autouse=True)
def patience() -> Iterator[None]:
    """An engine on a busy machine is slow to show its metrics while it computes: no test calls it down for that."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("gateway.serve.FIRST_LOOK_S", "gateway.probe.TIMEOUT_S", "gateway.turns.EMBEDDING_MAX_S"):
            patched.setattr(f"loadwise.{name}", PATIENCE_S)
        yield


@pytest.fixture(scope="session")
def can_sandbox() -> None:
    """Passes over tests that need a sandbox where the machine has none: they are counted."""
    problem = lacking()
    if problem:
        pytest.skip(problem)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests had no real engine or sandbox to ask, and which one each lacked: a skip is not a pass."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.getreports("skipped"):
        if isinstance(report.longrepr, tuple) and Path(str(report.fspath)).parent.name == "real":
            reasons[str(report.longrepr[2]).removeprefix("Skipped: ")] += 1
    if reasons:
        terminalreporter.write_line(f"{reasons.total()} tests had no real engine or sandbox to ask:")
        for reason, n in sorted(reasons.items()):
            terminalreporter.write_line(f"  {n}: {reason}")
