"""Processes held on one core each, so that what is measured does not share its core with what measures it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parents[2]
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cores() -> tuple[int, int]:
    """Two cores: one for what is measured, one for engine stub and load. The same twice where there is only
    one."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[0], allowed[-1]


def environment() -> dict[str, str]:
    """Ours, with this source tree first on the path of Python."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


class Pinned:
    """A child process on one core; ended on exit, by its own handle."""

    def __init__(
        self,
        command: Sequence[str],
        core: int,
        *,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        """
        Args:
            command: Program and arguments.
            core: The only core it may run on.
            env: In place of `environment()`.
            log: Where its output goes; nowhere if None.
        """
        self._log = log.open("wb") if log else None
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=dict(env or environment()),
            stdin=subprocess.DEVNULL,
            stdout=self._log or subprocess.DEVNULL,
            stderr=subprocess.STDOUT if self._log else subprocess.DEVNULL,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._process.pid

    def wait_until_ready(self, url: str, limit_s: float = 20.0) -> None:
        """Ask `url` until it answers with anything.

        Raises:
            RuntimeError: The process ended, or nothing answered within the limit.
        """
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                raise RuntimeError(f"{self._process.args!r} ended with status {self._process.returncode}")
            try:
                with urllib.request.urlopen(url, timeout=2.0):
                    return
            except urllib.error.HTTPError:
                return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError(f"{url!r} did not answer within {limit_s:g} s")

    def cpu_s(self) -> float:
        """Processor time of the child and its threads so far, in seconds (grain 10 ms)."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    def resident_bytes(self) -> int:
        """Memory of the child that is in use now."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def end(self) -> None:
        """Ask it to end, then end it."""
        self._process.terminate()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def stub(core: int, port: int, *arguments: str) -> Pinned:
    """The engine stub on a core."""
    command = [sys.executable, "-m", "bench.engine_stub", "--port", str(port), *arguments]
    made = Pinned(command, core)
    made.wait_until_ready(f"http://127.0.0.1:{port}/health")
    return made
