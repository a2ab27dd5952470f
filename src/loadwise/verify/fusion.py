"""Agreement of several verifiers: all, any, weighted, or the first that decides.

Members are asked one after the other, and no further than the rule needs: a cheap exact match before a dear judge costs
the judge only where it is needed. An abstention is never a vote. Fusions may stand within fusions, to a bounded depth.
"""

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact
from loadwise.kernel.work import Verdict, VerdictKind

from .case import Case
from .check import Finding
from .options import read_options, require_range
from .spec import VerifierSpec
from .verifier import State, Step, Verifier, Wanted, abstained, failed, passed

MEMBERS_MAX = 8
DEPTH_MAX = 3
_NOT_WITHIN = ("external", "human")
"""Reports come when they come: a fusion cannot wait for one. A later report corrects the fused verdict instead."""


class Member(Fact, frozen=True, kw_only=True):
    """One verifier of a fusion: the keys of a verifier, and its weight."""

    kind: str
    run: str | None = None
    url: str | None = None
    timeout_s: float = 60.0
    options: dict[str, Any] = {}
    weight: float = 1.0

    def __post_init__(self) -> None:
        require_range("weight", self.weight, 1e-6, 1e6)

    def spec(self) -> VerifierSpec:
        """Without the weight."""
        return VerifierSpec(kind=self.kind, run=self.run, url=self.url, timeout_s=self.timeout_s, options=self.options)


class FusionOptions(Fact, frozen=True, kw_only=True):
    """Options of kind `fusion`."""

    rule: Literal["all", "any", "weighted", "first"]
    """`all`: passes where all pass; `any`: where one passes; `weighted`: where the weighted mean score reaches
    `threshold`;
    `first`: the first that does not abstain decides."""
    members: tuple[Member, ...]
    abstentions: Literal["block", "ignore"] = "block"
    """Of `all` and `any`: whether an abstention that could have changed the outcome makes the fusion abstain, or counts
    as if the member were not there."""
    threshold: float = 0.5
    quorum_ratio: float = 0.5
    """Of `weighted`: at least this share of the weight must decide."""

    def __post_init__(self) -> None:
        require_range("threshold", self.threshold, 0.0, 1.0)
        require_range("quorum_ratio", self.quorum_ratio, 0.0, 1.0)
        if not 2 <= len(self.members) <= MEMBERS_MAX:
            raise ConfigError(f"members has {len(self.members)} entries; it must have 2 to {MEMBERS_MAX}")
        for member in self.members:
            if member.kind in _NOT_WITHIN:
                raise ConfigError(f"a member is of kind {member.kind!r}; a fusion cannot wait for reports")


