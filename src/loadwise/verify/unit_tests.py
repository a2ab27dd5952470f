"""Code by unit tests, in the forms of HumanEval, MBPP, unittest, and programs with input and output.

The tests run in the sandbox under `runner/sandboxed/examiner`, which keeps them in another process than the code:
see there why a forged pass does not count, and what is left over.
"""

import json
from typing import Any

from loadwise.kernel.fact import Fact

from .case import Case
from .check import SCRIPT, Finding, Limits, RunInSandbox
from .options import read_options, require_range, strict_json
from .reading import encodable
from .reports import Report
from .small_tests import SmallTests, small_tests
from .spec import VerifierSpec
from .verifier import State, Step, Wanted, abstained, failed, passed

CODE_MAX_CHARACTERS = 200_000
TESTS_MAX = 1_000
_SMALL_MAX_S = 2.0
_TEST_NAMES = ("tests", "test", "test_list", "reference")


class CodeOptions(Fact, frozen=True, kw_only=True):
    """Options of kind `code`."""

    entry_point: str = ""
    """The function that `check(candidate)` gets, where the case names none."""
    python: tuple[str, ...] = ("python3",)
    """The interpreter inside the sandbox."""
    call_s: float = 5.0
    """Of one call of the code; whoever takes longer fails."""
    total_s: float = 20.0
    """Of all tests together."""
    memory_bytes: int = 1 << 30
    partial: bool = False
    """Whether the score is the share of passed tests; else all must pass."""
    small_python: bool = False
    """Try tests of the form `assert f(literals) == literal` in the interpreter without files, network or imports
    first."""
    allow_unshielded: bool = False
    """Credit results though the sandbox lets the code reach the tests' process (CAP_SYS_PTRACE, no prctl)."""

    def __post_init__(self) -> None:
        require_range("call_s", self.call_s, 0.01, 3600.0)
        require_range("total_s", self.total_s, 0.01, 3600.0)
        require_range("memory_bytes", self.memory_bytes, 32 << 20, 1 << 40)


class UnitTests:
    """Passes where every test does.

    The case gives `tests`: one text, or a JSON list of them; or `pairs`, a JSON list of {"input", "output"}. It may
    give
    `setup` (runs before the code), `entry_point`, and `code_prompt` (what a bare function body goes on from). The code
    is the artefact `code`, else the last fenced block of the answer, else the whole answer.
    """

    kind = "code"
    version = "1"

    def __init__(self, spec: VerifierSpec) -> None:
        self.options = read_options(spec, CodeOptions)

    def begin(self, case: Case) -> Step:
        """Ask for one run of all tests."""
        tests, pairs = _tests(case), _pairs(case)
        if isinstance(tests, str) or isinstance(pairs, str):
            return abstained(self, tests if isinstance(tests, str) else str(pairs))
        if not tests and not pairs:
            return abstained(self, "there are no tests")
        if len(tests) + len(pairs) > TESTS_MAX:
            return abstained(self, f"there are {len(tests) + len(pairs)} tests; at most {TESTS_MAX} are run")
        entry = case.given("entry_point") or self.options.entry_point
        code = code_of(case, entry)
        if not code.strip():
            return failed(self, "the answer holds no code")
        if len(code) > CODE_MAX_CHARACTERS:
            return failed(self, f"the code has {len(code)} characters; at most {CODE_MAX_CHARACTERS} are run")
        small = self._small(case, code, tests, pairs)
        if small:
            return Wanted(check=small.check(code, min(self.options.total_s, _SMALL_MAX_S)), state={"is_small": True})
        return Wanted(check=self._run(case, code, entry, tests, pairs))

    def resume(self, case: Case, state: State, finding: Finding) -> Step:
        """Count what the examiner saw; go on to it where small Python did not pass."""
        if state.get("is_small"):
            return self._after_small(case, finding)
        report = Report(case, finding, self.options.allow_unshielded)
        if report.trouble:
            return abstained(self, report.trouble)
        if report.fault:
            return failed(self, report.fault)
        told = report.fields
        n_tests, n_wrong = _count(told, "n_tests"), _count(told, "n_wrong")
        wrong = told.get("wrong")
        evidence = {str(name): str(why) for name, why in wrong} if isinstance(wrong, list) else {}
        if told.get("unsupported"):
            return abstained(self, f"the tests cannot be run here: {told['unsupported']}", evidence=evidence)
        if told.get("expired"):
            return failed(self, f"the tests took longer than {self.options.total_s} s", evidence=evidence)
        if n_tests <= 0:
            return abstained(self, "no test was run: the tests assert nothing")
        if n_wrong == 0:
            return passed(self, f"{n_tests} of {n_tests} tests passed")
        score = (n_tests - n_wrong) / n_tests if self.options.partial else 0.0
        first = f": {next(iter(evidence.values()))}" if evidence else ""
        return failed(self, f"{n_wrong} of {n_tests} tests failed{first}", score=score, evidence=evidence)

    def known_pass(self) -> Case | None:
        """A right function."""
        return self._known("return a + b")

    def known_fail(self) -> Case | None:
        """A wrong one that ends its process with success."""
        return self._known("import os; os._exit(0)")

    def _known(self, body: str) -> Case:
        return Case(
            answer=f"```python\ndef add(a, b):\n    {body}\n```",
            references={"tests": "def check(candidate):\n    assert candidate(2, 3) == 5", "entry_point": "add"},
        )

    def _small(self, case: Case, code: str, tests: list[str], pairs: list[dict[str, str]]) -> SmallTests | None:
        if not self.options.small_python or pairs or case.given("setup", "test_setup_code"):
            return None
        if encodable(code) != code:
            return None  # it is no Python, and no queue could hold it
        return small_tests(tests)

    def _after_small(self, case: Case, finding: Finding) -> Step:
        tests, pairs = _tests(case), _pairs(case)
        assert isinstance(tests, list) and isinstance(pairs, list), "begin has read them"
        small = small_tests(tests)
        if small and small.are_passed_by(finding):
            return passed(self, f"{len(small.calls)} of {len(small.calls)} tests passed in small Python")
        entry = case.given("entry_point") or self.options.entry_point
        return Wanted(check=self._run(case, code_of(case, entry), entry, tests, pairs))

    def _run(self, case: Case, code: str, entry: str, tests: list[str], pairs: list[dict[str, str]]) -> RunInSandbox:
        options = self.options
        paper = {
            "nonce": case.nonce,
            "code": code,
            "setup": case.given("setup", "test_setup_code") or "",
            "entry_point": entry,
            "tests": tests,
            "pairs": pairs,
            "call_s": options.call_s,
            "total_s": options.total_s,
        }
        limits = Limits(
            wall_s=options.total_s + 10.0,  # the examiner ends by itself before: whoever reaches this wall held it up
            cpu_s=options.total_s + 5.0,
            memory_bytes=options.memory_bytes,
            file_bytes=16 << 20,
        )
        argv = (*options.python, "-I", "-B", SCRIPT)
        return RunInSandbox(argv=argv, script="examiner", stdin=json.dumps(paper).encode(), limits=limits)


