"""Whether a program that failed should run again, and on which model: learned from verdicts that may be wrong.

Let p₁ be the pass rate of first attempts of model m at context x, p₂ that of attempts of k after a failed verdict of m,
φ and ψ the verifier's rates of false passes and false fails. What the verifier sees is

    p = s (1 - ψ) + (1 - s) φ            hence          s = (p - φ) / (1 - φ - ψ)

so that of the programs that failed, a share  stop = ψ s₁ / (1 - p₁)  was right all the same, and would be given up for
an attempt that is right with probability  go = s₂. The ladder climbs where

    gain · (go - stop) + price(cost of k at x) > 0

with the reward's own worth of a success and of a cost (`policy.reward`). p₁, p₂ and the costs are ridge regressions on
the context (`policy.ridge`): p₂ has one for each pair (m, k), because tasks that m failed are not tasks at large. p₂ is
taken with the optimism of LinUCB, so that what was never tried is tried, and what does not pay is left soon.

Where φ and ψ are not known, the ladder climbs only where it would pay under every pair in [0, RATE_MAX]² that the pass
rates allow. Verdicts alone cannot tell the rates: a sample whose truth is told later can (`audited`).

Evidence is what the verifier says and what engines bill. Nothing that an agent writes enters.
"""

from collections.abc import Sequence

import msgspec

from loadwise.kernel.errors import ConfigError, SchemaMismatch
from loadwise.kernel.fact import Fact

from .base import Vector
from .context import N_FEATURES_MAX
from .reward import RewardSpec
from .ridge import REWARD_MAX, DisjointRidge
from .state import dump_state, load_state

RATE_MAX = 0.3
"""The largest false rate that an unknown verifier is taken to have."""

AUDIT_PRIOR = 5.0
"""Audited attempts' worth of the assumed rates that audits begin with."""

AUDITED_MAX = 0.49
"""The largest false rate that audits may say: a verdict that is wrong half of the time tells nothing."""

_PAIR = "\x1f"
"""Between the names of a pair; no model's name holds it."""

_PARTS = ("first", "next", "cost")


