"""Patches and the tests of their repository: SWE-bench's rules, and patches that reach for the tests or the report."""

import json
import sys
from typing import Any

import pytest

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.work import Verdict, VerdictKind
from loadwise.verify.case import Case
from loadwise.verify.check import Finding, RunInSandbox
from loadwise.verify.patch import PatchTests
from tests.verify.carry import asked, judged, told, verifier

PASS, FAIL, ABSTAIN = VerdictKind.PASS, VerdictKind.FAIL, VerdictKind.ABSTAIN

FILES = {
    "adding.py": "def add(a, b):\n    return a - b\n",
    "halving.py": "def half(a):\n    return a / 2\n",
    "test_halving.py": "import unittest\nfrom halving import half\n\n\nclass TestHalf(unittest.TestCase):\n"
    "    def test_half(self):\n        self.assertEqual(half(4), 2)\n",
}
TEST = (
    "import unittest\nfrom adding import add\n\n\nclass TestAdd(unittest.TestCase):\n"
    "    def test_add(self):\n        self.assertEqual(add(2, 3), 5)\n"
)
HEAD = "--- a/adding.py\n+++ b/adding.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n"
RIGHT = HEAD + "+    return a + b\n"


def grader(framework: str = "unittest", **options: Any) -> PatchTests:
    """The verifier, with this Python."""
    limits = {"total_s": 240.0, "allow_unshielded": True, **options}
    made = verifier("patch", framework=framework, **{"python": [sys.executable], **limits})
    assert isinstance(made, PatchTests)
    return made


def case(patch: str, framework: str = "unittest", **references: str) -> Case:
    """One patch of the little repository."""
    names = {
        "unittest": ("test_adding.TestAdd.test_add", "test_halving.TestHalf.test_half"),
        "pytest": ("test_adding.py::TestAdd::test_add", "test_halving.py::TestHalf::test_half"),
    }[framework]
    return Case(
        artefacts={"patch": patch},
        references={
            "files": json.dumps(FILES),
            "test_files": json.dumps({"test_adding.py": TEST}),
            "fail_to_pass": json.dumps(names[:1]),
            "pass_to_pass": json.dumps(names[1:]),
            **references,
        },
        nonce="n1",
    )


@pytest.mark.parametrize("framework", ["unittest", "pytest"])
def test_a_patch_that_mends_passes_and_one_that_breaks_fails(framework: str) -> None:
    """Fail-to-pass must pass, and pass-to-pass must still pass."""
    by = grader(framework)
    good = judged(by, case(RIGHT, framework))
    assert good.verdict is PASS, (good.explanation, good.evidence)
    assert judged(by, case(HEAD + "+    return a * b\n", framework)).verdict is FAIL
    breaks = "--- a/halving.py\n+++ b/halving.py\n@@ -1,2 +1,2 @@\n def half(a):\n-    return a / 2\n+    return 0\n"
    broken = judged(by, case(RIGHT + breaks, framework))
    assert broken.verdict is FAIL and "pass-to-pass" in broken.explanation


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        (RIGHT.replace("return a - b", "return a"), "does not apply"),
        ("--- a/none.py\n+++ b/none.py\n@@ -1 +1 @@\n-x\n+y\n", "does not apply"),
        (HEAD.replace("adding.py", "../adding.py") + "+    return a + b\n", "leads out"),
        (HEAD.replace("adding.py", ".git/config") + "+    return a + b\n", "belongs to git"),
        ("", "empty"),
        ("\x00\ud800", "NUL"),
        ("diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+/etc\n", "symbolic link"),
        (RIGHT.replace("adding.py", "test_adding.py"), "changes only tests"),
        ("--- /dev/null\n+++ b/conftest.py\n@@ -0,0 +1 @@\n+import os; os._exit(0)\n", "changes only tests"),
        ("--- /dev/null\n+++ b/unittest/__init__.py\n@@ -0,0 +1 @@\n+x = 1\n", "changes only tests"),
        ("--- /dev/null\n+++ b/pytest.py\n@@ -0,0 +1 @@\n+x = 1\n", "changes only tests"),
        ("--- /dev/null\n+++ b/test_adding.py/x.py\n@@ -0,0 +1 @@\n+x = 1\n", "changes only tests"),
        ("--- /dev/null\n+++ b/sub/x.pth\n@@ -0,0 +1 @@\n+import os\n", "changes only tests"),
        ("x" * 10_000_000, "at most"),
    ],
)  # fmt: skip
def test_patches_that_may_not_be_applied_fail_with_their_reason(patch: str, says: str) -> None:
    """Most of them before anything runs."""
    found = judged(grader(), case(patch))
    assert found.verdict is FAIL and says in found.explanation


