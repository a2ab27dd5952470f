"""Carry checks out without a sandbox, for code that the tests themselves wrote."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from loadwise.kernel.work import Verdict
from loadwise.runner.sandbox import script_source
from loadwise.verify.case import Case
from loadwise.verify.check import DIRECTORY, SCRIPT, Check, Compute, Finding, RunInSandbox
from loadwise.verify.computations import COMPUTATIONS
from loadwise.verify.registry import make_verifier
from loadwise.verify.spec import VerifierSpec
from loadwise.verify.verifier import STEPS_MAX, Verifier, Wanted


def verifier(kind: str, **options: Any) -> Verifier:
    """A verifier with these options."""
    return make_verifier(VerifierSpec(kind=kind, options=options))


def carry_out(check: Check) -> Finding:
    """What comes of a check, by plain processes."""
    if isinstance(check, Compute):
        return Finding(value=COMPUTATIONS[check.function](**check.arguments))
    assert isinstance(check, RunInSandbox)
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory() as aside:
        for name, content in check.files.items():
            path = Path(directory) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        script = str(Path(aside) / f"{check.script}.py")
        Path(script).write_bytes(script_source(check.script) or b"")
        argv = [part.replace(SCRIPT, script).replace(DIRECTORY, directory) for part in check.argv]
        try:
            done = subprocess.run(
                argv, input=check.stdin, capture_output=True, cwd=directory, timeout=check.limits.wall_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            return Finding(killed="wall", stdout=error.stdout or b"")
    return Finding(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)


def judged(by: Verifier, case: Case) -> Verdict:
    """The verdict on a case, its checks carried out, with a nonce as the runner would set it."""
    case = case if case.nonce else msgspec.structs.replace(case, nonce="n0")
    step = by.begin(case)
    for _ in range(STEPS_MAX):
        if isinstance(step, Verdict):
            return step
        step = by.resume(case, step.state, carry_out(step.check))
    raise AssertionError(f"{by.kind} wants more than {STEPS_MAX} checks")


def asked(by: Verifier, case: Case) -> Wanted:
    """The first check that a verifier wants."""
    step = by.begin(case)
    assert isinstance(step, Wanted), step
    return step


def told(by: Verifier, case: Case) -> Verdict:
    """The verdict of a verifier that wants no check."""
    step = by.begin(case)
    assert isinstance(step, Verdict), step
    return step
