"""Processes pinned to one core each, so that what is measured does not share a core with what measures it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
STOP_LIMIT_S = 5.0
"""How long a process may take to end by itself; smg alone would drain for minutes."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LOG_TAIL_BYTES = 2000


class ProcessFailed(RuntimeError):
    """A process ended, or was not ready in time; the message carries the end of what it printed."""


def cores() -> tuple[int, int]:
    """Return the core for the gateway and the core for engine and load; the same one twice on a single core."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[0], allowed[-1]


def environment() -> dict[str, str]:
    """Return ours, with this source tree first on the path of Python."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


@contextlib.contextmanager
def pinned_here(core: int) -> Iterator[None]:
    """Keep the calling process on one core; what it was allowed before is restored."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def free_port() -> int:
    """Return a loopback port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A loopback port that nobody else is given while the block lasts.

    It is bound and never listens, so that who reuses addresses or ports, as servers do, may listen there.
    """
    with socket.socket() as reserved:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            reserved.setsockopt(socket.SOL_SOCKET, option, 1)
        reserved.bind(("127.0.0.1", 0))
        yield int(reserved.getsockname()[1])


class Pinned:
    """One running process on one core, with what it printed kept in a file that has no name."""

    def __init__(
        self, name: str, argv: Sequence[str], core: int, environment: Mapping[str, str], cwd: Path | None = None
    ) -> None:
        self.name = name
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed in stop()
        # taskset rather than preexec_fn: a Rust runtime counts its cores at start and must see only one
        self._process = subprocess.Popen(
            ["taskset", "--cpu-list", str(core), *argv],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=cwd,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process id; taskset replaces itself, so this is the process that is measured."""
        return self._process.pid

    def cpu_s(self) -> float:
        """Return the processor time that the process itself has used so far."""
        after_name = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(after_name[11]) + int(after_name[12])) / _TICKS_PER_S

    def resident_bytes(self) -> int:
        """Return the resident memory of the process."""
        return resident_bytes(self.pid)

    def log_tail(self) -> str:
        """Return the end of what the process printed."""
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), _LOG_TAIL_BYTES, max(0, size - _LOG_TAIL_BYTES))
        return tail.decode(errors="replace").strip()

    def wait_ready(self, ready: Callable[[], bool], limit_s: float) -> float:
        """Ask until `ready` says yes.

        Returns:
            How long that took, in seconds, since this call.

        Raises:
            ProcessFailed: the process ended first, or the limit passed.
        """
        started_at_s = time.monotonic()
        while not ready():
            waited_s = time.monotonic() - started_at_s
            if self._process.poll() is not None:
                raise ProcessFailed(f"{self.name!r} ended with {self._process.returncode}: {self.log_tail()}")
            if waited_s > limit_s:
                raise ProcessFailed(f"{self.name!r} is not ready after {limit_s:g} s: {self.log_tail()}")
            time.sleep(0.1)
        return time.monotonic() - started_at_s

    def stop(self) -> None:
        """End the process and those it started: asked first, then made to."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_LIMIT_S)
        self._log.close()

    def __enter__(self) -> Pinned:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def resident_bytes(pid: int | str = "self") -> int:
    """Return the resident memory of a process, from the kernel's own count of pages."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
