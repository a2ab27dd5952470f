"""The user's own command and webhook, container tests, and reports from outside."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.work import Verdict, VerdictKind
from loadwise.verify.case import Case
from loadwise.verify.check import (
    AwaitReport,
    CallWebhook,
    Finding,
    FindingStatus,
    RunCommand,
    RunContainer,
)
from loadwise.verify.registry import make_verifier
from loadwise.verify.spec import VerifierSpec
from loadwise.verify.verifier import Verifier
from tests.verify.carry import asked, told, verifier

PASS, FAIL, ABSTAIN = VerdictKind.PASS, VerdictKind.FAIL, VerdictKind.ABSTAIN
CASE = Case(program_id="p", prompt="do", answer="done \ud800", artefacts={"a": "b"}, nonce="secret")


def command(**options: Any) -> Verifier:
    """A user's command."""
    return make_verifier(VerifierSpec(kind="command", run="grade --strict 'a b'", timeout_s=7.0, options=options))


def webhook() -> Verifier:
    """A user's webhook."""
    return make_verifier(VerifierSpec(kind="webhook", url="http://127.0.0.1:1/grade", timeout_s=7.0))


def after(by: Verifier, **fields: Any) -> Verdict:
    """The verdict on one finding."""
    wanted = asked(by, CASE)
    step = by.resume(CASE, wanted.state, Finding(**fields))
    assert isinstance(step, Verdict)
    return step


def test_a_command_gets_the_case_and_no_shell() -> None:
    """The line is split as a shell would; the nonce stays with us, and the case is plain JSON."""
    check = asked(command(), CASE).check
    assert isinstance(check, RunCommand)
    assert check.argv == ("grade", "--strict", "a b") and check.wall_s == 7.0
    told_case = json.loads(check.stdin)
    assert told_case["program_id"] == "p" and told_case["answer"] == "done \ud800" and "nonce" not in told_case


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({"exit_code": 0}, PASS),
        ({"exit_code": 1}, FAIL),
        ({"exit_code": 2}, ABSTAIN),
        ({"exit_code": 127}, ABSTAIN),
        ({"exit_code": -9}, ABSTAIN),
        ({"exit_code": None}, ABSTAIN),
        ({"exit_code": 0, "killed": "output"}, ABSTAIN),
        ({"exit_code": 1, "stdout": b'{"verdict": "pass"}'}, FAIL),
        ({"status": FindingStatus.TIMEOUT}, ABSTAIN),
        ({"status": FindingStatus.ERROR}, ABSTAIN),
    ],
)
def test_a_command_speaks_by_its_exit_code(fields: dict[str, Any], verdict: VerdictKind) -> None:
    """0 passes, 1 fails, all else is its own trouble; what it prints decides nothing."""
    assert after(command(), **fields).verdict is verdict


@pytest.mark.parametrize(
    ("stdout", "verdict", "score"),
    [
        ('{"verdict": "pass"}', PASS, 1.0),
        ('talk\n{"verdict": "fail", "score": 0.25}\n\n', FAIL, 0.25),
        ('{"verdict": "abstain", "explanation": "who knows"}', ABSTAIN, None),
        ('{"verdict": "pass", "score": 1.5}', ABSTAIN, None),
        ('{"verdict": "pass", "score": true}', ABSTAIN, None),
        ('{"verdict": "maybe"}', ABSTAIN, None),
        ('{"verdict": "pass"}\nmore talk', ABSTAIN, None),
        ("pass", ABSTAIN, None),
        ("", ABSTAIN, None),
        ("[" * 100_000, ABSTAIN, None),
        ('{"verdict": "fail", "verdict": "pass"}', ABSTAIN, None),
        ('{"verdict": "pass", "score": 1e999}', ABSTAIN, None),
    ],
)
def test_reports_in_json_are_read_strictly(stdout: str, verdict: VerdictKind, score: float | None) -> None:
    """Of a command that is read so, and of a webhook."""
    found = after(command(reads="json"), exit_code=0, stdout=stdout.encode())
    assert (found.verdict, found.score) == (verdict, score)
    if "talk" not in stdout:
        found = after(webhook(), exit_code=200, stdout=stdout.encode())
        assert (found.verdict, found.score) == (verdict, score)


def test_a_report_counts_only_after_a_good_end() -> None:
    """Another exit code, another status, a cut body: no verdict."""
    good = b'{"verdict": "pass"}'
    assert after(command(reads="json"), exit_code=1, stdout=good).verdict is ABSTAIN
    assert after(command(reads="json"), exit_code=0, stdout=good, is_truncated=True).verdict is ABSTAIN
    assert after(webhook(), exit_code=404, stdout=good).verdict is ABSTAIN
    assert after(webhook(), exit_code=200, stdout=good, is_truncated=True).verdict is ABSTAIN
    assert after(webhook(), status=FindingStatus.ERROR, exit_code=500).verdict is ABSTAIN


def test_a_webhook_gets_the_case_as_text_that_utf8_can_hold() -> None:
    """Halves of surrogate pairs are replaced."""
    check = asked(webhook(), CASE).check
    assert isinstance(check, CallWebhook) and check.url == "http://127.0.0.1:1/grade" and check.wall_s == 7.0
    json.dumps(check.body, ensure_ascii=False).encode()
    assert check.body["artefacts"] == {"a": "b"} and "nonce" not in check.body


