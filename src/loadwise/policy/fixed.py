"""Baselines that look at neither load nor verdicts: one candidate always, any, a mixture, each in turn."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact
from loadwise.kernel.streams import Generator

from .base import Candidate, Choice, Context, Vector
from .picking import best_index, by_name, certain
from .state import dump_state, load_state
from .stateless import Stateless


class FixedOptions(Fact, frozen=True, kw_only=True):
    """Configuration of `Fixed`."""

    candidate: str | None = None
    """Name of the candidate to choose always; the cheapest where absent."""

    def __post_init__(self) -> None:
        if self.candidate == "":
            raise ConfigError("policy 'fixed': candidate is ''; it must name a candidate")


class Fixed(Stateless):
    """Always the same candidate: a = candidate, or the cheapest where none is named.

    Where that candidate is not permitted (down, draining, removed) the cheapest permitted one takes its place: a pool
    that loses a backend keeps answering.

    Reads:
        price_usd, for the replacement only.

    Assumes:
        Nothing.

    >>> import numpy as np
    >>> pool = [Candidate(name="a"), Candidate(name="b")]
    >>> policy = Fixed(FixedOptions(candidate="b"))
    >>> policy.choose(Context(decision_id=1, x=np.ones(1)), pool, np.random.default_rng(0)).chosen
    1
    """

    name = "fixed"
    reads: tuple[str, ...] = ("price_usd",)
    is_deterministic = True

    def __init__(self, options: FixedOptions = FixedOptions()) -> None:  # noqa: B008 - frozen
        self._candidate = options.candidate

    def _configuration(self) -> Mapping[str, Any]:
        return {"candidate": self._candidate}

    def choose(self, context: Context, candidates: Sequence[Candidate], rng: Generator) -> Choice:
        """The named candidate, or the cheapest."""
        scores = [1.0 if candidate.name == self._candidate else 0.0 for candidate in candidates]
        chosen = best_index(scores, candidates)
        return Choice(chosen=chosen, propensities=certain(chosen, len(candidates)))


class Random(Stateless):
    """Every candidate equally likely: P(a = k) = 1/K.

    Reads:
        Nothing.

    Assumes:
        Nothing. It is the yardstick that every learner must beat.

    >>> import numpy as np
    >>> pool = [Candidate(name=name) for name in "abcd"]
    >>> Random().choose(Context(decision_id=1, x=np.ones(1)), pool, np.random.default_rng(0)).propensities
    (0.25, 0.25, 0.25, 0.25)
    """

    name = "random"
    reads: tuple[str, ...] = ()
    is_deterministic = False

    def choose(self, context: Context, candidates: Sequence[Candidate], rng: Generator) -> Choice:
        """Any candidate."""
        order = by_name(candidates)
        n = len(order)
        return Choice(chosen=order[int(rng.random() * n)], propensities=(1.0 / n,) * n)


class MixingOptions(Fact, frozen=True, kw_only=True):
    """Configuration of `Mixing`."""

    weights: dict[str, float] = {}
    """Probability of each candidate by name, each in [0, 1]; normalised over the candidates that are present. None at
    all makes all candidates equally likely."""

    def __post_init__(self) -> None:
        for name, weight in self.weights.items():
            if not (math.isfinite(weight) and 0.0 <= weight <= 1.0):
                raise ConfigError(f"policy 'mixing': weights[{name!r}] is {weight!r}; it must be in [0, 1]")
        if self.weights and not sum(self.weights.values()) > 0.0:
            raise ConfigError(f"policy 'mixing': weights are {self.weights!r}; at least one must be > 0")


class Mixing(Stateless):
    """A lottery with fixed probabilities: P(a = k) = p_k / Σ_j p_j over the candidates j that are present.

    This is the straight line between single models in a plot of success against cost, which a router must rise above.
    Where no present candidate has a positive weight, all are equally likely.

    Reads:
        Nothing.

    Assumes:
        Nothing.

    >>> import numpy as np
    >>> pool = [Candidate(name="a"), Candidate(name="b")]
    >>> policy = Mixing(MixingOptions(weights={"a": 0.125, "b": 0.375, "gone": 0.5}))
    >>> policy.choose(Context(decision_id=1, x=np.ones(1)), pool, np.random.default_rng(0)).propensities
    (0.25, 0.75)
    """

    name = "mixing"
    reads: tuple[str, ...] = ()
    is_deterministic = False

    def __init__(self, options: MixingOptions = MixingOptions()) -> None:  # noqa: B008 - frozen
        self._weight_by_name = dict(options.weights)

    def _configuration(self) -> Mapping[str, Any]:
        return {"weights": self._weight_by_name}

    def choose(self, context: Context, candidates: Sequence[Candidate], rng: Generator) -> Choice:
        """One candidate by lottery."""
        order = by_name(candidates)
        weights = [self._weight_by_name.get(candidate.name, 0.0) for candidate in candidates]
        # Scaled by the largest first: denormal weights would otherwise be divided by a rounded sum.
        largest = max(weights)
        weights = [weight / largest for weight in weights] if largest > 0.0 else [1.0] * len(weights)
        total = math.fsum(weights)
        left = float(rng.random()) * total
        chosen = -1
        for index in order:
            if weights[index] <= 0.0:
                continue
            chosen = index  # kept when rounding leaves a remainder: the last with any weight
            left -= weights[index]
            if left < 0.0:
                break
        return Choice(chosen=chosen, propensities=tuple(weight / total for weight in weights))


class RoundRobin(Stateless):
    """Each candidate in turn, by name: a_t = t mod K, where t counts the decisions observed and not undone.

    Reads:
        Nothing.

    Assumes:
        `observe` follows each choice before the next; two choices without one between them are the same.

    >>> import numpy as np
    >>> pool, policy = [Candidate(name="b"), Candidate(name="a")], RoundRobin()
    >>> context = Context(decision_id=1, x=np.ones(1))
    >>> first = policy.choose(context, pool, np.random.default_rng(0)).chosen
    >>> policy.observe(1, "a", context.x)
    >>> first, policy.choose(context, pool, np.random.default_rng(0)).chosen
    (1, 0)
    """

    name = "round_robin"
    reads: tuple[str, ...] = ()
    is_deterministic = True

    def __init__(self) -> None:
        self._n_observed = 0

    def choose(self, context: Context, candidates: Sequence[Candidate], rng: Generator) -> Choice:
        """The candidate whose turn it is."""
        order = by_name(candidates)
        chosen = order[self._n_observed % len(order)]
        return Choice(chosen=chosen, propensities=certain(chosen, len(order)))

    def observe(self, decision_id: int, candidate: str, x: Vector) -> None:
        """The turn passes on."""
        self._n_observed += 1

    def undo(self, decision_id: int, candidate: str, x: Vector) -> None:
        """The turn comes back."""
        self._n_observed = max(self._n_observed - 1, 0)

    def dump(self) -> bytes:
        """The number of turns taken."""
        return dump_state(self.name, {}, counts={"n_observed": (self._n_observed,)})

    def load(self, state: bytes) -> None:
        """Continue from the turn of a dump.

        Raises:
            SchemaMismatch: it is of another policy.
        """
        self._n_observed = load_state(state, self.name, {}).count("n_observed", 1)[0]
