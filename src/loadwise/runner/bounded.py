"""Runs a command with bounds on all that it may use, and kills it as a whole.

Theory of operation. The command is started as the leader of its own session. One loop feeds its input, reads its
output as it comes and looks at its tree of processes a few times a second: memory, CPU time and number are those of
the whole tree, which no resource limit of the kernel counts. Whatever passes its bound, the whole tree is killed. A
flood of output is read no further than its bound, so it fills no memory, and a reader that is slow blocks nobody but
the command.

`run_bounded` blocks its thread; call it off the event loop, on a thread that outlives the run: the kernel kills
children of `--die-with-parent` when the *thread* that started them ends.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import NamedTuple

from loadwise.verify.check import Limits

from .containment import Outcome, Trouble, hinted_trouble

LOOK_S = 0.05
IDLE_LOOK_S = 0.5
"""Between two looks at the tree while it works; and at most, while it uses no CPU time, for then nothing grows."""
FILES_MAX = 250_000
"""In the private file systems of one command."""
CROWDED_LOOKS = 4
"""Looks in a row that find as many processes as there may be."""
REAP_S = 5.0
"""How long the kernel may take to bury what was killed."""
STOP: ContextVar[threading.Event | None] = ContextVar("stop", default=None)
"""Set in the context of a run: when the event is set, the run is killed, however much of its time is left."""
_CHUNK_BYTES = 65536
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Seen(NamedTuple):
    """A tree of processes at one moment."""

    pids: tuple[int, ...]
    resident_bytes: int
    cpu_s: float


def look_at_tree(root_pid: int) -> Seen:
    """All descendants of a process, itself included, and what they use; those that are gone count nothing."""
    pids: list[int] = []
    resident_bytes, ticks = 0, 0
    left = [root_pid]
    while left:
        pid = left.pop()
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        left += _children(pid)
        pids.append(pid)
        ticks += sum(map(int, fields[11:15]))  # utime, stime, and those of the children it has waited for
        resident_bytes += int(fields[21]) * _PAGE_BYTES
    return Seen(tuple(pids), resident_bytes, ticks / _TICKS_PER_S)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found += map(int, file.read().split())
    return found


def shared_bytes(pids: Sequence[int]) -> int | None:
    """Memory of several processes, each page that they share counted once; None where the kernel does not tell."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                lines = file.read().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError:
            return None
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith(b"Pss:"))
    return total


def count_files(pids: Sequence[int], places: Sequence[str]) -> int:
    """Files in the private file systems of a tree of processes: each takes memory of the kernel, be it empty.

    Where a process still has this machine's root, or hides its own from us, the next one is asked.
    """
    for pid in reversed(pids):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}/root").st_dev == os.stat("/").st_dev:
                continue
            seen = [os.statvfs(f"/proc/{pid}/root{place}") for place in places]
            return sum(max(0, one.f_files - one.f_ffree) for one in seen)
    return 0


