"""Contextual bandits with a linear model per candidate: LinUCB (ORACLE's router) and linear Thompson sampling.

Both share one memory (`ridge`): they differ only in how mean and spread become a choice.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact
from loadwise.kernel.streams import Generator

from .base import Candidate, Choice, Context, Feedback, Vector
from .context import N_FEATURES_MAX
from .gram import Array
from .picking import best_index, by_name, certain, check_floor, explored, explored_propensities
from .prior import N_ADDED, Primed, Prior, shift, tries_due
from .ridge import DisjointRidge, GramMode
from .state import LearnerState, dump_state, load_state
from .stateless import reported


class LinearOptions(Fact, frozen=True, kw_only=True):
    """What both linear policies are configured with.

    Raises:
        ConfigError: a value is out of its range.
    """

    ridge: float = 1.0
    """λ: how strongly θ is held to zero until verdicts land."""
    gram: GramMode = "gram_all"
    """Which decisions enter mean and width; see `policy.ridge`."""
    exploration_floor: float = 0.0
    """ε: the probability of a uniform choice, in [0, 1)."""
    n_features: int | None = None
    """Length of a context; the first one sets it where absent."""
    context_version: str = ""
    """The version of the contexts learned on; a dump of another version does not load."""
    component_ridge: float | None = None
    """λ of the components of the text, where they are to be believed later than kinds of tasks; None: as `ridge`."""
    n_components: int = 0
    """How many of the last features are components of the text."""
    prior: Prior | None = None
    """What is known before the first verdict, out of an experience pack."""
    prior_strength: float = 1.0
    """Multiplies the prior's pseudo-counts, and divides its doubt."""

    def __post_init__(self) -> None:
        if not 1e-9 <= self.ridge <= 1e9:
            raise ConfigError(f"ridge is {self.ridge!r}; it must be in [1e-9, 1e9]")
        check_floor(self.exploration_floor)
        if self.n_features is not None and not 1 <= self.n_features <= N_FEATURES_MAX:
            raise ConfigError(f"n_features is {self.n_features!r}; it must be in [1, {N_FEATURES_MAX}]")
        if self.gram not in ("gram_all", "gram_all_mean", "landed"):
            raise ConfigError(f"gram is {self.gram!r}; it must be 'gram_all', 'gram_all_mean' or 'landed'")
        if self.component_ridge is not None and not 1e-9 <= self.component_ridge <= 1e9:
            raise ConfigError(f"component_ridge is {self.component_ridge!r}; it must be in [1e-9, 1e9]")
        if not 0 <= self.n_components <= N_FEATURES_MAX:
            raise ConfigError(f"n_components is {self.n_components!r}; it must be in [0, {N_FEATURES_MAX}]")
        if not 1e-3 <= self.prior_strength <= 1e3:
            raise ConfigError(f"prior_strength is {self.prior_strength!r}; it must be in [0.001, 1000]")
        if self.prior is not None:
            if self.n_features is not None and self.prior.n_features != self.n_features:
                raise ConfigError(
                    f"the prior is for contexts of {self.prior.n_features} features; these have {self.n_features}"
                )
            if self.prior.n_features + N_ADDED > N_FEATURES_MAX:
                raise ConfigError(
                    f"a prior for {self.prior.n_features} features; the limit is {N_FEATURES_MAX - N_ADDED}"
                )

    @property
    def component_scale(self) -> float:
        """What components are multiplied with, so that one ridge serves all: a prior has pseudo-counts instead."""
        if self.component_ridge is None or self.prior is not None:
            return 1.0
        return math.sqrt(self.ridge / self.component_ridge)


class LinUCBOptions(LinearOptions, frozen=True, kw_only=True):
    """Configuration of `LinUCB`."""

    alpha: float = 0.6
    """α_UCB: how many widths optimism adds to the mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.alpha <= 1e6:
            raise ConfigError(f"alpha is {self.alpha!r}; it must be in [0, 1e6]")


class LinTSOptions(LinearOptions, frozen=True, kw_only=True):
    """Configuration of `LinTS`."""

    exploration_floor: float = 0.02
    scale: float = 0.5
    """v: the noise of a reward; a success of 0 or 1 has a standard deviation of at most one half."""
    n_draws: int = 4000
    """Monte Carlo draws behind a propensity estimate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.scale <= 1e6:
            raise ConfigError(f"scale is {self.scale!r}; it must be in [0, 1e6]")
        if not 2000 <= self.n_draws <= 20_000:
            raise ConfigError(f"n_draws is {self.n_draws!r}; it must be in [2000, 20000]")


