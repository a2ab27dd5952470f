"""How often verifiers are wrong, told from the programs that a person has judged as well.

Whoever audits judges a random sample of finished programs by `POST /v1/programs/{id}/verdict` with `verifier: human`,
those included that the machine got right: a person's verdict goes before a machine's, so each is also a correction.
Here the pairs are counted, by task type and verifier. A sample of suspicious programs only would say nothing.
"""

import math
from collections import Counter
from pathlib import Path

from loadwise.kernel.events import TurnArrived, VerdictArrived
from loadwise.kernel.fact import Fact
from loadwise.kernel.work import HUMAN, Verdict, VerdictKind
from loadwise.verify.debias import AuditedRates, estimate_rates

from .reader import read


class Audited(Fact, frozen=True, kw_only=True):
    """One verifier of one task type beside the persons who have looked."""

    task_type: str
    verifier: str
    n_right: int
    """Programs that are right, by a person's word, and on which the verifier decided."""
    n_wrong: int
    false_pass: float | None
    """Of the wrong ones, the share that it passed; None where there was none."""
    false_pass_ci95: tuple[float, float]
    false_fail: float | None
    """Of the right ones, the share that it failed."""
    false_fail_ci95: tuple[float, float]


def audit(path: str | Path) -> list[Audited]:
    """Error rates of every verifier that persons have judged beside, with 95 % intervals (Wilson).

    Raises:
        JournalError: a missing or damaged journal.
    """
    task_type_by_program: dict[str, str] = {}
    machine_by_program: dict[str, Verdict] = {}
    person_by_program: dict[str, Verdict] = {}
    for entry in read(Path(path)):
        event = entry.event
        if isinstance(event, TurnArrived):
            if event.task_type is not None:
                task_type_by_program.setdefault(event.program_id, event.task_type)
        elif isinstance(event, VerdictArrived) and event.verdict.verdict is not VerdictKind.ABSTAIN:
            by_program = person_by_program if event.verdict.verifier == HUMAN else machine_by_program
            by_program[event.program_id] = event.verdict
    counts: Counter[tuple[str, str, VerdictKind, VerdictKind]] = Counter()
    for program_id, person in person_by_program.items():
        machine = machine_by_program.get(program_id)
        if machine is not None:
            task_type = task_type_by_program.get(program_id, "")
            counts[task_type, machine.verifier, machine.verdict, person.verdict] += 1
    kinds = sorted({(task_type, verifier) for task_type, verifier, _, _ in counts})
    return [_audited(task_type, verifier, counts) for task_type, verifier in kinds]


def _audited(task_type: str, verifier: str, counts: "Counter[tuple[str, str, VerdictKind, VerdictKind]]") -> Audited:
    def n(machine: VerdictKind, person: VerdictKind) -> int:
        return counts[task_type, verifier, machine, person]

    n_wrong = n(VerdictKind.PASS, VerdictKind.FAIL) + n(VerdictKind.FAIL, VerdictKind.FAIL)
    n_right = n(VerdictKind.PASS, VerdictKind.PASS) + n(VerdictKind.FAIL, VerdictKind.PASS)
    rates: AuditedRates = estimate_rates(
        n(VerdictKind.PASS, VerdictKind.FAIL), n_wrong, n(VerdictKind.FAIL, VerdictKind.PASS), n_right
    )
    return Audited(
        task_type=task_type,
        verifier=verifier,
        n_right=n_right,
        n_wrong=n_wrong,
        false_pass=None if math.isnan(rates.false_pass.ratio) else rates.false_pass.ratio,
        false_pass_ci95=(rates.false_pass.low, rates.false_pass.high),
        false_fail=None if math.isnan(rates.false_fail.ratio) else rates.false_fail.ratio,
        false_fail_ci95=(rates.false_fail.low, rates.false_fail.high),
    )