def test_a_patch_cannot_change_its_tests() -> None:
    """What touches tests is left out and named; the tests' own files are laid over the tree."""
    weak = "--- /dev/null\n+++ b/test_adding.py\n@@ -0,0 +1 @@\n+x = 1\n"
    found = judged(grader(), case(HEAD + "+    return 0\n" + weak))
    assert found.verdict is FAIL
    assert found.evidence["left out of the patch"] == "test_adding.py"
    assert judged(grader(), case(RIGHT + weak)).verdict is PASS


def test_a_link_in_the_repository_is_no_way_out() -> None:
    """git apply refuses to write through it; the laying of tests does too."""
    wanted = asked(grader(), case(RIGHT))
    assert isinstance(wanted.check, RunInSandbox)
    paper = json.loads(wanted.check.stdin)
    assert paper["test_files"] == {"test_adding.py": TEST}
    assert wanted.check.argv[-1] == "{script}"


@pytest.mark.parametrize("framework", ["unittest", "pytest"])
@pytest.mark.parametrize(
    "line",
    [
        "+import os; os._exit(0)",
        "+import sys; sys.exit(0)",
        "+print('OK'); print('2 passed')",
        "+import unittest; unittest.TestCase.assertEqual = unittest.TestCase.assertTrue = lambda *a, **k: None",
        "+import unittest; unittest.TestCase.assertEqual = lambda *a, **k: None",
        "+import unittest; unittest.TestCase.run = lambda self, result=None: result.addSuccess(self)",
    ],
)
def test_forged_passes_are_found_out(framework: str, line: str) -> None:
    """Leaving early, printing a pass, or making every test pass does not pass: the canary must fall."""
    wrong = RIGHT.replace("a + b", "0").replace("@@ -1,2 +1,2 @@\n", f"@@ -1,2 +1,3 @@\n{line}\n")
    found = judged(grader(framework), case(wrong, framework))
    assert found.verdict is FAIL, found.explanation


def test_a_test_patch_and_a_rename_are_applied() -> None:
    """The tests may come as a diff; its files are protected like the others."""
    test_patch = "--- /dev/null\n+++ b/test_adding.py\n@@ -0,0 +1,7 @@\n" + "".join(
        f"+{line}\n" for line in TEST.splitlines()
    )
    one = case(RIGHT, test_patch=test_patch, test_files="{}")
    found = judged(grader(), one)
    assert found.verdict is PASS, found.explanation
    broken = case(RIGHT, test_patch=test_patch.replace("/dev/null", "a/none.py"), test_files="{}")
    assert judged(grader(), broken).verdict is ABSTAIN


def test_tests_that_take_too_long_fail() -> None:
    """The code is slow: its fault."""
    slow = RIGHT.replace("return a + b", "while True: pass")
    found = judged(grader(total_s=2.0), case(slow))
    assert found.verdict is FAIL and "longer than 2.0 s" in found.explanation


@pytest.mark.parametrize(
    "references",
    [
        {"fail_to_pass": "[]", "pass_to_pass": "[]"},
        {"fail_to_pass": "[1]"},
        {"fail_to_pass": "["},
        {"fail_to_pass": '["--collect-only"]'},
        {"files": "{}"},
        {"files": "{}", "checkout": "../elsewhere"},
        {"files": "{}", "checkout": "a/b"},
        {"files": '{"../x": ""}'},
        {"files": '{"x": 1}'},
        {"test_files": '{"/etc/passwd": ""}'},
        {"test_patch": "nonsense"},
        {"test_patch": "--- a/.git/x\n+++ b/.git/x\n@@ -1 +1 @@\n-a\n+b\n"},
    ],
)
def test_a_task_that_cannot_be_read_abstains(references: dict[str, str]) -> None:
    """Nobody is blamed for a broken task."""
    assert told(grader(checkouts="/srv/checkouts"), case(RIGHT, **references)).verdict is ABSTAIN


