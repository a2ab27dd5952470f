"""The contract that every kind of verifier keeps, whatever the case holds."""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.work import Verdict, VerdictKind
from loadwise.verify.case import Case
from loadwise.verify.check import Check, Compute, Finding, FindingStatus, Limits, RunInSandbox
from loadwise.verify.registry import make_verifier
from loadwise.verify.spec import VERIFIER_KINDS, VerifierSpec
from loadwise.verify.verifier import STEPS_MAX, Verifier, Wanted, shown
from tests.verify.carry import carry_out, judged

FUSED = {"rule": "all", "members": [{"kind": "exact"}, {"kind": "judge"}, {"kind": "math"}]}
SPECS = {kind: VerifierSpec(kind=kind) for kind in VERIFIER_KINDS}
SPECS["command"] = VerifierSpec(kind="command", run="grade", options={"reads": "json"})
SPECS["webhook"] = VerifierSpec(kind="webhook", url="http://127.0.0.1:1")
SPECS["fusion"] = VerifierSpec(kind="fusion", options=FUSED)
SPECS["container"] = VerifierSpec(kind="container", options={"image": "debian"})

HOSTILE = {
    "empty": "",
    "ten megabytes": "x" * 10_000_000,
    "ten megabytes of boxes": "\\boxed{" * 1_500_000,
    "binary": bytes(range(256)).decode("latin-1") * 40,
    "NUL": "\x00" * 1000,
    "half a surrogate pair": "\ud800\udfff" * 100,
    "brackets": "[" * 100_000,
    "braces": "{" * 100_000,
    "closed brackets": "(" * 50_000 + ")" * 50_000,
    "backslashes": "\\" * 100_000,
    "fences": "```\n" * 50_000,
    "a pattern": "(a+)+$" * 10_000,
    "food for a pattern": "a" * 50_000 + "!",
    "answers": "Answer: " * 20_000,
    "answer is": "the answer is " * 20_000,
    "hashes": "#### " * 20_000,
    "spaces": " " * 1_000_000 + "x",
    "newlines": "\n" * 1_000_000,
    "digits": "9" * 1_000_000,
    "commas": "1," * 500_000,
    "exponents": "1e" * 100_000 + "9" * 9,
    "infinity": "1e999999",
    "a tower": "\\boxed{10**10**10}",
    "nan": "nan",
    "signs": "+-" * 100_000,
    "percents": "%" * 100_000,
    "fractions": "\\frac{1}{" * 10_000,
    "units": "\\boxed{5" + "\\text{ cm}" * 1000 + "}",
    "powers": "2^" * 10_000,
    "marks": "*_`$" * 50_000,
    "hunks": "--- a/x\n+++ b/x\n@@ -1,999999999 +1,999999999 @@\n" + " \n" * 10_000,
    "headers": "diff --git a/x b/x\n" * 50_000,
}
REFERENCES = {
    "reference": "4",
    "expected_state": '{"a": 1}',
    "tests": "def check(candidate):\n    assert candidate(1) == 2",
    "entry_point": "f",
    "files": '{"a.py": ""}',
    "fail_to_pass": '["test_a.py::test_a"]',
}


def carried_out(check: Check) -> Finding:
    """What a runner answers that has nothing: so that verifiers are driven to their end."""
    if isinstance(check, Compute):
        return carry_out(check)
    if isinstance(check, RunInSandbox):
        return Finding(stdout=b'{"nonce": "n", "started": true, "shielded": true}\n', killed="cpu")
    return Finding(status=FindingStatus.ERROR, reason="nothing here")


def drive(by: Verifier, case: Case) -> Verdict:
    """The verdict; every check and state goes through JSON, as in the runner's queue."""
    step = by.begin(case)
    for _ in range(STEPS_MAX):
        if isinstance(step, Verdict):
            return step
        stored = msgspec.json.decode(msgspec.json.encode(step), type=Wanted)
        assert stored.state == step.state
        step = by.resume(case, stored.state, carried_out(stored.check))
    raise AssertionError("no end")


def test_every_kind_of_a_configuration_is_made() -> None:
    """And says who it is."""
    for kind in VERIFIER_KINDS:
        by = make_verifier(SPECS[kind])
        assert by.kind == kind and by.version


