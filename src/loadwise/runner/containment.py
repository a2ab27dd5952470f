"""What a run of untrusted code may use, and how it ended: the words that sandboxes and checks share."""

import enum
import re

from loadwise.kernel.fact import Fact
from loadwise.verify.check import Limits

MIB = 1024 * 1024


class Trouble(enum.StrEnum):
    """Why a contained run did not end well by itself; `NONE` where it exited with status 0."""

    NONE = "none"
    EXIT = "exit"
    """It exited with another status than 0."""
    SIGNAL = "signal"
    """It was killed, and not by us."""
    CPU = "cpu"
    WALL = "wall"
    MEMORY = "memory"
    PROCESSES = "processes"
    FILE_SIZE = "file_size"
    """One file grew too large, or the private file system is full."""
    OUTPUT = "output"
    NETWORK = "network"
    """It asked for a network, and there is none."""
    DENIED = "denied"
    """It asked for a file that is not there for it, or may not be written."""
    SANDBOX = "sandbox"
    """The sandbox itself did not start: an error of ours, never the answer's fault."""
    STOPPED = "stopped"
    """We are stopping; it says nothing about the run."""
    REFUSED = "refused"
    """It may not or cannot be run here."""


class Outcome(Fact, frozen=True, kw_only=True):
    """How a contained run ended."""

    trouble: Trouble
    status: int | None = None
    """Its exit status; None where it was killed."""
    stdout: bytes = b""
    stderr: bytes = b""
    is_cut: bool = False
    """There was more output than is kept."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    outputs: dict[str, bytes] = {}
    """Files that were asked for and are there."""
    peak_bytes: int = 0
    """Resident memory of all its processes as it was seen, a few times a second."""
    detail: str = ""


_HINTS: tuple[tuple[Trouble, re.Pattern[bytes]], ...] = (
    (Trouble.MEMORY, re.compile(rb"MemoryError|Cannot allocate memory|std::bad_alloc|out of memory", re.I)),
    (Trouble.PROCESSES, re.compile(rb"BlockingIOError: \[Errno 11\]|can't start new thread|fork: retry|Cannot fork")),
    (Trouble.FILE_SIZE, re.compile(rb"File too large|No space left on device|Disk quota exceeded")),
    (
        Trouble.NETWORK,
        re.compile(rb"Network is unreachable|Name or service not known|Temporary failure in name resolution"),
    ),
    (
        Trouble.DENIED,
        re.compile(rb"FileNotFoundError|PermissionError|Permission denied|Read-only file system|No such file"),
    ),
)
HINT_BYTES = 4096


def hinted_trouble(stderr: bytes) -> Trouble:
    """What a run that exited badly says of itself at its end.

    A program can print what it likes, so this only chooses between names for a failure and never makes one good.

    >>> hinted_trouble(b"MemoryError"), hinted_trouble(b"AssertionError")
    (<Trouble.MEMORY: 'memory'>, <Trouble.EXIT: 'exit'>)
    """
    tail = stderr[-HINT_BYTES:]
    last, found = -1, Trouble.EXIT
    for trouble, pattern in _HINTS:
        for match in pattern.finditer(tail):
            if match.start() > last:
                last, found = match.start(), trouble
    return found


KILLED_BY = {
    Trouble.WALL: "wall",
    Trouble.CPU: "cpu",
    Trouble.MEMORY: "memory",
    Trouble.PROCESSES: "processes",
    Trouble.FILE_SIZE: "file",
    Trouble.OUTPUT: "output",
}
"""The words of `verify.check.Finding.killed`."""


def described(outcome: Outcome, limits: Limits) -> str:
    """The trouble in words, with the limit that was met."""
    texts = {
        Trouble.NONE: "it exited with status 0",
        Trouble.EXIT: f"it exited with status {outcome.status}",
        Trouble.SIGNAL: f"it was killed: {outcome.detail}",
        Trouble.CPU: f"it used more than {limits.cpu_s:g} s of CPU time",
        Trouble.WALL: f"it ran longer than {limits.wall_s:g} s",
        Trouble.MEMORY: f"it asked for more than {limits.memory_bytes // MIB} MiB of memory",
        Trouble.PROCESSES: f"it started more than {limits.processes} processes",
        Trouble.FILE_SIZE: f"it wrote more than {limits.file_bytes // MIB} MiB to a file, "
        "or more bytes or files than the private file system holds",
        Trouble.OUTPUT: f"it printed more than {limits.output_bytes} bytes to one stream",
        Trouble.NETWORK: "it asked for a network, and has none",
        Trouble.DENIED: "it asked for a file that it may not read or write",
        Trouble.SANDBOX: f"the sandbox did not start: {outcome.detail}",
        Trouble.STOPPED: "it was stopped because Loadwise stops",
        Trouble.REFUSED: outcome.detail,
    }
    return texts[outcome.trouble]
