"""Take known error rates of a verifier out of the reward it gives.

A verifier that passes a wrong answer with probability e0 (false pass) and fails a right one with probability e1 (false
fail) reports E[r] = e0 + (1 − e0 − e1)·y of the true success y. The inverse is unbiased:

    r̃ = (r − e0) / (1 − e0 − e1)

It may lie outside [0, 1]. Inside a learner it stays unclipped, because clipping would bring the bias back; its variance
grows by 1/(1 − e0 − e1)², so rates that leave less than a fifth of the signal are refused.

Reference: Natarajan et al., "Learning with Noisy Labels", NIPS 2013, Lemma 1; the form is of `three-papers`, E.2.
"""

import math
from typing import NamedTuple

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact

ERROR_SUM_LIMIT = 0.8
"""e0 + e1 must stay below it."""


class ErrorRates(Fact, frozen=True, kw_only=True):
    """How often a verifier is wrong.

    Raises:
        ConfigError: a rate outside [0, 1], or rates that sum to 0.8 or more.
    """

    false_pass_ratio: float = 0.0
    """e0: of wrong answers, those that it passes."""
    false_fail_ratio: float = 0.0
    """e1: of right answers, those that it fails."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not (math.isfinite(value) and 0.0 <= value <= 1.0):
                raise ConfigError(f"{name} is {value!r}; it must be in [0, 1]")
        total = self.false_pass_ratio + self.false_fail_ratio
        if total >= ERROR_SUM_LIMIT:
            raise ConfigError(
                f"false_pass_ratio + false_fail_ratio is {total!r}; it must be < {ERROR_SUM_LIMIT}, "
                "or the verdicts say too little"
            )

    def debiased(self, success: float) -> float:
        """The unbiased estimate of success, unclipped.

        >>> round(ErrorRates(false_pass_ratio=0.1, false_fail_ratio=0.3).debiased(1.0), 6)
        1.5
        """
        return (success - self.false_pass_ratio) / (1.0 - self.false_pass_ratio - self.false_fail_ratio)


class Rate(NamedTuple):
    """A rate as estimated from a sample, with its 95 % interval (Wilson)."""

    ratio: float
    low: float
    high: float
    n: int


class AuditedRates(NamedTuple):
    """What an audit says of a verifier."""

    false_pass: Rate
    false_fail: Rate


def estimate_rates(passed_wrong: int, wrong: int, failed_right: int, right: int) -> AuditedRates:
    """Error rates from an audited sample: somebody who knows has judged the same cases.

    Args:
        passed_wrong: of the truly wrong cases, those that the verifier passed.
        wrong: truly wrong cases on which the verifier decided (abstentions are left out).
        failed_right: of the truly right cases, those that the verifier failed.
        right: truly right cases on which the verifier decided.

    Returns:
        Both rates. Without a case of a side its ratio is nan and its interval [0, 1].

    Raises:
        ConfigError: a count is negative or larger than its whole.
    """
    return AuditedRates(_wilson("passed_wrong", passed_wrong, wrong), _wilson("failed_right", failed_right, right))


def _wilson(what: str, hits: int, n: int, z: float = 1.959964) -> Rate:
    if not 0 <= hits <= n:
        raise ConfigError(f"{what} is {hits}; it must be in [0, {n}], the audited cases of its kind")
    if n == 0:
        return Rate(math.nan, 0.0, 1.0, 0)
    ratio = hits / n
    center = (ratio + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(ratio * (1 - ratio) / n + z * z / (4 * n * n))
    low = 0.0 if hits == 0 else max(center - half, 0.0)
    return Rate(ratio, low, 1.0 if hits == n else min(center + half, 1.0), n)
