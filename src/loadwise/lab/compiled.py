"""Policies of the stack compiled over cost weights: the same choices as their own, far sooner.

Theory of operation. One call replays one order for W cost weights. Per learner and model the linear kernel keeps the
inverses of V (all decisions) and L (judged ones), b and θ, as `policy.ridge` does, and follows the same
Sherman-Morrison steps. Two things differ, neither of which changes a choice beyond the tie tolerance of 1e-9
(tests/lab holds this on 10⁴ decisions of each policy and arm):

- contexts are sparse (a bias, two one-hots, components), so a quadratic form visits only their features;
- sums are not kept: which contexts entered a matrix is counted, so a fresh inverse can be made at any time. It is made
  after 2,000 updates; the terms are bounded, hence no cancellation needs compensated sums.

Counting policies keep the same counts; the nearest outcomes use the similarities of all tasks, made once.

Chance is drawn outside, from the streams that the policies themselves would be given.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loadwise.kernel.fact import Fact
from loadwise.policy.greedy import EpsilonGreedy, EpsilonGreedyOptions
from loadwise.policy.labelled import ACRouter, ACRouterOptions, LabelledOptions, Table, TableOptions
from loadwise.policy.linear import LinearOptions, LinTS, LinTSOptions, LinUCB, LinUCBOptions
from loadwise.policy.nearest import Nearest, NearestOptions
from loadwise.policy.pacer import Pacer, PacerOptions
from loadwise.policy.picking import TIE_RATIO
from loadwise.policy.prior import N_ADDED, SURPRISE
from loadwise.policy.tally import LABELS_MAX

from .feedback import Episode
from .kernel_tally import ACROUTER, GREEDY, TABLE
from .pack_prior import on_tasks
from .replay import Choices, World

SIMILAR_MAX = 4096
"""Different contexts whose similarities are kept: their number squared, 8 bytes each."""

_GRAMS = {"gram_all": 0, "gram_all_mean": 1, "landed": 2}

Array = npt.NDArray[np.float64]
OrderReplay = Callable[[Episode, int], Choices]
"""The model chosen at each decision of an order by its number, shape (W, T)."""


class Sparse(NamedTuple):
    """Contexts by their features that are not zero: those of task i are at `ends[i]:ends[i + 1]`."""

    ends: npt.NDArray[np.int64]
    features: npt.NDArray[np.int64]
    values: Array


def make_sparse(x: Array) -> Sparse:
    """The same contexts, shape (n, d) before."""
    rows, features = np.nonzero(x)
    ends = np.zeros(len(x) + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows, minlength=len(x)), out=ends[1:])
    return Sparse(ends, features.astype(np.int64), x[rows, features].astype(np.float64))


def is_compilable() -> bool:
    """Whether the compiler is installed (extra `sim`)."""
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


def compiled_replay(world: World, policy: object, n_learners: int, cost_weights: Sequence[float]) -> OrderReplay | None:
    """Replays orders as `replay_order` does for each cost weight; None for a policy that has no compiled form.

    Only the policies themselves have one, not a class of a user that derives from them.
    """
    kind = type(policy)
    options: Any = getattr(policy, "_options", None)
    if kind in (LinUCB, LinTS, Pacer):
        return _Linear(world, options, n_learners, cost_weights)
    if kind in (Table, ACRouter, EpsilonGreedy):
        labels = _labels(world, options)
        return _Tally(world, options, n_learners, cost_weights, labels) if labels.max() < LABELS_MAX else None
    if kind is Nearest:
        x, place = np.unique(world.contexts.x, axis=0, return_inverse=True)
        if len(x) <= SIMILAR_MAX:
            return _Nearest(world, options, n_learners, cost_weights, x, place.reshape(-1).astype(np.int64))
    return None


class _Compiled:
    """What all have in common: outcomes, order of models, chance."""

    def __init__(self, world: World, options: Fact, n_learners: int, cost_weights: Sequence[float]) -> None:
        stream = world.stream
        n_models = len(stream.models)
        by_name = sorted(range(n_models), key=lambda index: stream.models[index])
        by_price = sorted(range(n_models), key=lambda index: (world.prices_usd[index], stream.models[index]))
        self._world, self._n_learners, self._n_models = world, n_learners, n_models
        self._floor: float = options.exploration_floor  # type: ignore[attr-defined]
        self._weights = np.asarray(cost_weights, dtype=np.float64)
        self._outcomes = (stream.trial_success, stream.trial_cost_usd / stream.scale_usd, stream.n_trials)
        self._by_name, self._name_rank = np.array(by_name), np.argsort(by_name)
        self._price_rank = np.argsort(by_price)

    def _chance(self, total: int, order: int, *, is_thompson: bool) -> tuple[Array, Array]:
        """What the policy itself would draw at each decision: normals (T, K) and one uniform (T,)."""
        normals = np.zeros((total if is_thompson else 0, self._n_models))
        draws = np.ones(total)
        if is_thompson or self._floor > 0.0:
            name = f"policy {order}"
            for step in range(total):
                rng = self._world.streams.at(name, step)
                if is_thompson:
                    normals[step] = rng.standard_normal(self._n_models)
                if self._floor > 0.0:
                    draws[step] = rng.random()
        return normals, draws

    def _blank(self, episode: Episode) -> Choices:
        return np.empty((len(self._weights), len(episode.task)), dtype=np.int16)


class _Linear(_Compiled):
    def __init__(self, world: World, options: LinearOptions, n_learners: int, cost_weights: Sequence[float]) -> None:
        super().__init__(world, options, n_learners, cost_weights)
        self._is_thompson = isinstance(options, LinTSOptions)
        width = options.scale if isinstance(options, LinTSOptions) else 0.0
        if isinstance(options, LinUCBOptions):
            width = options.alpha
        tie_ratio = 0.0 if self._is_thompson else TIE_RATIO
        self._numbers = (width, options.ridge, options.exploration_floor, tie_ratio)
        self._n_rest = (n_learners, _GRAMS[options.gram], self._is_thompson)
        x, blank = world.contexts.x, np.zeros(world.stream.success.shape)
        if options.n_components:
            x = x.copy()
            x[:, -options.n_components :] *= options.component_scale
        self._seen = [(tuple(make_sparse(x)), blank, (0.0, -1.0, SURPRISE))]
        """Contexts, prior means and their doubts: of all cost weights, or with a prior of each."""
        if options.prior is not None:
            assert world.prior is not None
            priors = [world.prior.at(1.0, weight / world.stream.scale_usd) for weight in cost_weights]
            told = [on_tasks(prior, options.prior_strength, x, world.stream.models) for prior in priors]
            doubts = [(prior.noise, prior.doubt / options.prior_strength, SURPRISE) for prior in priors]
            rows = zip(told, doubts, strict=True)
            self._seen = [(tuple(make_sparse(z)), means, doubt) for (z, means), doubt in rows]
        self._n_features = world.contexts.spec.n_features + (0 if options.prior is None else N_ADDED)
        self._pacing = (np.zeros(self._n_models), 0.0)
        if isinstance(options, PacerOptions) and options.budget_usd > 0.0:
            prices = [options.prices_usd.get(model, 0.0) for model in world.stream.models]
            self._pacing = (np.array(prices) / options.budget_usd, options.step)

    def __call__(self, episode: Episode, order: int) -> Choices:
        chosen = self._blank(episode)
        normals, draws = self._chance(len(episode.task), order, is_thompson=self._is_thompson)
        n = len(self._weights) // len(self._seen)
        for place, (contexts, known, doubts) in enumerate(self._seen):
            part = slice(place * n, (place + 1) * n)
            _linear_kernel()(
                chosen[part],
                *_spread(episode),
                contexts,
                self._outcomes,
                self._weights[part],
                (normals, draws, self._name_rank, self._price_rank, self._by_name),
                (self._n_features, *self._n_rest),
                self._numbers,
                self._pacing,
                known,
                doubts,
            )
        return chosen


class _Tally(_Compiled):
    def __init__(
        self,
        world: World,
        options: LabelledOptions | EpsilonGreedyOptions,
        n_learners: int,
        cost_weights: Sequence[float],
        labels: npt.NDArray[np.int64],
    ) -> None:
        super().__init__(world, options, n_learners, cost_weights)
        self._labels = labels
        self._is_default = np.zeros(self._n_models)
        alpha, prior, n_forced, rule = 0.0, 1.0, 0.0, ACROUTER
        if isinstance(options, TableOptions):
            alpha, prior, rule = options.alpha, options.prior_count, TABLE
        elif isinstance(options, EpsilonGreedyOptions):
            prior, rule = options.prior_mean, GREEDY
        elif isinstance(options, ACRouterOptions):
            n_forced = float(options.n_forced)
            self._is_default = np.array([float(model == options.default) for model in world.stream.models])
        self._numbers = (alpha, prior, self._floor, n_forced)
        self._sizes = (int(labels.max()) + 1, n_learners, rule)

    def __call__(self, episode: Episode, order: int) -> Choices:
        chosen = self._blank(episode)
        _, draws = self._chance(len(episode.task), order, is_thompson=False)
        decisions, verdicts = _spread(episode)
        chance = (draws, self._price_rank, self._by_name)
        _tally_kernel()(
            chosen,
            decisions,
            verdicts,
            self._outcomes,
            self._weights,
            chance,
            self._labels,
            self._sizes,
            self._numbers,
            self._is_default,
        )
        return chosen


class _Nearest(_Compiled):
    def __init__(
        self,
        world: World,
        options: NearestOptions,
        n_learners: int,
        cost_weights: Sequence[float],
        x: Array,
        place: npt.NDArray[np.int64],
    ) -> None:
        super().__init__(world, options, n_learners, cost_weights)
        self._place = place
        """Of each task among the different contexts x."""
        lengths = np.linalg.norm(x, axis=1, keepdims=True)
        units = np.divide(x, lengths, out=np.zeros_like(x), where=lengths > 0.0)
        self._similarity = np.round(units @ units.T, 9)
        self._sizes = (options.capacity, n_learners, options.n_neighbours)
        self._numbers = (options.alpha, options.similarity_min, self._floor)

    def __call__(self, episode: Episode, order: int) -> Choices:
        chosen = self._blank(episode)
        _, draws = self._chance(len(episode.task), order, is_thompson=False)
        decisions, verdicts = _spread(episode)
        chance = (draws, self._price_rank, self._by_name)
        rest = (self._similarity, self._place, self._sizes, self._numbers)
        _nearest_kernel()(chosen, decisions, verdicts, self._outcomes, self._weights, chance, *rest)
        return chosen


def _labels(world: World, options: LabelledOptions | EpsilonGreedyOptions) -> npt.NDArray[np.int64]:
    """The label of each task as a number, shape (n,)."""
    x = world.contexts.x
    if isinstance(options, EpsilonGreedyOptions):
        return np.zeros(len(x), dtype=np.int64)
    labels: npt.NDArray[np.int64] = np.unique(x[:, : options.n_labels] != 0.0, axis=0, return_inverse=True)[1]
    return labels.reshape(-1).astype(np.int64)


def _spread(episode: Episode) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return (
        (episode.task, episode.trial_draw, episode.credited, episode.learner),
        (episode.landing, episode.landing_end, episode.lost),
    )


def _compile(module: Any, names: Sequence[str], uses: Mapping[str, object] | None = None) -> Callable[..., None]:
    """Compile functions of a module in place, on first use: seconds. Returns the last one.

    Args:
        uses: what the module imported from another before that was compiled.
    """
    import numba

    vars(module).update(uses or {})
    for name in names:
        function = getattr(module, name)
        if not hasattr(function, "py_func"):  # compiled before
            setattr(module, name, numba.njit(function))
    last: Callable[..., None] = getattr(module, names[-1])
    return last


@cache
def _linear_kernel() -> Callable[..., None]:
    from . import kernel

    return _compile(kernel, kernel.LINEAR)


@cache
def _tally_kernel() -> Callable[..., None]:
    from . import kernel, kernel_tally

    _compile(kernel, ["pick"])
    return _compile(kernel_tally, kernel_tally.TALLY, uses={"pick": kernel.pick})


@cache
def _nearest_kernel() -> Callable[..., None]:
    from . import kernel, kernel_tally

    _compile(kernel, ["pick"])
    return _compile(kernel_tally, kernel_tally.NEAREST, uses={"pick": kernel.pick})
