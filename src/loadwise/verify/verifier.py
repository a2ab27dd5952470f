"""The protocol of verifiers, and the one way in which they make verdicts.

A verdict's text goes into journals and dashboards, so it is short, printable and bounded whatever the answer holds.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from loadwise.kernel.fact import Fact
from loadwise.kernel.work import Verdict, VerdictKind

from .case import Case
from .check import Check, Finding, FindingStatus

EXPLANATION_MAX_CHARACTERS = 500
EVIDENCE_MAX_CHARACTERS = 2_000
"""Of one piece of evidence."""
EVIDENCE_MAX_PIECES = 16

State = dict[str, Any]
"""What a verifier must remember between a check and its finding: JSON-able builtins, so that it survives a restart."""


class Wanted(Fact, frozen=True, kw_only=True):
    """A check to carry out before there is a verdict, and what to hand back with its finding."""

    check: Check
    state: State = {}


Step = Verdict | Wanted
"""What a verifier says: its verdict, or what it still wants to know."""


class Verifier(Protocol):
    """Judges cases of one kind. Immutable: all that changes is in the `State` it hands out.

    Both methods are pure and bounded: they never raise for what a case holds, take time linear in the text they read
    (up to a second for the largest that is read at all, so hosts call them off their event loop), and end after a
    bounded number of findings. The runner fills in `took_s` and `cost_usd` of the verdict from the
    findings, and stops a verifier that wants more than `STEPS_MAX` checks.
    """

    @property
    def kind(self) -> str:
        """Its name in a configuration."""
        ...

    @property
    def version(self) -> str:
        """Changes whenever a verdict may."""
        ...

    def begin(self, case: Case) -> Step:
        """Judge a case, or say what to find out first."""
        ...

    def resume(self, case: Case, state: State, finding: Finding) -> Step:
        """Go on with what was found."""
        ...

    def known_pass(self) -> Case | None:
        """A case that must pass before any verdict of this verifier is credited; None where only its user knows one."""
        ...

    def known_fail(self) -> Case | None:
        """A case that must fail before any verdict of this verifier is credited."""
        ...


STEPS_MAX = 64
"""More checks than this of one case is a bug of the verifier."""


def passed(by: Verifier, why: str, *, score: float = 1.0, evidence: Mapping[str, str] | None = None) -> Verdict:
    """The case is right."""
    return _verdict(VerdictKind.PASS, by, why, score, evidence)


def failed(by: Verifier, why: str, *, score: float = 0.0, evidence: Mapping[str, str] | None = None) -> Verdict:
    """The case is wrong, and the fault is the program's."""
    return _verdict(VerdictKind.FAIL, by, why, score, evidence)


def abstained(by: Verifier, why: str, *, evidence: Mapping[str, str] | None = None) -> Verdict:
    """The verifier does not know: no credit, which is not a zero."""
    return _verdict(VerdictKind.ABSTAIN, by, why, None, evidence)


def not_carried_out(by: Verifier, finding: Finding) -> Verdict | None:
    """Abstain where the check was not carried out; None where it was."""
    if finding.status is FindingStatus.OK:
        return None
    reason = finding.reason or "no reason given"
    return abstained(by, f"the check ended as {finding.status.value}: {reason}")


def shown(text: str, limit: int = 80) -> str:
    """A text as a short, printable literal, whatever it holds.

    >>> shown("a\\x00b" + "c" * 10, limit=6)
    "'a\\\\x00bccc…' (13 characters)"
    """
    if len(text) <= limit:
        return ascii(text)
    return f"{ascii(text[:limit])[:-1]}…' ({len(text)} characters)"


def _verdict(
    kind: VerdictKind, by: Verifier, why: str, score: float | None, evidence: Mapping[str, str] | None
) -> Verdict:
    pieces = list((evidence or {}).items())[:EVIDENCE_MAX_PIECES]
    return Verdict(
        verdict=kind,
        score=score,
        verifier=by.kind,
        version=by.version,
        explanation=_printable(why, EXPLANATION_MAX_CHARACTERS),
        evidence={_printable(name, 80): _printable(text, EVIDENCE_MAX_CHARACTERS) for name, text in pieces},
    )


def _printable(text: str, limit: int) -> str:
    """At most `limit` characters, without control characters and halves of surrogate pairs, which no journal holds."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(char if char.isprintable() or char in "\n\t" else "�" for char in cut)
