"""The simplest learner: remember each candidate's mean reward, take the best, now and then another."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loadwise.kernel.errors import ConfigError, LawBroken, SchemaMismatch, Unprocessable
from loadwise.kernel.fact import Fact
from loadwise.kernel.streams import Generator

from .base import Candidate, Choice, Context, Feedback, Vector
from .picking import best_or_any, check_floor
from .ridge import CANDIDATES_MAX, REWARD_MAX
from .state import dump_state, load_state
from .stateless import reported


class EpsilonGreedyOptions(Fact, frozen=True, kw_only=True):
    """Configuration of `EpsilonGreedy`."""

    exploration_floor: float = 0.1
    """ε: the probability of a uniform choice, in [0, 1)."""
    prior_mean: float = 1.0
    """The mean of a candidate without verdicts; an optimistic one makes each be tried."""

    def __post_init__(self) -> None:
        check_floor(self.exploration_floor)
        if not abs(self.prior_mean) <= REWARD_MAX:
            raise ConfigError(f"prior_mean is {self.prior_mean!r}; it must be within ±{REWARD_MAX:g}")


class EpsilonGreedy:
    """The best mean so far, or any candidate: P(a = k) = (1-ε)·1[k = argmax r̄] + ε/K.

    r̄_k = Σ r / n_k over the judged decisions of k; it ignores the context. Ties go to the cheaper candidate, then to
    the first name.

    Reads:
        price_usd, for ties.

    Assumes:
        Rewards do not depend on the context; it shows what a contextual learner gains.

    References:
        R. Sutton, A. Barto, Reinforcement Learning, 2nd edition, section 2.2.

    >>> import numpy as np
    >>> pool, x = [Candidate(name="a"), Candidate(name="b")], np.ones(1)
    >>> policy = EpsilonGreedy()
    >>> policy.learn(Feedback(decision_id=1, candidate="a", x=x, reward=0.25))
    >>> policy.choose(Context(decision_id=2, x=x), pool, np.random.default_rng(0)).scores
    (0.25, 1.0)
    """

    name = "epsilon_greedy"
    reads: tuple[str, ...] = ("price_usd",)

    def __init__(self, options: EpsilonGreedyOptions = EpsilonGreedyOptions()) -> None:  # noqa: B008 - frozen
        self._options = options
        self._floor = options.exploration_floor
        self.is_deterministic = self._floor == 0.0
        self._tally_by_name: dict[str, tuple[int, float]] = {}

    def choose(self, context: Context, candidates: Sequence[Candidate], rng: Generator) -> Choice:
        """The best mean, or by ε any."""
        scores = tuple(self._mean(candidate.name) for candidate in candidates)
        return best_or_any(scores, scores, candidates, self._floor, rng)

    def _mean(self, name: str) -> float:
        n_verdicts, total = self._tally_by_name.get(name, (0, 0.0))
        return total / n_verdicts if n_verdicts else self._options.prior_mean

    def propensities(self, choice: Choice, rng: Generator) -> tuple[float, ...]:
        """Those that the choice reports: they are exact."""
        return reported(choice)

    def observe(self, decision_id: int, candidate: str, x: Vector) -> None:
        """Nothing to remember: only verdicts count."""

    def learn(self, feedback: Feedback) -> None:
        """The reward enters its candidate's mean.

        Raises:
            Unprocessable: the reward is not finite or too large, or there is no room for another candidate.
        """
        if not abs(feedback.reward) <= REWARD_MAX:
            raise Unprocessable(f"a reward of {feedback.reward!r}; it must be within ±{REWARD_MAX:g}", param="reward")
        if feedback.candidate not in self._tally_by_name and len(self._tally_by_name) >= CANDIDATES_MAX:
            raise Unprocessable(f"candidate {feedback.candidate!r} is one more than the limit of {CANDIDATES_MAX}")
        n_verdicts, total = self._tally_by_name.get(feedback.candidate, (0, 0.0))
        self._tally_by_name[feedback.candidate] = (n_verdicts + 1, total + feedback.reward)

    def unlearn(self, feedback: Feedback) -> None:
        """The reward leaves its candidate's mean.

        Raises:
            LawBroken: no verdict of that candidate was learned.
        """
        n_verdicts, total = self._tally_by_name.get(feedback.candidate, (0, 0.0))
        if n_verdicts == 0:
            raise LawBroken("L11", f"unlearn for candidate {feedback.candidate!r}, which has 0 verdicts")
        left = total - feedback.reward if n_verdicts > 1 else 0.0
        self._tally_by_name[feedback.candidate] = (n_verdicts - 1, left)

    def undo(self, decision_id: int, candidate: str, x: Vector) -> None:
        """Nothing to forget."""

    def _configuration(self) -> Mapping[str, Any]:
        return {field: getattr(self._options, field) for field in self._options.__struct_fields__}

    def dump(self) -> bytes:
        """Counts and sums."""
        tallies = self._tally_by_name.values()
        return dump_state(
            self.name,
            self._configuration(),
            names=tuple(self._tally_by_name),
            counts={"n_verdicts": tuple(n_verdicts for n_verdicts, _ in tallies)},
            arrays={"totals": np.array([total for _, total in tallies], dtype=np.float64)},
        )

    def load(self, state: bytes) -> None:
        """Continue from a dump.

        Raises:
            SchemaMismatch: it is of another policy or configuration.
        """
        stored = load_state(state, self.name, self._configuration())
        n = len(stored.names)
        if n > CANDIDATES_MAX:
            raise SchemaMismatch(f"dump of policy {self.name!r} has {n} candidates; the limit is {CANDIDATES_MAX}")
        totals: list[float] = stored.array("totals", (n,)).tolist()
        self._tally_by_name = dict(
            zip(stored.names, zip(stored.count("n_verdicts", n), totals, strict=True), strict=True)
        )
