"""Policies that learn one number per kind of task: a table with optimism, and ACRouter's memory rule."""

from collections.abc import Mapping, Sequence
from typing import Any

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact
from loadwise.kernel.streams import Generator

from .base import Candidate, Choice, Context, Feedback, Vector
from .context import N_FEATURES_MAX
from .picking import best_or_any, check_floor
from .ridge import REWARD_MAX
from .state import dump_state, load_state
from .stateless import reported
from .tally import Tally


class LabelledOptions(Fact, frozen=True, kw_only=True):
    """What both policies are configured with.

    Raises:
        ConfigError: a value is out of its range.
    """

    exploration_floor: float = 0.0
    """ε: the probability of a uniform choice, in [0, 1)."""
    n_labels: int | None = None
    """Leading features that tell kinds of task apart; all where absent."""
    context_version: str = ""
    """The version of the contexts learned on; a dump of another version does not load."""

    def __post_init__(self) -> None:
        check_floor(self.exploration_floor)
        if self.n_labels is not None and not 0 <= self.n_labels <= N_FEATURES_MAX:
            raise ConfigError(f"n_labels is {self.n_labels!r}; it must be in [0, {N_FEATURES_MAX}]")


class TableOptions(LabelledOptions, frozen=True, kw_only=True):
    """Configuration of `Table`."""

    alpha: float = 0.6
    """How many widths optimism adds to the mean."""
    prior_count: float = 1.0
    """Verdicts of zero that every cell begins with, > 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.alpha <= 1e6:
            raise ConfigError(f"alpha is {self.alpha!r}; it must be in [0, 1e6]")
        if not 1e-9 <= self.prior_count <= 1e9:
            raise ConfigError(f"prior_count is {self.prior_count!r}; it must be in [1e-9, 1e9]")


class ACRouterOptions(LabelledOptions, frozen=True, kw_only=True):
    """Configuration of `ACRouter`. The released rule has `n_forced` 0 and `exploration_floor` 0."""

    exploration_floor: float = 0.05
    n_forced: int = 1
    """Decisions that every candidate gets under every label before means are compared."""
    default: str | None = None
    """Candidate where nothing is remembered; the cheapest where absent or not permitted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.n_forced <= 1000:
            raise ConfigError(f"n_forced is {self.n_forced!r}; it must be in [0, 1000]")


class _Labelled:
    """The learning half of both: everything but the choice."""

    name: str
    reads: tuple[str, ...] = ("price_usd",)

    def __init__(self, options: LabelledOptions) -> None:
        self._options = options
        self._floor = options.exploration_floor
        self.is_deterministic = self._floor == 0.0
        self.tally = Tally(options.n_labels)
        """What was learned, for those who explain it."""

    def propensities(self, choice: Choice, rng: Generator) -> tuple[float, ...]:
        """Those that the choice reports: they are exact."""
        return reported(choice)

    def observe(self, decision_id: int, candidate: str, x: Vector) -> None:
        """The decision counts as tried."""
        self.tally.observe(candidate, x)

    def learn(self, feedback: Feedback) -> None:
        """The reward enters the mean of its candidate under its label."""
        self.tally.learn(feedback.candidate, feedback.x, feedback.reward)

    def unlearn(self, feedback: Feedback) -> None:
        """The reward leaves the mean of its candidate under its label."""
        self.tally.unlearn(feedback.candidate, feedback.x, feedback.reward)

    def undo(self, decision_id: int, candidate: str, x: Vector) -> None:
        """The decision no longer counts as tried."""
        self.tally.undo(candidate, x)

    def _configuration(self) -> Mapping[str, Any]:
        return {field: getattr(self._options, field) for field in self._options.__struct_fields__}

    def dump(self) -> bytes:
        """Counts and sums."""
        return dump_state(
            self.name,
            self._configuration(),
            names=self.tally.names(),
            counts=self.tally.counts(),
            arrays={"totals": self.tally.totals()},
        )

    def load(self, state: bytes) -> None:
        """Continue from a dump.

        Raises:
            SchemaMismatch: it is of another policy, configuration or context version.
        """
        self.tally.restore(load_state(state, self.name, self._configuration()))