@pytest.mark.parametrize("kind", VERIFIER_KINDS)
def test_unknown_options_are_refused(kind: str) -> None:
    """With the key, and the kind."""
    options = {**SPECS[kind].options, "no_such_key": 1}
    with pytest.raises(ConfigError) as error:
        make_verifier(msgspec.structs.replace(SPECS[kind], options=options))
    assert "no_such_key" in error.value.message and kind in error.value.message


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("kind", [kind for kind in VERIFIER_KINDS if kind not in ("external", "human")])
def test_hostile_answers_end_in_a_verdict_with_a_reason(kind: str, name: str) -> None:
    """Never a pass, never an error, and the verdict fits into a journal."""
    text = HOSTILE[name]
    case = Case(
        program_id="p",
        answer=text,
        artefacts={"state": text, "patch": text, "code": text},
        references={**REFERENCES, "reference": "B"} if kind == "choice" else REFERENCES,
        nonce="n",
    )
    found = drive(make_verifier(SPECS[kind]), case)
    assert found.verdict is not VerdictKind.PASS
    assert found.explanation and len(found.explanation) <= 500
    assert all(len(piece) <= 2000 for piece in found.evidence.values())
    assert msgspec.json.decode(msgspec.json.encode(found), type=Verdict) == found
    if kind not in ("command", "webhook", "container", "judge", "fusion"):
        assert found.verdict is VerdictKind.FAIL, found.explanation


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_references_blame_nobody(name: str) -> None:
    """A task that cannot be read abstains; it passes nobody but who says the same."""
    text = HOSTILE[name]
    for kind in ("choice", "numeric", "state", "patch"):
        case = Case(answer="4", artefacts={"state": "4", "patch": "x"}, references=dict.fromkeys(REFERENCES, text))
        found = drive(make_verifier(SPECS[kind]), case)
        assert found.verdict is not VerdictKind.PASS, (kind, found.explanation)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(max_size=300), st.text(max_size=100))
def test_no_case_raises(answer: str, reference: str) -> None:
    """Any text in any place."""
    case = Case(
        answer=answer,
        prompt=reference,
        artefacts={"state": answer, "patch": answer, "code": answer},
        references=dict.fromkeys(REFERENCES, reference),
        nonce="n",
    )
    for spec in SPECS.values():
        found = drive(make_verifier(spec), case)
        msgspec.json.encode(found)


@pytest.mark.parametrize("kind", ["exact", "choice", "numeric", "math", "state", "code", "patch"])
def test_known_cases_are_graded_right(kind: str) -> None:
    """As at start and in `doctor`, the checks carried out."""
    options: dict[str, Any] = {}
    if kind in ("code", "patch"):
        options = {"python": [sys.executable], "allow_unshielded": True}
    by = make_verifier(VerifierSpec(kind=kind, options=options))
    good, bad = by.known_pass(), by.known_fail()
    assert good is not None and bad is not None
    assert judged(by, good).verdict is VerdictKind.PASS
    assert judged(by, bad).verdict is VerdictKind.FAIL


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("exact", {"alternatives": True}),
        ("exact", {"reads": "whole", "punctuation": True, "case_sensitive": True}),
        ("choice", {"choices": 2}),
        ("numeric", {"absolute": 1e300}),
        ("numeric", {"relative_ratio": 1.0, "percent": "ratio", "reads": "marked"}),
        ("math", {"units": False, "float_digits": 0}),
        ("state", {"mode": "subset", "unordered": True, "absolute": 10.0, "reads": "answer"}),
        ("state", {"ignore": ["seats"]}),
        ("state", {"ignore": ["*"]}),
    ],
)
def test_known_cases_hold_under_any_options(kind: str, options: dict[str, Any]) -> None:
    """No tolerance makes the known fail pass."""
    by = make_verifier(VerifierSpec(kind=kind, options=options))
    good, bad = by.known_pass(), by.known_fail()
    assert good is not None and bad is not None
    assert judged(by, good).verdict is VerdictKind.PASS
    assert judged(by, bad).verdict is VerdictKind.FAIL


def test_every_option_is_documented() -> None:
    """A key that a user can write stands in the page of verifiers."""
    page = (Path(__file__).parents[2] / "docs" / "verification.md").read_text()
    made = {kind: make_verifier(spec) for kind, spec in SPECS.items()}
    options = {kind: getattr(by, "options", None) for kind, by in made.items()}
    for kind, fact in options.items():
        assert f"`{kind}`" in page
        for name in getattr(fact, "__struct_fields__", ()):
            assert f"`{name}`" in page, (kind, name)


def test_checks_survive_a_queue_on_disk() -> None:
    """Bytes, limits and kinds come back as they were."""
    checks: list[Check] = [
        RunInSandbox(argv=("a",), stdin=b"\xff\x00", files={"x": b"\xfe"}, limits=Limits(wall_s=1.5)),
        Compute(function="math_equal", arguments={"answer": "1"}),
    ]
    for check in checks:
        assert msgspec.json.decode(msgspec.json.encode(check), type=Check) == check


@pytest.mark.parametrize("field", Limits.__struct_fields__)
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_limits_are_limits(field: str, value: float) -> None:
    """None of them can be switched off."""
    with pytest.raises(ConfigError, match=field):
        Limits(**{field: value})  # type: ignore[arg-type]


def test_shown_is_short_and_printable() -> None:
    """Whatever it shows."""
    assert shown("a" * 1000) == "'" + "a" * 80 + "…' (1000 characters)"
    assert json.loads(json.dumps(shown("\ud800\x00"))) == "'\\ud800\\x00'"