def test_users_name_their_known_cases() -> None:
    """Without them nobody but the user knows what passes."""
    assert command().known_pass() is None and webhook().known_fail() is None
    known = command(known_pass={"answer": "yes"}, known_fail={"answer": "no", "references": {"a": "b"}})
    good, bad = known.known_pass(), known.known_fail()
    assert good is not None and good.answer == "yes"
    assert bad is not None and bad.references == {"a": "b"}


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"kind": "command"}, "needs the key run"),
        ({"kind": "command", "run": "  "}, "needs the key run"),
        ({"kind": "command", "run": "a 'b"}, "cannot be split"),
        ({"kind": "command", "run": "a", "url": "http://x"}, "belongs to kind 'webhook'"),
        ({"kind": "webhook"}, "needs the key url"),
        ({"kind": "webhook", "url": "file:///etc/passwd"}, "http or https"),
        ({"kind": "webhook", "url": "http://a b"}, "http or https"),
        ({"kind": "exact", "run": "a"}, "belongs to kind 'command'"),
        ({"kind": "human", "options": {"a": 1}}, "has no options"),
        ({"kind": "container", "options": {"reads": "junit"}}, "report must be given"),
        ({"kind": "container", "options": {"report": "/r.xml"}}, "report must be given"),
        ({"kind": "container", "options": {"tests_directory": "tests"}}, "absolute path"),
        ({"kind": "container", "options": {"command": []}}, "command is empty"),
    ],
)
def test_wrong_configurations(spec: dict[str, Any], says: str) -> None:
    """Each names its key."""
    with pytest.raises(ConfigError, match=says):
        make_verifier(VerifierSpec(**spec))


def test_reports_from_people_and_programs_are_awaited() -> None:
    """Nothing is carried out; without a report there is no verdict."""
    for kind in ("human", "external"):
        by = verifier(kind)
        assert isinstance(asked(by, CASE).check, AwaitReport)
        assert after(by, status=FindingStatus.TIMEOUT, reason="an hour").verdict is ABSTAIN


TESTS = json.dumps({"run-tests.sh": "exit 0", "sub/test_a.py": "é"})


def test_a_container_gets_its_tests_and_limits() -> None:
    """The agent's own container, else an image; the tests are laid in."""
    one = Case(references={"container": "agent-7", "test_files": TESTS})
    check = asked(verifier("container", timeout_s=5.0), one).check
    assert isinstance(check, RunContainer)
    assert check.image == "container:agent-7" and check.limits.wall_s == 5.0
    assert check.files == {"/tests/run-tests.sh": b"exit 0", "/tests/sub/test_a.py": "é".encode()}
    check = asked(verifier("container", image="debian"), Case()).check
    assert isinstance(check, RunContainer) and check.image == "debian"
    assert told(verifier("container"), Case()).verdict is ABSTAIN
    for image in ("--privileged", "a\ud800", "a\nb"):
        assert told(verifier("container"), Case(references={"image": image})).verdict is ABSTAIN
    for files in ("{", "[]", '{"../x": ""}', '{"/x": ""}', '{"x": 1}'):
        assert told(verifier("container", image="debian"), Case(references={"test_files": files})).verdict is ABSTAIN


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({"exit_code": 0}, PASS),
        ({"exit_code": 1}, FAIL),
        ({"exit_code": 0, "killed": "wall"}, FAIL),
        ({"exit_code": 125}, ABSTAIN),
        ({"exit_code": 127}, ABSTAIN),
        ({"exit_code": -9}, ABSTAIN),
        ({"status": FindingStatus.REFUSED, "reason": "no engine"}, ABSTAIN),
    ],
)
def test_container_tests_by_exit_code(fields: dict[str, Any], verdict: VerdictKind) -> None:
    """Troubles of the engine are not the program's."""
    assert after(verifier("container", image="debian"), **fields).verdict is verdict


@pytest.mark.parametrize(
    ("report", "verdict"),
    [
        (b'<testsuite><testcase name="a"/><testcase name="b"/></testsuite>', PASS),
        (b'<testsuite><testcase name="a"/><testcase name="b"><failure/></testcase></testsuite>', FAIL),
        (b'<testsuite><testcase name="b"><skipped/></testcase></testsuite>', FAIL),
        (b"<testsuite/>", FAIL),
        (b"2 passed", FAIL),
        (b'<!DOCTYPE x [<!ENTITY a "b">]><testsuite><testcase name="&a;"/></testsuite>', FAIL),
        (b"<a>" * 100_000, FAIL),
        (None, FAIL),
    ],
)
def test_container_tests_by_report(report: bytes | None, verdict: VerdictKind) -> None:
    """What the command prints decides nothing; no report, no pass."""
    by = verifier("container", image="debian", reads="junit", report="/r.xml")
    outputs = {} if report is None else {"/r.xml": report}
    assert after(by, exit_code=0, stdout=b"all passed", outputs=outputs).verdict is verdict


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=200), st.integers(-20, 260))
def test_no_output_of_anything_raises(output: bytes, code: int) -> None:
    """Whatever a command, a webhook or a container says."""
    junit = verifier("container", image="debian", reads="junit", report="/r.xml")
    for by in (command(), command(reads="json"), webhook(), junit):
        after(by, exit_code=code, stdout=output, stderr=output, outputs={"/r.xml": output})