class _Linear:
    """The learning half of both: everything but the choice."""

    name: str
    reads: tuple[str, ...] = ("price_usd",)

    def __init__(self, options: LinearOptions) -> None:
        self._options = options
        prior = options.prior
        self._n_components = options.n_components
        # Of judged decisions, only with a prior: rewards beyond its mean, and z.
        self._off_by_name: dict[str, float] = {}
        self._seen_by_name: dict[str, Vector] = {}
        self._component_scale = options.component_scale if options.n_components else 1.0
        self._scales: Vector = np.ones(0)
        """By feature, for contexts as long as the last one."""
        self._primed = None if prior is None else Primed(prior, options.prior_strength)
        n_features = options.n_features if self._primed is None else self._primed.n_features
        self.ridge = DisjointRidge(n_features=n_features, ridge=options.ridge, gram=options.gram)
        """What was learned, for those who explain it; with a prior, in its variables and beyond its mean."""

    def _estimate(self, x: Vector, names: list[str]) -> tuple[list[float], list[float]]:
        """Mean and spread of each candidate."""
        if self._primed is None:
            return self.ridge.estimate(self._place(x), names)
        z, known = self._primed.seen(x, names)
        learned, spreads = self.ridge.estimate(z, names)
        means = [mean + more for mean, more in zip(known, learned, strict=True)]
        for place, name in enumerate(names):
            moved = self._shift(name)
            if moved != 0.0:
                means[place] += moved * (1.0 - float(self.ridge.solved(name, self._seen_by_name[name]).dot(z)))
        return means, spreads

    def _shift(self, name: str) -> float:
        """How far evidence has moved the prior mean of a candidate."""
        prior, seen = self._options.prior, self._seen_by_name.get(name)
        if prior is None or seen is None:
            return 0.0
        doubt = prior.doubt / self._options.prior_strength
        return shift(self._off_by_name[name], self.ridge.counts(name)[1], prior.noise, doubt)

    def _overdue(self, candidates: Sequence[Candidate]) -> int | None:
        """With a prior: the candidate tried least, where that is less than is due."""
        if self._primed is None or len(candidates) == 1:
            return None
        tried = [self.ridge.counts(candidate.name)[0] for candidate in candidates]
        least = min(tried)
        if least >= tries_due(sum(tried), len(candidates)):
            return None
        return best_index([float(n == least) for n in tried], candidates)

    def _place(self, x: Vector) -> Vector:
        """The context in the learner's variables."""
        if self._primed is not None:
            return self._primed.scaled(self._primed.expanded(x))
        if self._component_scale == 1.0:
            return x
        vector: Vector = np.asarray(x, dtype=np.float64)
        if vector.shape != self._scales.shape:
            if vector.ndim != 1 or len(vector) <= self._n_components:
                return vector  # another shape is for the learner to refuse
            self._scales = np.ones(len(vector))
            self._scales[len(vector) - self._n_components :] = self._component_scale
        return vector * self._scales

    def observe(self, decision_id: int, candidate: str, x: Vector) -> None:
        """The decision enters V."""
        self.ridge.observe(candidate, self._place(x))

    def learn(self, feedback: Feedback) -> None:
        """The verdict enters L, b and θ."""
        if self._primed is None:
            self.ridge.learn(feedback.candidate, self._place(feedback.x), feedback.reward)
            return
        expanded = self._primed.expanded(feedback.x)
        beyond = feedback.reward - self._primed.mean(expanded, feedback.candidate)
        z = self._primed.scaled(expanded)
        self.ridge.learn(feedback.candidate, z, beyond)
        self._off_by_name[feedback.candidate] = self._off_by_name.get(feedback.candidate, 0.0) + beyond
        self._seen_by_name[feedback.candidate] = self._seen_by_name.get(feedback.candidate, 0.0) + z

    def unlearn(self, feedback: Feedback) -> None:
        """The verdict leaves L, b and θ."""
        if self._primed is None:
            self.ridge.unlearn(feedback.candidate, self._place(feedback.x), feedback.reward)
            return
        expanded = self._primed.expanded(feedback.x)
        beyond, z = feedback.reward - self._primed.mean(expanded, feedback.candidate), self._primed.scaled(expanded)
        self.ridge.unlearn(feedback.candidate, z, beyond)
        self._off_by_name[feedback.candidate] -= beyond
        self._seen_by_name[feedback.candidate] = self._seen_by_name[feedback.candidate] - z

    def undo(self, decision_id: int, candidate: str, x: Vector) -> None:
        """The decision leaves V."""
        self.ridge.undo(candidate, self._place(x))

    def dump(self) -> bytes:
        """Sums, caches and counts."""
        return dump_state(
            self.name,
            self._configuration(),
            names=self.ridge.names,
            counts=self.ridge.tallies(),
            arrays=self._arrays(),
        )

    def load(self, state: bytes) -> None:
        """Continue from a dump.

        Raises:
            SchemaMismatch: it is of another policy, configuration, context version or number of features.
        """
        self._restore(load_state(state, self.name, self._configuration()))

    def _arrays(self) -> dict[str, Array]:
        """Everything with a fraction, by name, for a dump."""
        arrays = self.ridge.arrays()
        if self._primed is not None:
            names, blank = self.ridge.names, np.zeros(self._primed.n_features)
            arrays["off"] = np.array([self._off_by_name.get(name, 0.0) for name in names], dtype=np.float64)
            seen = [self._seen_by_name.get(name, blank) for name in names]
            arrays["seen"] = np.array(seen, dtype=np.float64).reshape(len(names), self._primed.n_features)
        return arrays

    def _restore(self, state: LearnerState) -> None:
        if self._primed is None:
            self.ridge.restore(state)
            return
        off = state.array("off", (len(state.names),))
        seen = state.array("seen", (len(state.names), self._primed.n_features))
        self.ridge.restore(state)
        judged = [place for place, name in enumerate(state.names) if self.ridge.counts(name)[1]]
        self._off_by_name = {state.names[place]: float(off[place]) for place in judged}
        self._seen_by_name = {state.names[place]: seen[place] for place in judged}

    def _configuration(self) -> Mapping[str, Any]:
        # The number of features is compared on its own: where it is not configured, the first context has set it.
        options = self._options
        told = {field: getattr(options, field) for field in options.__struct_fields__ if field != "n_features"}
        # A learner that uses none of these is what it was before there were any.
        if options.component_ridge is None:
            del told["component_ridge"], told["n_components"]
        if options.prior is None:
            del told["prior"], told["prior_strength"]
        else:
            told["prior"] = options.prior.digest
        return told


