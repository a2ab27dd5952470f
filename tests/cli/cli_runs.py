"""What the tests of the commands share: a pool file, and running a command in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from loadwise.cli.main import main

POOL = """
models:
  small: {usd_per_million: {input: 0.1, output: 0.2}}
  big-1.5b: {usd_per_million: {input: 1, output: 2}}
backends:
  - {name: a, model: small, url: "http://127.0.0.1:1/v1", slots: 2}
  - {name: b.1, model: big-1.5b, url: "http://127.0.0.1:1/v1"}
router: {hold_max_s: 10}
"""

SCENARIO = """
scenario: 1
name: tiny
n_programs: 8
pool:
  models: {small: {}, large: {}}
  backends:
    - {name: a, model: small, engine: emulator, slots: 4}
    - {name: b, model: large, engine: emulator, slots: 4}
workload:
  arrivals: {kind: poisson, programs_per_s: 1.0}
  task_types: {chat: 1}
  turns: 2
  first_prompt_tokens: 100
  output_tokens: 10
truth: {success: {small: {chat: 0.3}, large: {chat: 0.9}}}
verdicts: {source: agent}
"""


class Ran(NamedTuple):
    """How a command ended and what it said."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one object on stdout."""
        (line,) = self.out.splitlines()
        return json.loads(line)


def run(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> Ran:
    """Run a command as a shell would."""
    capsys.readouterr()
    status = main([str(word) for word in argv])
    out, err = capsys.readouterr()
    return Ran(status, out, err)


def refused(ran: Ran) -> str:
    """The one line of a command that would not run."""
    assert ran.status == 2
    assert ran.out == ""
    (line,) = ran.err.splitlines()
    assert line.startswith("loadwise: ")
    return line
