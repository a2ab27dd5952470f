"""Verifiers in virtual time: late, sometimes wrong, sometimes silent, sometimes twice."""

from typing import Literal

import msgspec

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact
from loadwise.kernel.streams import Streams
from loadwise.kernel.work import Verdict, VerdictKind

from .draw import Quantity, require_quantity, sample_seconds

_RATIOS = ("loss_ratio", "abstain_ratio", "false_pass_ratio", "false_fail_ratio", "duplicate_ratio")


class VerdictSpec(Fact, frozen=True, kw_only=True):
    """The `verdicts:` of a scenario."""

    source: Literal["agent", "verifier", "none"] = "agent"
    """Who reports: the agent after its own end, a verifier when the machine asks for one, or nobody."""
    delay_s: Quantity = 0.0
    loss_ratio: float = 0.0
    """Share of programs whose verdict never comes."""
    abstain_ratio: float = 0.0
    false_pass_ratio: float = 0.0
    """Share of wrong programs that pass all the same."""
    false_fail_ratio: float = 0.0
    duplicate_ratio: float = 0.0
    """Share of verdicts that are delivered twice."""

    def __post_init__(self) -> None:
        require_quantity("verdicts delay_s", self.delay_s)
        for name in _RATIOS:
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"verdicts {name} is {getattr(self, name)!r}; it must be in [0, 1]")


class DueVerdict(msgspec.Struct, frozen=True):
    """One verdict on its way."""

    after_s: float
    verdict: Verdict


def judge(spec: VerdictSpec, streams: Streams, number: int, is_solved: bool, verifier: str) -> tuple[DueVerdict, ...]:
    """What will be reported about program `number`, and when; nothing where the verdict is lost.

    The draws depend on the seed and the program's number alone.
    """
    rng = streams.at("verdict", number)
    is_lost, abstains, is_wrong, is_twice = (float(u) for u in rng.random(4))
    after_s, again_s = sample_seconds(spec.delay_s, rng), sample_seconds(spec.delay_s, rng)
    if is_lost < spec.loss_ratio:
        return ()
    flip_ratio = spec.false_fail_ratio if is_solved else spec.false_pass_ratio
    passes = is_solved != (is_wrong < flip_ratio)
    kind = VerdictKind.PASS if passes else VerdictKind.FAIL
    if abstains < spec.abstain_ratio:
        kind = VerdictKind.ABSTAIN
    verdict = Verdict(verdict=kind, verifier=verifier, version="sim", verdict_id=f"v{number}")
    reports = [DueVerdict(after_s, verdict)]
    if is_twice < spec.duplicate_ratio:
        reports.append(DueVerdict(after_s + again_s, verdict))
    return tuple(reports)