class _Run:
    """One command while it runs."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", limits: Limits, n_own: int, stdin: bytes, places: Sequence[str]
    ) -> None:
        self.process = process
        self.limits = limits
        self._n_own = n_own
        self._places = places
        self._stdin = memoryview(stdin)
        self._pieces: dict[str, list[bytes]] = {}
        self._room: dict[str, int] = {}
        self._began_at_s = time.monotonic()
        self._n_crowded = 0
        self._look_s = LOOK_S
        self._stop = STOP.get()
        self.peak_bytes = 0
        self.cpu_s = 0.0

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self._began_at_s

    def text(self, name: str) -> bytes:
        return b"".join(self._pieces.get(name, ()))

    def follow(self, extra_fd: int | None, extra_bytes: int) -> Trouble:
        """Read and watch until it ends or passes a bound."""
        assert self.process.stdout is not None and self.process.stderr is not None and self.process.stdin is not None
        with selectors.DefaultSelector() as selector:
            self._register(selector, self.process.stdout.fileno(), "stdout", self.limits.output_bytes)
            self._register(selector, self.process.stderr.fileno(), "stderr", self.limits.output_bytes)
            if extra_fd is not None:
                self._register(selector, extra_fd, "extra", extra_bytes)
            os.set_blocking(self.process.stdin.fileno(), False)
            selector.register(self.process.stdin.fileno(), selectors.EVENT_WRITE, "stdin")
            return self._follow(selector)

    def _register(self, selector: selectors.BaseSelector, fd: int, name: str, room: int) -> None:
        os.set_blocking(fd, False)
        selector.register(fd, selectors.EVENT_READ, name)
        self._pieces[name], self._room[name] = [], room

    def _follow(self, selector: selectors.BaseSelector) -> Trouble:
        looks_at_s = 0.0
        while True:
            for key, _ in selector.select(min(self._look_s, max(0.0, self.limits.wall_s - self.wall_s))):
                if not self._carry(selector, key):
                    return Trouble.OUTPUT
            if self._stop is not None and self._stop.is_set():
                return Trouble.STOPPED
            if self.wall_s >= self.limits.wall_s:
                return Trouble.WALL
            if self.process.poll() is not None:
                # What it left behind may hold the pipes open: only what is there now is read.
                return Trouble.NONE if self._drain(selector) else Trouble.OUTPUT
            if self.wall_s >= looks_at_s:
                trouble = self._look()
                looks_at_s = self.wall_s + self._look_s
                if trouble is not Trouble.NONE:
                    return trouble
            if not selector.get_map():
                time.sleep(LOOK_S / 5)

    def _carry(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> bool:
        """Take what has come, or give what is asked for; False where more has come than may."""
        if key.data == "stdin":
            self._feed(selector, key)
            return True
        try:
            piece = os.read(key.fd, _CHUNK_BYTES)
        except BlockingIOError:
            return True
        if not piece:
            selector.unregister(key.fileobj)
            return True
        room = self._room[key.data]
        self._pieces[key.data].append(piece[:room])
        self._room[key.data] = max(0, room - len(piece))
        return len(piece) <= room

    def _feed(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        try:
            if self._stdin:
                self._stdin = self._stdin[os.write(key.fd, self._stdin[:_CHUNK_BYTES]) :]
        except BlockingIOError:
            return
        except OSError:  # it reads no more
            self._stdin = self._stdin[:0]
        if not self._stdin:
            selector.unregister(key.fileobj)
            assert self.process.stdin is not None
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def _drain(self, selector: selectors.BaseSelector) -> bool:
        while True:
            ready = [key for key, _ in selector.select(0) if key.data != "stdin"]
            if not ready:
                return True
            for key in ready:
                if not self._carry(selector, key):
                    return False

    def _look(self) -> Trouble:
        seen, limits = look_at_tree(self.process.pid), self.limits
        self._look_s = LOOK_S if seen.cpu_s > self.cpu_s else min(2 * self._look_s, IDLE_LOOK_S)
        self.cpu_s = max(self.cpu_s, seen.cpu_s)
        resident_bytes = seen.resident_bytes
        if resident_bytes > limits.memory_bytes:
            counted = shared_bytes(seen.pids)
            resident_bytes = resident_bytes if counted is None else counted
        self.peak_bytes = max(self.peak_bytes, resident_bytes)
        if resident_bytes > limits.memory_bytes:
            return Trouble.MEMORY
        if seen.cpu_s > limits.cpu_s:
            return Trouble.CPU
        if self._places and count_files(seen.pids, self._places) > FILES_MAX:
            return Trouble.FILE_SIZE
        # At the limit the kernel refuses one more, which a program may live with; one that stays there is a bomb.
        is_crowded = len(seen.pids) - self._n_own >= limits.processes > 1
        self._n_crowded = self._n_crowded + 1 if is_crowded else 0
        return Trouble.PROCESSES if self._n_crowded >= CROWDED_LOOKS else Trouble.NONE


def run_bounded(
    argv: Sequence[str],
    limits: Limits,
    *,
    stdin: bytes = b"",
    environment: Mapping[str, str] | None = None,
    directory: str | None = None,
    pass_fds: Sequence[int] = (),
    extra_fd: int | None = None,
    extra_bytes: int = 0,
    n_own: int = 0,
    places: Sequence[str] = (),
) -> tuple[Outcome, bytes]:
    """Run a command to its end or to a bound; returns within the wall time and a few seconds, whatever it does.

    Args:
        environment: empty where None.
        pass_fds: inherited by the command; closed here once it has started, so that their other ends can end.
        extra_fd: another descriptor to read, up to `extra_bytes`.
        n_own: processes of the tree that are ours and not the command's.
        places: private file systems of the command, whose files are counted.

    Returns:
        How it ended, and what came by `extra_fd`.
    """
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment or {}),
            cwd=directory,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return Outcome(trouble=Trouble.SANDBOX, detail=f"{argv[0]!r} cannot be started: {error}"), b""
    finally:
        for fd in pass_fds:
            os.close(fd)
    run = _Run(process, limits, n_own, stdin, places)
    try:
        trouble = run.follow(extra_fd, extra_bytes)
    finally:
        kill_tree(process)
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
    return _outcome(run, trouble, process.returncode), run.text("extra")


def kill_tree(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process with its group and every descendant, and wait until it is gone."""
    pids = look_at_tree(process.pid).pids if process.returncode is None else ()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in pids:
        if pid != process.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(REAP_S)


def _outcome(run: _Run, trouble: Trouble, returncode: int | None) -> Outcome:
    """Put a name to how it ended. A shell and bubblewrap say 128 + n where signal n has killed their child."""
    stderr = run.text("stderr")
    status, detail = returncode, ""
    if trouble is not Trouble.NONE:
        status = None
    elif returncode:
        number = -returncode if returncode < 0 else returncode - 128 if returncode > 128 else 0
        if number == signal.SIGXCPU or (number == signal.SIGKILL and run.cpu_s >= 0.9 * run.limits.cpu_s):
            trouble = Trouble.CPU
        elif number == signal.SIGXFSZ:
            trouble = Trouble.FILE_SIZE
        elif 0 < number < 65:
            trouble, status, detail = Trouble.SIGNAL, -number, _signal_name(number)
        else:
            trouble = hinted_trouble(stderr)
    return Outcome(
        trouble=trouble,
        status=status,
        stdout=run.text("stdout"),
        stderr=stderr,
        is_cut=trouble is Trouble.OUTPUT,
        wall_s=run.wall_s,
        cpu_s=run.cpu_s,
        peak_bytes=run.peak_bytes,
        detail=detail,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