def test_a_checkout_is_copied_in() -> None:
    """The case names it; the configuration says where checkouts lie."""
    wanted = asked(grader(checkouts="/srv/checkouts/"), case(RIGHT, files="{}", checkout="repo-1.2"))
    assert isinstance(wanted.check, RunInSandbox)
    assert wanted.check.copy_in == "/srv/checkouts/repo-1.2" and not wanted.check.files


def test_a_missing_tool_is_not_the_programs_fault() -> None:
    """Without pytest there is no verdict."""
    missing = judged(grader("pytest", python=["/bin/false"]), case(RIGHT, "pytest"))
    assert missing.verdict is ABSTAIN and "pytest does not run in the sandbox" in missing.explanation


def test_reports_are_read_strictly() -> None:
    """Outcomes decide; a report without our canary, or with one that stands where it must fall, is not believed."""
    by, one = grader("pytest"), case(RIGHT, "pytest")
    state = asked(by, one).state
    f2p, p2p = state["to_pass"][0], state["to_keep"][0]

    def verdict(**fields: Any) -> VerdictKind:
        line = {"nonce": "n1", "finished": True, "applied": True, "n_reported": 4, "is_late": False, **fields}
        started = b'{"nonce": "n1", "started": true, "shielded": true}\n'
        step = by.resume(one, state, Finding(stdout=started + json.dumps(line).encode() + b"\n"))
        assert isinstance(step, Verdict)
        return step.verdict

    good = {f2p: "passed", p2p: "passed"}
    assert verdict(canary=["passed", "failed"], outcomes=good) is PASS
    assert verdict(canary=["passed", "passed"], outcomes=good) is FAIL
    assert verdict(canary=[None, None], outcomes=good) is FAIL
    assert verdict(canary=None, outcomes=good) is FAIL
    assert verdict(canary=["passed", "failed"], outcomes={**good, p2p: "skipped"}) is FAIL
    assert verdict(canary=["passed", "failed"], outcomes={f2p: "passed"}) is FAIL
    assert verdict(canary=["passed", "failed"], outcomes=None) is ABSTAIN
    assert verdict(canary=["passed", "failed"], outcomes=good, n_reported=0) is PASS
    assert verdict(error="no git") is ABSTAIN


def test_a_users_own_command_reports_by_junit() -> None:
    """It writes the report where it is told to; without one it fails."""
    script = "import sys; open(sys.argv[1], 'w').write('<testsuite><testcase classname=\"t\" name=\"a\"/></testsuite>')"
    by = verifier(
        "patch", framework="command", command=[sys.executable, "-c", script, "{report}"], allow_unshielded=True
    )
    names = {"fail_to_pass": '["t.a"]', "pass_to_pass": "[]"}
    assert judged(by, case(RIGHT, **names)).verdict is PASS
    assert judged(by, case(RIGHT, fail_to_pass='["t.b"]', pass_to_pass="[]")).verdict is FAIL
    silent = verifier("patch", framework="command", command=["/bin/true", "{report}"], allow_unshielded=True)
    assert judged(silent, case(RIGHT, **names)).verdict is FAIL


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"framework": "nose"}, "framework"),
        ({"framework": "command"}, "command must be given"),
        ({"command": ["make"]}, "command must be given"),
        ({"framework": "command", "command": ["make"]}, "must hold {report}"),
        ({"total_s": 0.0}, "total_s is 0.0"),
    ],
)
def test_wrong_options(options: dict[str, Any], says: str) -> None:
    """Each names its key."""
    with pytest.raises(ConfigError, match=says):
        verifier("patch", **options)
