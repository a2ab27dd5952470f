"""As much as 32 connections carry, by `wrk`; `wrk.lua` makes the requests and prints the counts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from bench import load
from bench.load import Endpoint, LoadFailed

_SCRIPT = Path(__file__).with_suffix(".lua")


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """What `wrk` counted, as its script prints it."""

    requests: int
    duration_us: int
    bytes: int
    connect: int
    read: int
    write: int
    status: int
    timeout: int

    @property
    def per_s(self) -> float:
        """Answers a second."""
        return self.requests / (self.duration_us / 1e6)

    @property
    def errors(self) -> int:
        """Everything that was no good answer: sockets, timeouts and statuses above 399."""
        return self.connect + self.read + self.write + self.status + self.timeout


def require() -> str:
    """Return where `wrk` is; a root on Debian gets it installed first.

    Raises:
        LoadFailed: it is not there and could not be installed.
    """
    found = shutil.which("wrk")
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        print("installing wrk with apt-get", file=sys.stderr)
        for step in (["update"], ["install", "--yes", "wrk"]):
            subprocess.run(["apt-get", *step], stdin=subprocess.DEVNULL, capture_output=True, timeout=600, check=False)
        found = shutil.which("wrk")
    if found is None:
        raise LoadFailed("wrk is not installed; Debian has it: apt-get install wrk")
    return found


def run(
    endpoint: Endpoint,
    core: int,
    duration_s: int,
    *,
    stream: bool,
    prefix: str,
    fresh: bool = False,
    threads: int = 1,
    extra: Mapping[str, str] | None = None,
) -> Counted:
    """Keep 32 connections busy with `wrk` and count.

    Args:
        endpoint: where to.
        core: the core that wrk may use.
        duration_s: whole seconds, as wrk has them.
        stream: ask for a stream.
        prefix: of the programs' ids, eight characters.
        fresh: give each request a program of its own instead of one of 32.
        threads: of wrk. With 32 each connection keeps to one program, but wrk itself is about a fifth slower; with 1
            the 32 programs go round over the connections.
        extra: further headers.

    Raises:
        LoadFailed: wrk could not run, or printed no result.
    """
    headers = {**endpoint.headers, **(extra or {})}
    flags = [part for name, value in headers.items() for part in ("-H", f"{name}: {value}")]
    with tempfile.NamedTemporaryFile() as file:
        file.write(load.body(endpoint.model, load.MARK, stream=stream))
        file.flush()
        argv = ["taskset", "--cpu-list", str(core), require()]
        argv += [f"-t{threads}", f"-c{load.PROGRAMS}", f"-d{duration_s}s", f"--timeout={load.ANSWER_LIMIT_S:g}s"]
        argv += [*flags, "-s", str(_SCRIPT), endpoint.url, "--"]
        argv += [file.name, "fresh" if fresh else "bound", prefix, str(load.PROGRAMS), str(threads)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=duration_s + 60, check=False)
    return read_result(done.stdout, done.stderr)


def read_result(stdout: str, stderr: str = "") -> Counted:
    """Read the line that the script prints at the end.

    Raises:
        LoadFailed: there is none.
    """
    for line in reversed(stdout.splitlines()):
        if line.startswith("{"):
            return msgspec.json.decode(line, type=Counted)
    raise LoadFailed(f"wrk printed no result: {(stderr or stdout).strip()[-300:]!r}")