class Fusion:
    """Passes where its rule over its members does."""

    kind = "fusion"

    def __init__(self, spec: VerifierSpec, make: Callable[[VerifierSpec], Verifier]) -> None:
        self.options = read_options(spec, FusionOptions)
        _require_depth(spec, 1)
        self.members = [make(member.spec()) for member in self.options.members]
        parts = ",".join(f"{member.kind}-{member.version}" for member in self.members)
        self.version = f"1:{self.options.rule}({parts})"

    def begin(self, case: Case) -> Step:
        """Begin with the first member."""
        return self._go_on(case, [])

    def resume(self, case: Case, state: State, finding: Finding) -> Step:
        """Hand the finding to the member that wanted it."""
        votes = msgspec.convert(state["votes"], list[Verdict])
        step = self.members[len(votes)].resume(case, state["inner"], finding)
        return self._taken(case, votes, step)

    def known_pass(self) -> Case | None:
        """None: what passes one member need not pass another. Each member is graded by its own."""
        return None

    def known_fail(self) -> Case | None:
        """None: see `known_pass`."""
        return None

    def _taken(self, case: Case, votes: list[Verdict], step: Step) -> Step:
        if isinstance(step, Wanted):
            return Wanted(check=step.check, state={"votes": msgspec.to_builtins(votes), "inner": step.state})
        return self._go_on(case, [*votes, step])

    def _go_on(self, case: Case, votes: list[Verdict]) -> Step:
        """Decide where the rule allows it, else begin with the next member."""
        while len(votes) < len(self.members) and not self._is_settled(votes):
            step = self.members[len(votes)].begin(case)
            if isinstance(step, Wanted):
                return self._taken(case, votes, step)
            votes = [*votes, step]
        return self._fused(votes)

    def _is_settled(self, votes: list[Verdict]) -> bool:
        """Whether no further vote can change the outcome."""
        if not votes:
            return False
        last = votes[-1].verdict
        match self.options.rule:
            case "all":
                return last is VerdictKind.FAIL
            case "any":
                return last is VerdictKind.PASS
            case "first":
                return last is not VerdictKind.ABSTAIN
        return False

    def _fused(self, votes: list[Verdict]) -> Verdict:
        evidence = {
            f"{number} {vote.verifier}": f"{vote.verdict.value}: {vote.explanation}"
            for number, vote in enumerate(votes, 1)
        }
        decided = [vote for vote in votes if vote.verdict is not VerdictKind.ABSTAIN]
        if not decided:
            return abstained(self, "every member abstained", evidence=evidence)
        if self.options.rule == "weighted":
            return self._weighted(votes, evidence)
        deciding = self._deciding(decided)
        n_abstained = len(votes) - len(decided)
        blocks = self.options.rule in ("all", "any") and self.options.abstentions == "block"
        settles = VerdictKind.FAIL if self.options.rule == "all" else VerdictKind.PASS
        if blocks and n_abstained and deciding.verdict is not settles:
            return abstained(self, f"{n_abstained} of {len(votes)} members abstained", evidence=evidence)
        judged = passed if deciding.verdict is VerdictKind.PASS else failed
        score = deciding.success
        why = f"rule {self.options.rule}: {deciding.verifier} says {deciding.verdict.value}: {deciding.explanation}"
        return judged(self, why, score=1.0 if score is None else score, evidence=evidence)

    def _deciding(self, decided: list[Verdict]) -> Verdict:
        """The vote that the rule goes by: the worst of all, the best of any, the first."""
        if self.options.rule == "first":
            return decided[0]
        best = max if self.options.rule == "any" else min
        return best(decided, key=lambda vote: (vote.verdict is VerdictKind.PASS, vote.success or 0.0))

    def _weighted(self, votes: list[Verdict], evidence: dict[str, str]) -> Verdict:
        weights = [member.weight for member in self.options.members]
        scores = [(weight, vote.success) for weight, vote in zip(weights, votes, strict=True)]
        told = [(weight, score) for weight, score in scores if score is not None]
        share = sum(weight for weight, _ in told) / sum(weights)
        if share < self.options.quorum_ratio:
            why = f"members with {share:.2f} of the weight decided; {self.options.quorum_ratio} is needed"
            return abstained(self, why, evidence=evidence)
        mean = sum(weight * score for weight, score in told) / sum(weight for weight, _ in told)
        mean = min(max(mean, 0.0), 1.0)
        judged = passed if mean >= self.options.threshold else failed
        return judged(
            self,
            f"the weighted mean is {mean:.3f}, the threshold {self.options.threshold}",
            score=mean,
            evidence=evidence,
        )


def fused(spec: VerifierSpec) -> list[VerifierSpec]:
    """The verifiers that one of kind `fusion` asks.

    Raises:
        ConfigError: its options are wrong.
    """
    return [member.spec() for member in read_options(spec, FusionOptions).members]


def _require_depth(spec: VerifierSpec, depth: int) -> None:
    """Refuse fusions within fusions beyond the limit, before any member is made."""
    if depth > DEPTH_MAX:
        raise ConfigError(f"fusions are nested {depth} deep; {DEPTH_MAX} is the limit")
    for member in fused(spec):
        if member.kind == "fusion":
            _require_depth(member, depth + 1)
