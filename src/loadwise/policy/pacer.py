"""A learner that keeps to a budget: optimism minus a price on money that rises while too much is spent."""

from collections.abc import Mapping, Sequence

from loadwise.kernel.errors import ConfigError, LawBroken
from loadwise.kernel.streams import Generator

from .base import Candidate, Choice, Context, Vector
from .linear import LinUCB, LinUCBOptions
from .state import dump_state, load_state


class PacerOptions(LinUCBOptions, frozen=True, kw_only=True):
    """Configuration of `Pacer`."""

    prices_usd: dict[str, float] = {}
    """Expected cost of a program by candidate; without any there is nothing to pace, and it is LinUCB."""
    budget_ratio: float = 0.5
    """Where the budget per program lies between the cheapest (0) and the dearest (1) price."""
    step: float = 0.05
    """η: how fast the price of money follows overspending."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, price in self.prices_usd.items():
            if not 0.0 <= price <= 1e9:
                raise ConfigError(f"prices_usd[{name!r}] is {price!r}; it must be in [0, 1e9]")
        if not 0.0 <= self.budget_ratio <= 1.0:
            raise ConfigError(f"budget_ratio is {self.budget_ratio!r}; it must be in [0, 1]")
        if not 0.0 <= self.step <= 1e3:
            raise ConfigError(f"step is {self.step!r}; it must be in [0, 1000]")

    @property
    def budget_usd(self) -> float:
        """B: what a program may cost on average; 0 without prices."""
        prices = self.prices_usd.values()
        low, high = min(prices, default=0.0), max(prices, default=0.0)
        return low + self.budget_ratio * (high - low)


class Pacer(LinUCB):
    """LinUCB under a dollar budget, by a primal-dual rule.

        a = argmax_k  index_k(x) - λ·c_k / B,     λ = η·max(0, Σ_decisions (c_a / B - 1))

    c_k are the expected costs `prices_usd`, B = `budget_usd`. λ is the multiplier of the constraint "mean cost <= B",
    read off the overspending itself, so that an undone decision gives its money back exactly. A candidate without a
    price costs nothing.

    Reads:
        price_usd, for ties.

    Assumes:
        Expected costs are known; rewards are success alone (cost weight 0).

    References:
        ParetoBandit, arXiv:2604.00136, 2026 (primal-dual pacer; its geometric forgetting is left out here).
        A. Badanidiyuru, R. Kleinberg, A. Slivkins, Bandits with Knapsacks, FOCS 2013.

    >>> import numpy as np
    >>> pool = [Candidate(name="small", price_usd=0.1), Candidate(name="large", price_usd=1.0)]
    >>> policy = Pacer(PacerOptions(prices_usd={"small": 0.1, "large": 1.0}, budget_ratio=0.0, step=1.0))
    >>> policy.observe(1, "large", np.ones(1))  # ten times the budget
    >>> choice = policy.choose(Context(decision_id=2, x=np.ones(1)), pool, np.random.default_rng(0))
    >>> choice.chosen, round(policy.multiplier, 3)
    (0, 9.0)
    """

    name = "pacer"

    def __init__(self, options: PacerOptions = PacerOptions()) -> None:  # noqa: B008 - frozen
        super().__init__(options)
        self._prices, self._budget, self._step = options.prices_usd, options.budget_usd, options.step
        self._n_by_name: dict[str, int] = {}

    @property
    def multiplier(self) -> float:
        """λ, the price of money."""
        if self._budget <= 0.0:
            return 0.0
        # Over names in order: a sum must not depend on who was chosen first.
        over = sum(
            n * (self._prices.get(name, 0.0) / self._budget - 1.0) for name, n in sorted(self._n_by_name.items())
        )
        return self._step * max(0.0, over)

    def choose(self, context: Context, candidates: Sequence[Candidate], rng: Generator) -> Choice:
        """The highest index after its price, or by ε any."""
        means, spreads = self._estimate(context.x, [candidate.name for candidate in candidates])
        price = self.multiplier / self._budget if self._budget > 0.0 else 0.0
        widths = [self._alpha * spread for spread in spreads]
        scores = [
            mean + width - price * self._prices.get(candidate.name, 0.0)
            for mean, width, candidate in zip(means, widths, candidates, strict=True)
        ]
        return self._chosen(scores, means, widths, candidates, rng)

    def observe(self, decision_id: int, candidate: str, x: Vector) -> None:
        """The decision enters V, and its expected cost is spent."""
        super().observe(decision_id, candidate, x)
        self._n_by_name[candidate] = self._n_by_name.get(candidate, 0) + 1

    def undo(self, decision_id: int, candidate: str, x: Vector) -> None:
        """The decision leaves V, and its expected cost comes back."""
        if not self._n_by_name.get(candidate):
            raise LawBroken("L11", f"undo for candidate {candidate!r}, which has 0 observed decisions")
        super().undo(decision_id, candidate, x)
        self._n_by_name[candidate] -= 1

    def dump(self) -> bytes:
        """Sums, caches and counts of the learner, and how often each candidate was chosen."""
        return dump_state(
            self.name,
            self._configuration(),
            names=self.ridge.names,
            counts={
                **self.ridge.tallies(),
                "n_spent": tuple(self._n_by_name.get(name, 0) for name in self.ridge.names),
            },
            arrays=self._arrays(),
        )

    def load(self, state: bytes) -> None:
        """Continue from a dump.

        Raises:
            SchemaMismatch: it is of another policy, configuration, context version or number of features.
        """
        stored = load_state(state, self.name, self._configuration())
        counts: Mapping[str, int] = dict(zip(stored.names, stored.count("n_spent", len(stored.names)), strict=True))
        self._restore(stored)
        self._n_by_name = dict(counts)
