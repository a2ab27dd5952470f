"""What a verdict is worth: success against cost, in one number.

ORACLE, Eq. 3 (recovered):

    r = (1 - α)·success - α·min(cost / $0, 1)             clip "ratio"

and the form that its replay uses, which is Eq. 3 without the clip, with α = a/(1+a), divided by 1 - α > 0:

    r = success - a·cost / $0                             clip "none"

The two forms order outcomes alike wherever the cost stays below $0 (the clip is idle).
"""

import math
from typing import Literal

from loadwise.kernel.errors import ConfigError, Unprocessable
from loadwise.kernel.fact import Fact


class RewardSpec(Fact, frozen=True, kw_only=True):
    """How success and cost become one reward.

    >>> RewardSpec(cost_weight=0.25, scale_usd=0.1).reward(success=1.0, cost_usd=0.04)
    0.65
    >>> RewardSpec(cost_weight=0.5, scale_usd=0.1, clip="none").reward(success=1.0, cost_usd=0.2)
    0.0

    Raises:
        ConfigError: a value is out of its range.
    """

    cost_weight: float = 0.0
    """α in [0, 1] with clip "ratio"; a >= 0 with clip "none". Zero rewards success alone."""
    scale_usd: float = 1.0
    """$0, the cost that counts as one whole."""
    clip: Literal["ratio", "none"] = "ratio"

    def __post_init__(self) -> None:
        limit = 1.0 if self.clip == "ratio" else 1e6
        if not 0.0 <= self.cost_weight <= limit:
            raise ConfigError(
                f"reward cost_weight is {self.cost_weight!r}; with clip {self.clip!r} it must be in [0, {limit:g}]"
            )
        if not 1e-12 <= self.scale_usd <= 1e12:
            raise ConfigError(f"reward scale_usd is {self.scale_usd!r}; it must be in [1e-12, 1e12]")
        if self.clip not in ("ratio", "none"):
            raise ConfigError(f"reward clip is {self.clip!r}; it must be 'ratio' or 'none'")

    def reward(self, success: float, cost_usd: float) -> float:
        """The reward of an outcome.

        Args:
            success: in [0, 1].
            cost_usd: finite, >= 0.

        Returns:
            In [-1, 1] with clip "ratio"; at most 1 with clip "none".

        Raises:
            Unprocessable: an argument is out of its range or not a number.
        """
        if not 0.0 <= success <= 1.0:
            raise Unprocessable(f"success {success!r} is outside [0, 1]", param="success")
        return self.reward_of_estimate(success, cost_usd)

    def reward_of_estimate(self, success: float, cost_usd: float) -> float:
        """The reward of an unbiased estimate of success, which may lie outside [0, 1] (`verify.debias`): unclipped.

        Raises:
            Unprocessable: an argument is not finite, or the cost is negative.
        """
        if not math.isfinite(success):
            raise Unprocessable(f"success {success!r} is not a finite number", param="success")
        if not (math.isfinite(cost_usd) and cost_usd >= 0.0):
            raise Unprocessable(f"cost_usd {cost_usd!r} is not a finite number >= 0", param="cost_usd")
        ratio = cost_usd / self.scale_usd
        if self.clip == "none":
            return success - self.cost_weight * ratio
        return (1.0 - self.cost_weight) * success - self.cost_weight * min(ratio, 1.0)


def replay_weight(alpha: float) -> float:
    """The replay form's a = α/(1-α) that orders outcomes as Eq. 3 does with α in [0, 1).

    >>> replay_weight(0.5)
    1.0

    Raises:
        ConfigError: α is outside [0, 1).
    """
    if not 0.0 <= alpha < 1.0:
        raise ConfigError(f"alpha is {alpha!r}; it must be in [0, 1)")
    return alpha / (1.0 - alpha)