class LinUCB(_Linear):
    """Disjoint LinUCB with delayed feedback: optimism in the face of what has not been tried.

        index_k(x) = xᵀθ_k + α·sqrt(xᵀ V_k⁻¹ x),   a = argmax_k index_k,   θ_k = L_k⁻¹ b_k

    V_k holds all decisions for k, L_k and b_k the judged ones (`policy.ridge`, with the other Gram modes). Equal
    indices go to the cheaper candidate, then to the first name. With ε = `exploration_floor` a uniform candidate is
    chosen with probability ε, so P(a = k) = (1-ε)·1[k = argmax] + ε/K, which is what the choice reports; with ε = 0
    the choice is deterministic and reports one.

    Reads:
        price_usd, for ties.

    Assumes:
        Expected reward is linear in x for each candidate; verdicts may come late, in any order, or never (`undo`).

    References:
        L. Li, W. Chu, J. Langford, R. Schapire, A Contextual-Bandit Approach to Personalized News Article
        Recommendation, WWW 2010, Algorithm 1. ORACLE, sections 5.1 and E.9.

    >>> import numpy as np
    >>> pool = [Candidate(name="small", price_usd=0.1), Candidate(name="large", price_usd=3.0)]
    >>> policy, context = LinUCB(), Context(decision_id=1, x=np.array([1.0]))
    >>> policy.choose(context, pool, np.random.default_rng(0)).chosen  # a tie: the cheaper
    0
    >>> policy.observe(1, "small", context.x)
    >>> choice = policy.choose(context, pool, np.random.default_rng(0))
    >>> choice.chosen, [round(score, 4) for score in choice.scores]
    (1, [0.4243, 0.6])
    """

    name = "linucb"

    def __init__(self, options: LinUCBOptions = LinUCBOptions()) -> None:  # noqa: B008 - frozen
        super().__init__(options)
        self._alpha = options.alpha
        self._floor = options.exploration_floor
        self.is_deterministic = self._floor == 0.0

    def choose(self, context: Context, candidates: Sequence[Candidate], rng: Generator) -> Choice:
        """The highest index, or by ε any."""
        means, spreads = self._estimate(context.x, [candidate.name for candidate in candidates])
        widths = [self._alpha * spread for spread in spreads]
        scores = [mean + width for mean, width in zip(means, widths, strict=True)]
        return self._chosen(scores, means, widths, candidates, rng)

    def _chosen(
        self,
        scores: Sequence[float],
        means: Sequence[float],
        widths: Sequence[float],
        candidates: Sequence[Candidate],
        rng: Generator,
    ) -> Choice:
        """The highest score, unless another is overdue, or by ε any."""
        argmax = best_index(scores, candidates)
        overdue = self._overdue(candidates)
        argmax = argmax if overdue is None else overdue
        return Choice(
            chosen=explored(argmax, candidates, self._floor, rng),
            scores=tuple(scores),
            means=tuple(means),
            widths=tuple(widths),
            propensities=explored_propensities(argmax, len(candidates), self._floor),
        )

    def propensities(self, choice: Choice, rng: Generator) -> tuple[float, ...]:
        """Those that the choice reports: they are exact."""
        return reported(choice)