class LadderOptions(Fact, frozen=True, kw_only=True):
    """What a ladder is configured with.

    Raises:
        ConfigError: a value is out of its range.
    """

    false_pass: float | None = None
    """φ: how often the verifier passes what is wrong; None where unknown."""
    false_fail: float | None = None
    """ψ: how often it fails what is right; None where unknown."""
    optimism: float = 0.3
    """How many widths are added to the mean of an attempt after a failure."""
    ridge: float = 1.0
    n_features: int | None = None
    context_version: str = ""

    def __post_init__(self) -> None:
        for name in ("false_pass", "false_fail"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < 0.5:
                raise ConfigError(f"{name} is {value!r}; it must be in [0, 0.5)")
        if (self.false_pass is None) != (self.false_fail is None):
            raise ConfigError("false_pass and false_fail must both be given, or neither")
        if not 0.0 <= self.optimism <= 1e3:
            raise ConfigError(f"optimism is {self.optimism!r}; it must be in [0, 1000]")
        if not 1e-9 <= self.ridge <= 1e9:
            raise ConfigError(f"ridge is {self.ridge!r}; it must be in [1e-9, 1e9]")
        if self.n_features is not None and not 1 <= self.n_features <= N_FEATURES_MAX:
            raise ConfigError(f"n_features is {self.n_features!r}; it must be in [1, {N_FEATURES_MAX}]")


class Rung(Fact, frozen=True, kw_only=True):
    """One model that could take over, and what that is believed to bring."""

    candidate: str
    value: float
    """On the reward's scale, over stopping; climb where it is positive."""
    go: float
    stop: float
    cost_usd: float


class LadderState(Fact, frozen=True, kw_only=True):
    """A dump of `Ladder`."""

    parts: dict[str, bytes]
    audits: list[int]


class Ladder:
    """Learns from every attempt, and says where to go after a failed one.

    >>> import numpy as np
    >>> ladder, x = Ladder(LadderOptions(false_pass=0.0, false_fail=0.0), RewardSpec()), np.array([1.0])
    >>> for _ in range(50):
    ...     ladder.learn(x, None, "small", success=0.2, cost_usd=0.01)
    ...     ladder.learn(x, "small", "large", success=0.7, cost_usd=0.10)
    >>> [rung.candidate for rung in ladder.climb(x, "small", ["large"])]
    ['large']
    """

    name = "ladder"

    def __init__(self, options: LadderOptions, reward: RewardSpec) -> None:
        self._options = options
        self._gain = reward.reward(1.0, 0.0) - reward.reward(0.0, 0.0)
        self._reward = reward
        self._part = {
            name: DisjointRidge(n_features=options.n_features, ridge=options.ridge, gram="landed") for name in _PARTS
        }
        self._audits = [0, 0, 0, 0]
        """Wrong attempts, those of them passed, right attempts, those of them failed."""

    def learn(self, x: Vector, failed: str | None, candidate: str, *, success: float, cost_usd: float) -> None:
        """An attempt was judged.

        Args:
            failed: the model whose failed attempt it followed; None for a first attempt.
            success: as the verifier saw it, in [0, 1].
        """
        if failed is None:
            self._part["first"].learn(candidate, x, success)
        else:
            self._part["next"].learn(f"{failed}{_PAIR}{candidate}", x, success)
        self._part["cost"].learn(candidate, x, min(cost_usd, REWARD_MAX))

    def unlearn(self, x: Vector, failed: str | None, candidate: str, *, success: float, cost_usd: float) -> None:
        """What was learned of an attempt was wrong: take it back, with the very words of `learn`.

        Raises:
            LawBroken: no such attempt was learned (law L11).
        """
        if failed is None:
            self._part["first"].unlearn(candidate, x, success)
        else:
            self._part["next"].unlearn(f"{failed}{_PAIR}{candidate}", x, success)
        self._part["cost"].unlearn(candidate, x, min(cost_usd, REWARD_MAX))

    def audited(self, *, passed: bool, is_right: bool) -> None:
        """The truth about an attempt that the verifier has judged became known."""
        first = 2 if is_right else 0
        self._audits[first] += 1
        self._audits[first + 1] += passed != is_right

    @property
    def rates(self) -> tuple[float, float] | None:
        """φ and ψ as configured, corrected by audits; None where nobody knows."""
        options, (n_wrong, n_passed, n_right, n_failed) = self._options, self._audits
        if options.false_pass is None or options.false_fail is None:
            if n_wrong < AUDIT_PRIOR or n_right < AUDIT_PRIOR:
                return None
            before = (RATE_MAX / 2.0, RATE_MAX / 2.0)
        else:
            before = (options.false_pass, options.false_fail)
        return (
            min((n_passed + AUDIT_PRIOR * before[0]) / (n_wrong + AUDIT_PRIOR), AUDITED_MAX),
            min((n_failed + AUDIT_PRIOR * before[1]) / (n_right + AUDIT_PRIOR), AUDITED_MAX),
        )

    def climb(
        self,
        x: Vector,
        failed: str,
        candidates: Sequence[str],
        *,
        rates: tuple[float, float] | None = None,
        is_judged: bool = True,
    ) -> list[Rung]:
        """The models that it pays to go to after `failed` has failed, best first; empty where it pays to stop.

        Args:
            rates: φ and ψ of the verifier that judges here; None takes the ladder's own.
            is_judged: false where the attempt is given up without a verdict: stopping then means to let it go on.
        """
        if not candidates:
            return []
        (first,), _ = self._part["first"].estimate(x, [failed])
        means, spreads = self._part["next"].estimate(x, [f"{failed}{_PAIR}{name}" for name in candidates])
        costs, _ = self._part["cost"].estimate(x, list(candidates))
        rungs = []
        for name, mean, spread, cost in zip(candidates, means, spreads, costs, strict=True):
            passed = min(max(mean + self._options.optimism * spread, 0.0), 1.0)
            cost_usd = max(cost, 0.0)
            go, stop = self._worst(min(max(first, 0.0), 1.0), passed, rates or self.rates, is_judged)
            value = self._gain * (go - stop) + self._reward.reward(0.0, cost_usd)
            if value > 0.0:
                rungs.append(Rung(candidate=name, value=value, go=go, stop=stop, cost_usd=cost_usd))
        return sorted(rungs, key=lambda rung: (-rung.value, rung.candidate))

    def _worst(
        self, first: float, passed: float, rates: tuple[float, float] | None, is_judged: bool
    ) -> tuple[float, float]:
        """`go` and `stop` under the known rates, or under those of the allowed pairs that speak most against going."""
        if rates is not None:
            return _denoised(first, passed, *rates, is_judged)
        highest_pass = min(RATE_MAX, first, passed)
        highest_fail = min(RATE_MAX, 1.0 - max(first, passed))
        pairs = [(φ, ψ) for φ in (0.0, highest_pass) for ψ in (0.0, highest_fail)]
        return min((_denoised(first, passed, *pair, is_judged) for pair in pairs), key=lambda pair: pair[0] - pair[1])

    def dump(self) -> bytes:
        """Everything learned."""
        parts = {
            name: dump_state(
                f"{self.name}.{name}",
                self._configuration(),
                names=ridge.names,
                counts=ridge.tallies(),
                arrays=ridge.arrays(),
            )
            for name, ridge in self._part.items()
        }
        return msgspec.msgpack.encode(LadderState(parts=parts, audits=list(self._audits)))

    def load(self, state: bytes) -> None:
        """Continue from a dump.

        Raises:
            SchemaMismatch: it is of another configuration or context version.
        """
        try:
            found = msgspec.msgpack.decode(state, type=LadderState)
        except msgspec.MsgspecError as error:
            raise SchemaMismatch(f"not a dump of a ladder ({len(state)} bytes): {error}") from error
        if found.parts.keys() != self._part.keys() or len(found.audits) != len(self._audits):
            raise SchemaMismatch(f"a ladder's dump with parts {sorted(found.parts)}; expected {sorted(self._part)}")
        for name, ridge in self._part.items():
            ridge.restore(load_state(found.parts[name], f"{self.name}.{name}", self._configuration()))
        self._audits = found.audits

    def _configuration(self) -> dict[str, object]:
        options = self._options
        return {field: getattr(options, field) for field in options.__struct_fields__ if field != "n_features"}


def _denoised(
    first: float, passed: float, false_pass: float, false_fail: float, is_judged: bool = True
) -> tuple[float, float]:
    """`go` and `stop` of the module's description.

    >>> [round(value, 3) for value in _denoised(0.5, 0.5, 0.1, 0.1)]
    [0.5, 0.1]
    """
    clear = 1.0 - false_pass - false_fail
    right = min(max((first - false_pass) / clear, 0.0), 1.0)
    stop = min(false_fail * right / max(1.0 - first, 1e-9), 1.0) if is_judged else right
    go = min(max((passed - false_pass) / clear, 0.0), 1.0)
    return go, stop
