"""Read what our own scripts report from inside a sandbox, and keep apart whose fault it is that they did not."""

from typing import Any

from .case import Case
from .check import Finding, FindingStatus
from .options import strict_json


class Report:
    """The report of a script: its fields once it has `finished`, or why there is none.

    A script says `started` before it touches the judged code. If it did and says no more, the code brought it down: a
    limit of the sandbox, a signal. That is the program's failure. If it never started, the trouble is ours.
    """

    def __init__(self, case: Case, finding: Finding, is_unshielded_allowed: bool) -> None:
        self.fields: dict[str, Any] = {}
        self.trouble = ""
        """Ours: abstain."""
        self.fault = ""
        """The program's: fail."""
        if finding.status is not FindingStatus.OK:
            self.trouble = f"the check ended as {finding.status.value}: {finding.reason or 'no reason given'}"
            return
        if not case.nonce:
            self.trouble = "the run had no nonce: what it reports could be forged"
            return
        lines = _lines(case, finding)
        started = next((line for line in lines if line.get("started") is True), None)
        finished = [line for line in lines if line.get("finished") is True]
        if started is None:
            self.trouble = f"the sandbox did not start the tests: {_end(finding)}"
        elif not (started.get("shielded") is True or is_unshielded_allowed):
            self.trouble = "the tests could not be kept apart from the code: another sandbox is needed"
        elif len(finished) != 1:
            self.fault = f"the code ended the run of its tests: {_end(finding)}"
        elif isinstance(finished[0].get("error"), str):
            self.trouble = str(finished[0]["error"])
        else:
            self.fields = finished[0]


def _lines(case: Case, finding: Finding) -> list[dict[str, Any]]:
    """The lines that carry the nonce of this run."""
    found = []
    for line in finding.stdout.decode("utf-8", "replace").splitlines():
        try:
            told = strict_json(line)
        except ValueError:
            continue
        if isinstance(told, dict) and told.get("nonce") == case.nonce:
            found.append(told)
    return found


def _end(finding: Finding) -> str:
    if finding.killed:
        return f"stopped at the limit {finding.killed!r} {finding.reason}".strip()
    end = finding.stderr[-200:].decode("utf-8", "replace").strip().replace("\n", " | ")
    return f"it ended with {finding.exit_code}" + (f": {end}" if end else "")
