"""A patch applied to a repository, and its tests run, as SWE-bench does: fail-to-pass and pass-to-pass.

`diff.py` reads the patch and says what may be applied; `runner/sandboxed/patcher.py` applies it and runs the tests in
the sandbox. Parts of the patch that touch the tests or what steers them are left out, and the tests' own files are laid
over it: a patch cannot pass by changing its tests.
"""

import fnmatch
import json
from typing import Any, Literal

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact

from .case import Case
from .check import SCRIPT, Finding, Limits, RunInSandbox
from .diff import DiffRefused, FileDiff, parse_diff, require_inside, write_diff
from .options import read_options, require_range, strict_json
from .reports import Report
from .spec import VerifierSpec
from .unit_tests import fenced
from .verifier import State, Step, Wanted, abstained, failed, passed, shown

TESTS_MAX = 20_000
_ALWAYS_PROTECTED = ("conftest.py", "pytest.ini", "sitecustomize.py", "usercustomize.py", "*.pth")
"""By name, in any directory: they steer every test of the tree."""
_NEVER_SHADOWED = ("pytest", "_pytest", "pluggy", "unittest", "json", "xml", "os", "sys", "tempfile")
"""At the top of the tree, a module of such a name would stand in for the tests' own tools."""


class PatchOptions(Fact, frozen=True, kw_only=True):
    """Options of kind `patch`."""

    checkouts: str = ""
    """A directory of the host; the case's `checkout` names the tree below it. Without it the case brings `files`."""
    framework: Literal["pytest", "unittest", "command"] = "pytest"
    python: tuple[str, ...] = ("python3",)
    command: tuple[str, ...] = ()
    """Of framework `command`: runs the tests and writes a JUnit report to `{report}`."""
    protected: tuple[str, ...] = ()
    """Further globs of paths that a patch may not change, beside the files of the tests and what steers them."""
    total_s: float = 600.0
    memory_bytes: int = 4 << 30
    processes: int = 128
    allow_unshielded: bool = False

    def __post_init__(self) -> None:
        require_range("total_s", self.total_s, 1.0, 86400.0)
        require_range("memory_bytes", self.memory_bytes, 64 << 20, 1 << 42)
        require_range("processes", self.processes, 2, 100_000)
        if (self.framework == "command") != bool(self.command):
            raise ConfigError("command must be given with framework 'command', and with no other")
        if self.command and not any("{report}" in part for part in self.command):
            raise ConfigError("command must hold {report}, the path of the JUnit report that it writes")


