"""Pure functions that may take long or crash, in worker processes that are killed when they do.

A worker is started when it is first needed, does one call at a time, and is replaced after a timeout, a crash or some
hundred calls, so that what a library leaks stays bounded.
"""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time

from loadwise.verify.check import Compute, Finding, FindingStatus

from .compute import FRAME_MAX_BYTES, LENGTH, frame

CALLS_PER_WORKER = 300
START_S = 30.0
"""Added to the first call of a worker: importing a computer algebra takes seconds."""
PASSED_ON = ("PATH", "PYTHONPATH", "LANG", "VIRTUAL_ENV")
"""What of the environment a worker sees: no keys."""
VALUE_MAX_BYTES = 4 * 1024 * 1024

_status = FindingStatus


class _Late(Exception):
    """No answer within the time."""


class _Gone(Exception):
    """The worker has ended."""


class Worker:
    """One process; used by one thread at a time."""

    def __init__(self) -> None:
        self.n_calls = 0
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "loadwise.runner.compute"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        for pipe in (self._stdin, self._stdout):
            os.set_blocking(pipe.fileno(), False)

    def call(self, check: Compute) -> dict[str, object]:
        """Ask, and wait for the answer.

        Raises:
            _Late, _Gone: the worker is of no more use.
        """
        ask = {"function": check.function, "arguments": check.arguments, "memory_bytes": check.memory_bytes}
        ends_at_s = time.monotonic() + check.wall_s + (START_S if self.n_calls == 0 else 0.0)
        self.n_calls += 1
        self._write(frame(ask), ends_at_s)
        (n_bytes,) = LENGTH.unpack(self._read(LENGTH.size, ends_at_s))
        if n_bytes > VALUE_MAX_BYTES:
            raise _Gone(f"it answered {n_bytes} bytes; {VALUE_MAX_BYTES} is the limit")
        said: dict[str, object] = json.loads(self._read(n_bytes, ends_at_s))
        return said

    def _write(self, data: bytes, ends_at_s: float) -> None:
        left = memoryview(data)
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdin, selectors.EVENT_WRITE)
            while left:
                self._wait(selector, ends_at_s)
                try:
                    left = left[os.write(self._stdin.fileno(), left[:65536]) :]
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise _Gone(str(error)) from error

    def _read(self, n_bytes: int, ends_at_s: float) -> bytes:
        pieces: list[bytes] = []
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while n_bytes:
                self._wait(selector, ends_at_s)
                try:
                    piece = os.read(self._stdout.fileno(), min(n_bytes, 65536))
                except BlockingIOError:
                    continue
                if not piece:
                    raise _Gone("it ended")
                pieces.append(piece)
                n_bytes -= len(piece)
        return b"".join(pieces)

    def _wait(self, selector: selectors.BaseSelector, ends_at_s: float) -> None:
        left_s = ends_at_s - time.monotonic()
        if left_s <= 0 or not selector.select(left_s):
            raise _Late

    def close(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                pipe.close()


class Workers:
    """As many workers as there are threads that compute at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._is_closed = False

    def run(self, check: Compute) -> Finding:
        """Compute; blocks its thread for `wall_s` at most, and the start of a worker."""
        began_at_s = time.monotonic()
        try:
            n_bytes = len(frame(check.arguments))
        except (TypeError, ValueError, RecursionError) as error:
            return Finding(status=_status.REFUSED, reason=f"its arguments are no JSON: {error}"[:300])
        if n_bytes > FRAME_MAX_BYTES // 2:
            return Finding(status=_status.REFUSED, reason=f"its arguments have {n_bytes} bytes")
        worker = self._take()
        try:
            said = worker.call(check)
        except _Late:
            worker.close()
            took_s = time.monotonic() - began_at_s
            return Finding(status=_status.TIMEOUT, reason=f"no answer within {check.wall_s:g} s", took_s=took_s)
        except (_Gone, ValueError) as error:
            worker.close()
            took_s = time.monotonic() - began_at_s
            return Finding(status=_status.ERROR, reason=f"the worker ended: {error}"[:300], took_s=took_s)
        self._give_back(worker)
        return _finding(said, time.monotonic() - began_at_s)

    def _take(self) -> Worker:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        return worker if worker is not None else Worker()

    def _give_back(self, worker: Worker) -> None:
        with self._lock:
            if not self._is_closed and worker.n_calls < CALLS_PER_WORKER:
                self._idle.append(worker)
                return
        worker.close()

    def close(self) -> None:
        """End the workers that wait."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.close()


def _finding(said: dict[str, object], took_s: float) -> Finding:
    problem, text = said.get("problem"), str(said.get("text", ""))
    if problem is None:
        return Finding(value=said.get("value"), took_s=took_s)
    if problem == "memory":
        return Finding(killed="memory", reason=text, took_s=took_s)
    status = _status.REFUSED if problem == "refused" else _status.ERROR
    return Finding(status=status, reason=text, took_s=took_s)