def code_of(case: Case, entry: str = "") -> str:
    """The code that a case hands in."""
    code = case.artefacts.get("code")
    if code is None:
        blocks = fenced(case.answer[-2 * CODE_MAX_CHARACTERS :])
        defining = [block for block in blocks if entry and f"def {entry}" in block]
        code = (defining or blocks or [case.answer])[-1]
    prompt = case.given("code_prompt")
    if prompt is not None and entry and f"def {entry}" not in code:
        code = prompt + code
    return code


def fenced(text: str) -> list[str]:
    """The contents of all closed fences (``` lines), and of one that the end of the text leaves open.

    >>> fenced("say\\n```python\\nx = 1\\n```\\ndone")
    ['x = 1']
    """
    blocks: list[str] = []
    lines: list[str] | None = None
    for line in text.split("\n"):
        if line.lstrip(" ").startswith("```"):
            if lines is not None:
                blocks.append("\n".join(lines))
            lines = [] if lines is None else None
        elif lines is not None:
            lines.append(line)
    if lines:
        blocks.append("\n".join(lines))
    return blocks


def _tests(case: Case) -> list[str] | str:
    """The texts of the tests, or why they cannot be read."""
    given = case.given(*_TEST_NAMES)
    if given is None:
        return []
    if not given.lstrip().startswith("["):
        return [given] if given.strip() else []
    try:
        loaded = strict_json(given)
    except ValueError:
        return [given]  # a text of Python that begins with a list
    if not isinstance(loaded, list) or not all(isinstance(item, str) for item in loaded):
        return "tests is a JSON list of something else than texts"
    return loaded


def _pairs(case: Case) -> list[dict[str, str]] | str:
    given = case.given("pairs")
    if given is None:
        return []
    try:
        loaded = strict_json(given)
    except ValueError as error:
        return f"pairs is no JSON: {error}"
    if not isinstance(loaded, list) or not all(
        isinstance(item, dict) and all(isinstance(item.get(key), str) for key in ("input", "output")) for item in loaded
    ):
        return 'pairs is no JSON list of {"input": text, "output": text}'
    return loaded


def _count(told: dict[str, Any], name: str) -> int:
    value = told.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else -1
