"""Verdicts that somebody else reports: another program (`external`) or a person (`human`)."""

from loadwise.kernel.errors import ConfigError

from .case import Case
from .check import AwaitReport, Finding
from .spec import VerifierSpec
from .verifier import State, Step, Wanted, abstained


class External:
    """Waits for a report over HTTP; it has nothing to find out and no known cases."""

    version = "1"

    def __init__(self, spec: VerifierSpec) -> None:
        if spec.options:
            raise ConfigError(f"verifier {spec.kind!r} has no options; found {', '.join(sorted(spec.options))}")
        self.kind = spec.kind

    def begin(self, case: Case) -> Step:
        """Ask the runner to do nothing."""
        return Wanted(check=AwaitReport())

    def resume(self, case: Case, state: State, finding: Finding) -> Step:
        """No report came, or the runner would not have asked."""
        return abstained(self, finding.reason or "nobody reported a verdict")

    def known_pass(self) -> Case | None:
        """None: only the one who reports can be asked."""
        return None

    def known_fail(self) -> Case | None:
        """None: only the one who reports can be asked."""
        return None