class Table(_Labelled):
    """The best mean under each label, with optimism for what was tried less.

        score_k = Σ r / (c + n_k) + α / sqrt(c + m_k)

    n_k counts the verdicts of k under the label, m_k its decisions, judged or pending; c = `prior_count`. It is LinUCB
    on a context that is nothing but the label.

    Reads:
        price_usd, for ties.

    Assumes:
        Tasks of one label are alike.

    References:
        P. Auer, N. Cesa-Bianchi, P. Fischer, Finite-time Analysis of the Multiarmed Bandit Problem, 2002.

    >>> import numpy as np
    >>> pool, x = [Candidate(name="a"), Candidate(name="b")], np.array([1.0, 0.0])
    >>> policy = Table()
    >>> policy.observe(1, "a", x)
    >>> policy.learn(Feedback(decision_id=1, candidate="a", x=x, reward=0.5))
    >>> choice = policy.choose(Context(decision_id=2, x=x), pool, np.random.default_rng(0))
    >>> choice.chosen, [round(score, 4) for score in choice.scores]
    (0, [0.6743, 0.6])
    """

    name = "table"

    def __init__(self, options: TableOptions = TableOptions()) -> None:  # noqa: B008 - frozen
        super().__init__(options)
        self._alpha, self._prior = options.alpha, options.prior_count

    def choose(self, context: Context, candidates: Sequence[Candidate], rng: Generator) -> Choice:
        """The highest score, or by ε any."""
        label = self.tally.label(context.x)
        cells = [self.tally.cell(candidate.name, label) for candidate in candidates]
        means = [cell.total / (self._prior + cell.n_verdicts) for cell in cells]
        widths = [float(self._alpha / (self._prior + cell.n_decisions) ** 0.5) for cell in cells]
        scores = [mean + width for mean, width in zip(means, widths, strict=True)]
        return best_or_any(scores, means, candidates, self._floor, rng)


class ACRouter(_Labelled):
    """ACRouter's memory: the best mean under each label among the candidates that have a verdict there.

        a = argmax over k with n_k > 0 of  Σ r / n_k;   with no verdict under the label, the default

    The released `route()` is that and nothing more: after the first verdict of a label only the candidate that got it
    is ever compared, so it stays with its default. The research code adds one forced try of every candidate under every
    label and ε = 0.05, which are the defaults here.

    Reads:
        price_usd, for ties and where there is no default.

    Assumes:
        As the table, and that a first verdict tells enough.

    References:
        Zhou et al., Agent-as-a-Router (ACRouter), arXiv:2606.22902, 2026; released code, `inference.py`.

    >>> import numpy as np
    >>> pool, x = [Candidate(name="a", price_usd=1.0), Candidate(name="b", price_usd=2.0)], np.array([1.0])
    >>> policy = ACRouter(ACRouterOptions(n_forced=0, exploration_floor=0.0))
    >>> policy.observe(1, "b", x)
    >>> policy.learn(Feedback(decision_id=1, candidate="b", x=x, reward=0.1))
    >>> policy.choose(Context(decision_id=2, x=x), pool, np.random.default_rng(0)).chosen  # `a` is never compared
    1
    """

    name = "acrouter"

    def __init__(self, options: ACRouterOptions = ACRouterOptions()) -> None:  # noqa: B008 - frozen
        super().__init__(options)
        self._n_forced, self._default = options.n_forced, options.default

    def choose(self, context: Context, candidates: Sequence[Candidate], rng: Generator) -> Choice:
        """A candidate that must still be tried, else the best mean, else the default; or by ε any."""
        label = self.tally.label(context.x)
        cells = [self.tally.cell(candidate.name, label) for candidate in candidates]
        if any(cell.n_decisions < self._n_forced for cell in cells):
            scores = [1.0 if cell.n_decisions < self._n_forced else 0.0 for cell in cells]
        elif any(cell.n_verdicts for cell in cells):
            scores = [cell.mean if cell.n_verdicts else -2.0 * REWARD_MAX for cell in cells]
        else:
            scores = [1.0 if candidate.name == self._default else 0.0 for candidate in candidates]
        return best_or_any(scores, [cell.mean for cell in cells], candidates, self._floor, rng)
