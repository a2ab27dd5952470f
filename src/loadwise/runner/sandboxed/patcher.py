"""Apply a patch to a checkout and run its tests; report each test by name.

The checkout is the working directory, a copy. The patch has been read, filtered and written anew by `verify/patch.py`,
so that what arrives here names no path outside, no link and no test file. `git apply` then refuses what does not fit.
After it the tests' own files are laid over the tree. Then the tests run in a child whose output is not read for
results: they come from a report file with a name that nobody knew before. Beside the tests asked for runs a canary, one
test that must pass and one for each assertion that must fail: whoever makes every outcome a pass, silences an
assertion, leaves early, or writes a report of the tests he knows of, is found out.

Left over: the patched code runs in the process that runs the tests. Code that looks for the running test's name and
changes only its outcome, or that reads the runner's arguments and writes the report that it would write, is not found
out by any runner of this form.

Input: one JSON object on stdin. Output: JSON lines, each with the nonce. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from typing import Any

LOG_TAIL_BYTES = 2000
REPORT_MAX_BYTES = 32 << 20
GIT = ["git", "-c", "safe.directory=*", "-c", "core.symlinks=false", "-c", "core.hooksPath=/dev/null", "apply"]
UNITTEST = """
import json, sys, unittest
class Result(unittest.TestResult):
    def __init__(self):
        super().__init__()
        self.outcomes = {}
    def note(self, test, outcome):
        if self.outcomes.get(test.id()) in (None, "passed"):
            self.outcomes[test.id()] = outcome
    def addSuccess(self, test): self.note(test, "passed")
    def addError(self, test, error): self.note(test, "failed")
    def addFailure(self, test, error): self.note(test, "failed")
    def addSubTest(self, test, subtest, error): self.note(test, "failed" if error else "passed")
    def addSkip(self, test, reason): self.note(test, "skipped")
    def addExpectedFailure(self, test, error): self.note(test, "passed")
    def addUnexpectedSuccess(self, test): self.note(test, "failed")
result = Result()
sys.path.insert(0, "")
unittest.defaultTestLoader.loadTestsFromNames(sys.argv[2:]).run(result)
with open(sys.argv[1], "w") as file:
    json.dump(result.outcomes, file)
"""
CANARY = """import unittest


class Canary(unittest.TestCase):
    def test_stands(self):
        self.assertTrue(True)

    def test_falls(self):
        assert False

"""
WAYS = (
    "assertTrue(False)",
    "assertFalse(True)",
    "assertEqual(1, 2)",
    "assertEqual('a', 'b')",
    "assertEqual([1], [2])",
    "assertEqual({1: 1}, {1: 2})",
    "assertNotEqual(1, 1)",
    "assertIs(1, None)",
    "assertIsNone(1)",
    "assertIsNotNone(None)",
    "assertIn(1, [])",
    "assertNotIn(1, [1])",
    "assertIsInstance(1, str)",
    "assertLess(2, 1)",
    "assertGreater(1, 2)",
    "assertLessEqual(2, 1)",
    "assertGreaterEqual(1, 2)",
    "assertAlmostEqual(1, 2)",
    "assertCountEqual([1], [2])",
    "assertRegex('a', 'b')",
    "assertRaises(ValueError, int)",
    "fail('so')",
)
"""What a test may say that must fail: whoever makes one of them silent makes a test of the canary pass."""
CANARY += "".join(f"    def test_falls_{n}(self):\n        self.{way}\n\n" for n, way in enumerate(WAYS))


def apply(patch: str) -> str:
    """Why a patch does not apply; empty where it is applied."""
    environment = {**os.environ, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "LC_ALL": "C"}
    done = subprocess.run(
        [*GIT, "--whitespace=nowarn", "-"],
        input=patch.encode("utf-8", "surrogateescape"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
        check=False,
    )
    return "" if done.returncode == 0 else done.stderr.decode("utf-8", "replace")[:500] or "git apply refused it"


def lay(files: dict[str, str]) -> None:
    """Write the tests' own files, through no link."""
    for path, text in files.items():
        parent = os.path.dirname(path)
        if parent:
            os.makedirs(parent, exist_ok=True)
        real = os.path.realpath(path)
        if os.path.islink(path) or not real.startswith(os.path.realpath(".") + os.sep):
            raise OSError(f"{path} leads out of the checkout")
        with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)


class Run:
    """One run of the tests: how it ended, and the outcome of each test by (class, name)."""

    def __init__(self, paper: dict[str, Any], canary: str) -> None:
        self.outcomes: dict[tuple[str, ...], str] = {}
        self.is_late = False
        self.exit_code: int | None = None
        self.log = ""
        with tempfile.TemporaryDirectory() as place:
            report = os.path.join(place, os.urandom(16).hex())
            self._run(command_of(paper, report, canary), paper["total_s"], os.path.join(place, "log"))
            self._read(report)

    def _run(self, argv: list[str], total_s: float, log: str) -> None:
        with open(log, "w+b") as out:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                self.exit_code = process.wait(total_s)
            except subprocess.TimeoutExpired:
                self.is_late = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            out.seek(max(out.seek(0, os.SEEK_END) - LOG_TAIL_BYTES, 0))
            self.log = out.read().decode("utf-8", "replace")

    def _read(self, report: str) -> None:
        try:
            if os.path.islink(report) or os.path.getsize(report) > REPORT_MAX_BYTES:
                return
            with open(report, "rb") as file:
                text = file.read()
        except OSError:
            return
        with contextlib.suppress(ValueError, xml.etree.ElementTree.ParseError, RecursionError, AttributeError):
            self.outcomes = from_json(text) if text[:1] == b"{" else from_junit(text)