class PatchTests:
    """Passes where the patch applies, every fail-to-pass test passes, and every pass-to-pass test still does.

    The case gives `fail_to_pass` and `pass_to_pass` (JSON lists of test names), and may give `test_patch` (a diff) or
    `test_files` (a JSON object, path to text). The patch is the artefact `patch`, else a fenced block of the answer.
    """

    kind = "patch"
    version = "1"

    def __init__(self, spec: VerifierSpec) -> None:
        self.options = read_options(spec, PatchOptions)

    def begin(self, case: Case) -> Step:
        """Read the patch, and ask for its run."""
        try:
            task = _Task(case, self.options)
        except ValueError as error:
            return abstained(self, str(error))
        try:
            files = parse_diff(_patch_of(case))
        except DiffRefused as error:
            return failed(self, str(error))
        kept = [file for file in files if not any(task.is_protected(path) for path in file.paths)]
        dropped = sorted({path for file in files for path in file.paths if task.is_protected(path)})
        state: State = {"dropped": dropped[:50], "to_pass": task.fail_to_pass, "to_keep": task.pass_to_pass}
        if not kept:
            return failed(self, f"the patch changes only tests: {', '.join(dropped)[:200]}")
        return Wanted(check=self._run(case, task, kept), state=state)

    def resume(self, case: Case, state: State, finding: Finding) -> Step:
        """Compare the outcomes with those that are wanted."""
        report = Report(case, finding, self.options.allow_unshielded)
        if report.trouble:
            return abstained(self, report.trouble)
        if report.fault:
            return failed(self, report.fault)
        told = report.fields
        evidence = {"log": str(told.get("log", ""))}
        if state.get("dropped"):
            evidence["left out of the patch"] = ", ".join(state["dropped"])
        if told.get("applied") is not True:
            return failed(self, f"the patch does not apply: {told.get('why')}")
        if told.get("is_late") is True:
            return failed(self, f"the tests took longer than {self.options.total_s} s", evidence=evidence)
        trouble = self._canary_trouble(told)
        if trouble:
            return failed(self, trouble, evidence=evidence)
        return self._judged(state, told.get("outcomes"), evidence)

    def known_pass(self) -> Case | None:
        """A patch that mends a function."""
        return self._known("    return a + b")

    def known_fail(self) -> Case | None:
        """A patch that breaks it in another way."""
        return self._known("    return a - b - 1")

    def _canary_trouble(self, told: dict[str, Any]) -> str:
        """Why the report is not to be believed; empty where it is."""
        if self.options.framework == "command":
            return "" if told.get("n_reported") else "the tests wrote no report"
        canary = told.get("canary")
        if canary == ["passed", "failed"]:
            return ""
        if not told.get("n_reported"):
            return "the tests wrote no report: they were ended before their end, or could not begin"
        if isinstance(canary, list) and canary[1:] == ["passed"]:
            return "the report is forged: a test that must fail is told as passed"
        return "the report is not whole: our own tests, which ran beside, are missing from it"

    def _judged(self, state: State, outcomes: Any, evidence: dict[str, str]) -> Step:
        if not isinstance(outcomes, dict):
            return abstained(self, "the run told no outcomes")
        for key, what in (("to_pass", "fail-to-pass"), ("to_keep", "pass-to-pass")):
            wrong = [name for name in state[key] if outcomes.get(name) != "passed"]
            if wrong:
                first = f"{shown(wrong[0])} is {outcomes.get(wrong[0], 'missing')}"
                text = f"{len(wrong)} of {len(state[key])} {what} tests did not pass; {first}"
                return failed(self, text, evidence={**evidence, what: ", ".join(wrong)})
        n_to_pass, n_to_keep = len(state["to_pass"]), len(state["to_keep"])
        return passed(self, f"{n_to_pass} fail-to-pass and {n_to_keep} pass-to-pass tests passed", evidence=evidence)

    def _known(self, line: str) -> Case | None:
        if self.options.framework == "command":
            return None  # only its user knows what his command runs
        test = "import unittest\n\nfrom adding import add\n\n\nclass TestAdd(unittest.TestCase):\n"
        test += "    def test_add(self):\n        self.assertEqual(add(2, 3), 5)\n"
        name = (
            "test_adding.py::TestAdd::test_add"
            if self.options.framework == "pytest"
            else "test_adding.TestAdd.test_add"
        )
        patch = f"--- a/adding.py\n+++ b/adding.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+{line}\n"
        return Case(
            artefacts={"patch": patch},
            references={
                "files": json.dumps({"adding.py": "def add(a, b):\n    return a - b\n"}),
                "test_files": json.dumps({"test_adding.py": test}),
                "fail_to_pass": json.dumps([name]),
                "pass_to_pass": "[]",
            },
        )

    def _run(self, case: Case, task: "_Task", kept: list[FileDiff]) -> RunInSandbox:
        options = self.options
        paper = {
            "nonce": case.nonce,
            "patch": write_diff(kept),
            "test_patch": task.test_patch,
            "test_files": task.test_files,
            "tests": [*dict.fromkeys([*task.fail_to_pass, *task.pass_to_pass])],
            "framework": options.framework,
            "python": options.python,
            "command": options.command,
            "total_s": options.total_s,
        }
        limits = Limits(
            wall_s=options.total_s + 60.0,
            cpu_s=options.total_s + 30.0,
            memory_bytes=options.memory_bytes,
            processes=options.processes,
            file_bytes=256 << 20,
            output_bytes=4 << 20,
        )
        files = {path: text.encode("utf-8", "surrogateescape") for path, text in task.files.items()}
        return RunInSandbox(
            argv=("python3", "-I", "-B", SCRIPT),
            script="patcher",
            files=files,
            copy_in=task.checkout,
            stdin=json.dumps(paper).encode(),
            limits=limits,
        )