class LinTS(_Linear):
    """Linear Thompson sampling: each candidate is chosen as often as it is believed to be the best.

        θ̃_k ~ N(θ_k, v²·V_k⁻¹),   a = argmax_k xᵀθ̃_k

    Only the projection on x matters, and xᵀθ̃_k ~ N(xᵀθ_k, v²·xᵀV_k⁻¹x): one gaussian per candidate, drawn in the order
    of names, instead of d. `widths` are v·sqrt(xᵀV⁻¹x), `scores` the sampled values. With ε = `exploration_floor` a
    uniform candidate is chosen with probability ε.

    The propensities have no closed form, so the choice reports None and `propensities` estimates them off the decision
    path: from n = `n_draws` repetitions with c_k wins of k

        p̂_k = (1-ε)·(c_k + 1/K)/(n + 1) + ε/K

    which is positive for every candidate and sums to one. Its standard error is (1-ε)·sqrt(p(1-p)/n) with p the
    probability that k wins the draw: at most 0.5/sqrt(n), that is .0079 for the default n = 4000 and .0112 for the
    least n = 2000; the pseudo-count moves it by less than 1/n. At x = 0 nothing is random but the floor, and the choice
    reports exact propensities.

    Reads:
        price_usd, for exact ties.

    Assumes:
        Rewards are linear in x with noise of standard deviation v; as LinUCB, verdicts may be late.

    References:
        S. Agrawal, N. Goyal, Thompson Sampling for Contextual Bandits with Linear Payoffs, ICML 2013, Algorithm 1.

    >>> import numpy as np
    >>> pool = [Candidate(name="a"), Candidate(name="b")]
    >>> policy, context = LinTS(), Context(decision_id=1, x=np.array([1.0]))
    >>> policy.observe(1, "a", context.x)
    >>> policy.learn(Feedback(decision_id=1, candidate="a", x=context.x, reward=1.0))
    >>> choice = policy.choose(context, pool, np.random.default_rng(0))
    >>> [round(p, 2) for p in policy.propensities(choice, np.random.default_rng(0))]  # exact: Φ(0.816)·0.98 + 0.01
    [0.79, 0.21]
    """

    name = "lints"
    is_deterministic = False

    def __init__(self, options: LinTSOptions = LinTSOptions()) -> None:  # noqa: B008 - frozen
        super().__init__(options)
        self._scale = options.scale
        self._floor = options.exploration_floor
        self._n_draws = options.n_draws

    def choose(self, context: Context, candidates: Sequence[Candidate], rng: Generator) -> Choice:
        """The highest sampled value, or by ε any."""
        order = by_name(candidates)
        means, spreads = self._estimate(context.x, [candidate.name for candidate in candidates])
        widths = [self._scale * spread for spread in spreads]
        normals: list[float] = rng.standard_normal(len(order)).tolist()
        scores = list(means)
        for index, normal in zip(order, normals, strict=True):
            scores[index] += widths[index] * normal
        argmax = best_index(scores, candidates, tie_ratio=0.0)
        is_random = max(widths) > 0.0
        return Choice(
            chosen=explored(argmax, candidates, self._floor, rng),
            scores=tuple(scores),
            means=tuple(means),
            widths=tuple(widths),
            propensities=None if is_random else explored_propensities(argmax, len(order), self._floor),
        )

    def propensities(self, choice: Choice, rng: Generator) -> tuple[float, ...]:
        """The Monte Carlo estimate of the class description, seeded by `rng`."""
        n_candidates = len(choice.means)
        if choice.propensities is not None:
            return choice.propensities
        if n_candidates == 0 or len(choice.widths) != n_candidates:
            raise ValueError("a choice without means and widths was made by another policy")
        if n_candidates == 1:
            return certain(0, 1)
        draws = rng.standard_normal((self._n_draws, n_candidates))  # (n_draws, n_candidates)
        draws *= np.asarray(choice.widths)
        draws += np.asarray(choice.means)
        wins = np.bincount(draws.argmax(axis=1), minlength=n_candidates).tolist()
        share = self._floor / n_candidates
        raw = [(1.0 - self._floor) * (c + 1.0 / n_candidates) / (self._n_draws + 1) + share for c in wins]
        total = math.fsum(raw)
        return tuple(value / total for value in raw)