def from_json(text: bytes) -> dict[tuple[str, ...], str]:
    """The report of our own runner of unittest."""
    return {tuple(name.rsplit(".", 1)): outcome for name, outcome in json.loads(text).items() if "." in name}


def from_junit(text: bytes) -> dict[tuple[str, ...], str]:
    """The outcomes of a JUnit report; a test that is told twice has the worse one."""
    outcomes: dict[tuple[str, ...], str] = {}
    for case in xml.etree.ElementTree.fromstring(text).iter("testcase"):
        marks = {child.tag for child in case}
        outcome = "failed" if marks & {"failure", "error"} else "skipped" if "skipped" in marks else "passed"
        key = (case.get("classname", ""), case.get("name", ""))
        if outcomes.get(key, "passed") == "passed":
            outcomes[key] = outcome
    return outcomes


def command_of(paper: dict[str, Any], report: str, canary: str) -> list[str]:
    """The command that runs the tests and writes the report."""
    python = paper["python"]
    if paper["framework"] == "pytest":
        files = dict.fromkeys(
            test.split("::", 1)[0] for test in paper["tests"]
        )  # one lost test must not lose the others
        flags = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", f"--junitxml={report}"]
        return [*python, "-m", "pytest", *flags, *files, f"{canary}.py"]
    if paper["framework"] == "unittest":
        return [*python, "-c", UNITTEST, report, *paper["tests"], canary]
    return [part.replace("{report}", report) for part in paper["command"]]


def key_of(test: str) -> tuple[str, ...]:
    """A test's name as a report has it: (class, name)."""
    if "::" in test:
        path, *inner = test.split("::")
        stem = path[:-3] if path.endswith(".py") else path
        return (".".join([stem.strip("/").replace("/", "."), *inner[:-1]]), inner[-1])
    if test.endswith(")") and " (" in test:  # as unittest writes it: test_a (module.Class)
        name, place = test[:-1].split(" (", 1)
        return (place[: -len(name) - 1] if place.endswith("." + name) else place, name)
    return tuple(test.rsplit(".", 1)) if "." in test else ("", test)


def told(run: Run, paper: dict[str, Any], canary: str) -> dict[str, Any]:
    """What is reported of one run."""
    stands = run.outcomes.get((f"{canary}.Canary", "test_stands"))
    falling = ["test_falls", *(f"test_falls_{n}" for n in range(len(WAYS)))]
    all_fall = {run.outcomes.get((f"{canary}.Canary", name)) for name in falling}
    falls = "passed" if "passed" in all_fall else all_fall.pop() if len(all_fall) == 1 else None
    return {
        "exit_code": run.exit_code,
        "is_late": run.is_late,
        "n_reported": len(run.outcomes),
        "canary": None if paper["framework"] == "command" else [stands, falls],
        "outcomes": {test: run.outcomes.get(key_of(test), "missing") for test in paper["tests"]},
        "log": run.log,
    }


def work(paper: dict[str, Any]) -> dict[str, Any]:
    """Everything between the lines `started` and `finished`."""
    canary = f"test_canary_{os.urandom(6).hex()}"
    if paper["framework"] == "pytest":
        probe = subprocess.run([*paper["python"], "-m", "pytest", "--version"], capture_output=True, check=False)
        if probe.returncode:
            said = probe.stderr.decode("utf-8", "replace").strip()[-200:]
            way = "give an interpreter that has it (option python, and verification.shows), or framework: unittest"
            return {"error": f"pytest does not run in the sandbox ({said}): {way}"}
    why = apply(paper["patch"]) if paper["patch"] else ""
    if why:
        return {"applied": False, "why": why}
    why = apply(paper["test_patch"]) if paper["test_patch"] else ""
    if why:
        return {"error": f"the tests' own patch does not apply: {why}"}
    lay(paper["test_files"])
    if paper["framework"] != "command":
        lay({f"{canary}.py": CANARY})
    return {"applied": True, **told(Run(paper, canary), paper, canary)}


def shield() -> bool:
    """Whether the tests' processes, of the same user, are kept from our memory and our descriptors."""
    try:
        undumpable = ctypes.CDLL(None, use_errno=True).prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE
        with open("/proc/self/status", encoding="ascii") as file:
            rights = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff"))
    except (OSError, AttributeError, StopIteration, ValueError):
        return False
    return undumpable and not rights & (1 << 19)  # CAP_SYS_PTRACE


def main() -> None:
    """Read the paper, apply, run, report."""
    paper = json.loads(sys.stdin.buffer.read())

    def say(**fields: Any) -> None:
        os.write(1, json.dumps({"nonce": paper["nonce"], **fields}).encode() + b"\n")

    say(started=True, shielded=shield())
    try:
        result = work(paper)
    except (OSError, subprocess.SubprocessError) as error:
        result = {"error": f"{type(error).__name__}: {error}"[:300]}
    say(finished=True, **result)


if __name__ == "__main__":
    main()