class _Task:
    """What the case says of the repository and its tests.

    Raises:
        ValueError: something is missing or cannot be read; the message says what.
    """

    def __init__(self, case: Case, options: PatchOptions) -> None:
        self.fail_to_pass = _names(case, "fail_to_pass", "FAIL_TO_PASS")
        self.pass_to_pass = _names(case, "pass_to_pass", "PASS_TO_PASS")
        if not self.fail_to_pass and not self.pass_to_pass:
            raise ValueError("there are no tests: neither fail_to_pass nor pass_to_pass names one")
        self.test_files = _files(case, "test_files")
        self.files = _files(case, "files")
        self.test_patch = ""
        touched: list[str] = []
        test_patch = case.given("test_patch")
        if test_patch is not None and test_patch.strip():
            parsed = parse_diff(test_patch)
            self.test_patch = write_diff(parsed)
            touched = [path for file in parsed for path in file.paths]
        named = [name.split("::", 1)[0] for name in (*self.fail_to_pass, *self.pass_to_pass) if "::" in name]
        self._tests = {*touched, *self.test_files, *named}
        self._globs = options.protected
        self.checkout = self._found(case, options)

    def is_protected(self, path: str) -> bool:
        """Whether a patch may not change a file: it is a test, or steers tests."""
        name, top = path.rsplit("/", 1)[-1], path.split("/", 1)[0].split(".", 1)[0]
        return (
            any(path == test or path.startswith(test + "/") or test.startswith(path + "/") for test in self._tests)
            or any(fnmatch.fnmatchcase(name, glob) for glob in _ALWAYS_PROTECTED)
            or any(fnmatch.fnmatchcase(path, glob) for glob in self._globs)
            or (top in _NEVER_SHADOWED and (path.endswith((".py", ".so")) or "/" in path))
        )

    def _found(self, case: Case, options: PatchOptions) -> str | None:
        if self.files:
            return None
        name = case.given("checkout", "instance_id")
        if name is None or not options.checkouts:
            raise ValueError("there is no repository: the case brings no files, and no checkout is named")
        require_inside(name)
        if "/" in name:
            raise ValueError(f"the checkout {shown(name)} is no plain name")
        return f"{options.checkouts.rstrip('/')}/{name}"


def _patch_of(case: Case) -> str:
    for name in ("patch", "model_patch", "diff"):
        if name in case.artefacts:
            return case.artefacts[name]
    blocks = [block for block in fenced(case.answer) if "--- " in block or "diff --git " in block]
    return blocks[-1] + "\n" if blocks else case.answer


def _names(case: Case, *keys: str) -> list[str]:
    given = case.given(*keys)
    if given is None:
        return []
    try:
        loaded = strict_json(given)
    except ValueError as error:
        raise ValueError(f"{keys[0]} is no JSON: {error}") from error
    if not isinstance(loaded, list) or not all(isinstance(item, str) and item for item in loaded):
        raise ValueError(f"{keys[0]} is no JSON list of names")
    if len(loaded) > TESTS_MAX:
        raise ValueError(f"{keys[0]} names {len(loaded)} tests; at most {TESTS_MAX} are run")
    if any(item.startswith("-") or not item.isprintable() for item in loaded):
        raise ValueError(f"{keys[0]} names a test that begins with '-' or holds what is not printable")
    return list(loaded)


def _files(case: Case, key: str) -> dict[str, str]:
    given = case.given(key)
    if given is None:
        return {}
    try:
        loaded = strict_json(given)
    except ValueError as error:
        raise ValueError(f"{key} is no JSON: {error}") from error
    if not isinstance(loaded, dict) or not all(isinstance(text, str) for text in loaded.values()):
        raise ValueError(f"{key} is no JSON object from path to text")
    for path in loaded:
        require_inside(path)
    return dict(loaded)
