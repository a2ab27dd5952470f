"""Read the paper, examine, report."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from types import FrameType
from typing import Any

from .candidate import candidate
from .examination import Examination, Expired
from .scripts import run_scripts

ALARM_AGAIN_S = 1.0
"""A test may swallow the alarm; it rings again."""


def shield() -> bool:
    """Whether a process of the same user is kept from our memory: undumpable, and without rights over others."""
    try:
        undumpable = ctypes.CDLL(None, use_errno=True).prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE
        with open("/proc/self/status", encoding="ascii") as file:
            rights = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff"))
    except (OSError, AttributeError, StopIteration, ValueError):
        return False
    return undumpable and not rights & (1 << 19)  # CAP_SYS_PTRACE


class Alarm:
    """The alarm of all tests; it stays set where a test swallows it."""

    is_set = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True
        raise Expired


def main() -> None:
    """Read the paper, examine, report."""
    paper = json.loads(sys.stdin.buffer.read())
    report = os.dup(1)
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)

    def say(**fields: Any) -> None:
        os.write(report, json.dumps({"nonce": paper["nonce"], **fields}).encode() + b"\n")

    say(started=True, shielded=shield())
    examination = Examination(paper)
    alarm = Alarm()
    signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, paper["total_s"], ALARM_AGAIN_S)
    try:
        if paper["pairs"]:
            run_scripts(paper, examination.results)
        else:
            examination.run()
    except Expired:
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    if examination.child is not None:
        examination.child.end()
    results = examination.results
    wrong = [result for result in results if result[1]]
    say(
        finished=True,
        expired=alarm.is_set,
        unsupported=examination.unsupported[:200],
        n_tests=len(results),
        n_wrong=len(wrong),
        wrong=wrong[:20],
    )


candidate() if sys.argv[1:] == ["candidate"] else main()
