"""The linear policies of the stack compiled over cost weights: the same choices as `policy.linear`, far sooner.

Theory of operation. One call replays one order for W cost weights. Per learner and model it keeps the inverses of V
(all decisions) and L (judged ones), b and θ, as `policy.ridge` does, and follows the same Sherman-Morrison steps. Two
things differ, neither of which changes a choice beyond the tie tolerance of 1e-9 (tests/lab holds this on 10⁴
decisions of each policy and arm):

- contexts are sparse (a bias, two one-hots, components), so a quadratic form visits only their features;
- sums are not kept: which contexts entered a matrix is counted, so a fresh inverse can be made at any time. It is made
  after 2,000 updates; the terms are bounded, hence no cancellation needs compensated sums.

Chance is drawn outside, from the streams that the policies themselves would be given.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loadwise.policy.linear import LinTS, LinTSOptions, LinUCB, LinUCBOptions
from loadwise.policy.picking import TIE_RATIO

from .feedback import Episode
from .replay import Choices, World

_GRAMS = {"gram_all": 0, "gram_all_mean": 1, "landed": 2}

Options = LinUCBOptions | LinTSOptions


class Sparse(NamedTuple):
    """Contexts by their features that are not zero: those of task i are at `ends[i]:ends[i + 1]`."""

    ends: npt.NDArray[np.int64]
    features: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]


def make_sparse(x: npt.NDArray[np.float64]) -> Sparse:
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


def options_of(policy: object) -> Options | None:
    """The configuration of a policy that this module can replay: exactly LinUCB or LinTS, not a class of a user."""
    if type(policy) in (LinUCB, LinTS):
        options: Options = policy._options  # type: ignore[attr-defined]
        return options
    return None


def replay_order_compiled(
    world: World, episode: Episode, options: Options, n_learners: int, cost_weights: Sequence[float], order: int
) -> Choices:
    """The model chosen at each decision, shape (W, T), as `replay_order` for each cost weight."""
    stream = world.stream
    n_models, total = len(stream.models), len(episode.task)
    normals, draws = _chance(world, options, n_models, total, order)
    by_name = sorted(range(n_models), key=lambda index: stream.models[index])
    by_price = sorted(range(n_models), key=lambda index: (world.prices_usd[index], stream.models[index]))
    sparse = make_sparse(world.contexts.x)
    chosen = np.empty((len(cost_weights), total), dtype=np.int16)
    is_thompson = isinstance(options, LinTSOptions)
    _kernel()(
        chosen,
        (episode.task, episode.trial_draw, episode.credited, episode.learner),
        (episode.landing, episode.landing_end, episode.lost),
        (sparse.ends, sparse.features, sparse.values),
        (stream.trial_success, stream.trial_cost_usd / stream.scale_usd, stream.n_trials),
        np.asarray(cost_weights, dtype=np.float64),
        (normals, draws, np.argsort(by_name), np.argsort(by_price), np.array(by_name)),
        (world.contexts.spec.n_features, n_learners, _GRAMS[options.gram], is_thompson),
        (
            options.scale if isinstance(options, LinTSOptions) else options.alpha,
            options.ridge,
            options.exploration_floor,
            0.0 if is_thompson else TIE_RATIO,
        ),
    )
    return chosen


def _chance(
    world: World, options: Options, n_models: int, total: int, order: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """What the policy itself would draw at each decision: normals (T, K) and one uniform (T,)."""
    is_thompson = isinstance(options, LinTSOptions)
    has_floor = options.exploration_floor > 0.0
    normals = np.zeros((total if is_thompson else 0, n_models))
    draws = np.ones(total)
    if is_thompson or has_floor:
        name = f"policy {order}"
        for step in range(total):
            rng = world.streams.at(name, step)
            if is_thompson:
                normals[step] = rng.standard_normal(n_models)
            if has_floor:
                draws[step] = rng.random()
    return normals, draws


@cache
def _kernel() -> Callable[..., None]:
    """Compile on first use: seconds, kept on disk by the compiler where it may write."""
    import numba

    from . import kernel

    jit: Any = numba.njit
    for name in kernel.COMPILED:
        setattr(kernel, name, jit(getattr(kernel, name)))
    compiled: Callable[..., None] = kernel.replay_weights
    return compiled
