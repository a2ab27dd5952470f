"""Selectors that do not learn while they serve: complexity tiers, a learned strong/weak threshold, a verified cascade.

They are judged on the same tasks, costs and verifier errors as the policies, without a replay: what they do with a task
does not depend on the tasks before it.

    tiers      LiteLLM-style: a rule on the text says how hard it looks; harder tiers go to dearer models
    threshold  RouteLLM-style: logistic regression on preference pairs says how likely the strong model wins; the
               tasks above a threshold go to it. Fitted on half of the tasks, used on the other, both ways
    cascade    models from cheap to dear; each attempt is verified, the first that passes is taken, else the last.
               It makes more than one attempt a task, so compare it at its attempts (the sum of `share`)
"""

import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .feedback import FeedbackSpec, readable
from .judge import Scored, score_choices
from .replay import World

Array = npt.NDArray[np.float64]

QUANTILES = (0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0)
"""Shares of tasks that go to the strong model, one point each."""

FALSE_FAIL, FALSE_PASS = 0.1, 0.1
"""How often the cascade's verifier is wrong about an attempt that succeeded, and about one that did not."""

_CODE = re.compile(r"```|\bdef \b|\bclass \b|\bimport \b|\breturn\b|[{};]\s*$|==|->|Traceback|\$ ", re.MULTILINE)
_REASONING = re.compile(
    r"\b(why|prove|derive|optimi[sz]e|debug|refactor|design|implement|algorithm|concurrent|step by step|analy[sz]e)\b",
    re.IGNORECASE,
)
_STEPS = re.compile(r"^\s*(?:\d+[.)]|[-*])\s", re.MULTILINE)


def complexity(text: str | None) -> float:
    """How hard a text looks, in [0, 1]: its length, code in it, words of reasoning, steps listed.

    A task without a text looks middling.

    >>> complexity("What is the capital of France?") < 0.2 < complexity(None) < complexity("Debug and refactor: " * 200)
    True
    """
    if text is None:
        return 0.5
    length = min(len(text) / 2000.0, 1.0)
    code = min(len(_CODE.findall(text)) / 6.0, 1.0)
    reasoning = min(len(_REASONING.findall(text)) / 4.0, 1.0)
    steps = min(len(_STEPS.findall(text)) / 6.0, 1.0)
    return 0.3 * length + 0.3 * code + 0.25 * reasoning + 0.15 * steps


def score_tiers(world: World, feedback: FeedbackSpec) -> list[Scored]:
    """One point: the range of complexity in as many equal tiers as there are models, the dearest for the highest."""
    stream = world.stream
    by_price = np.argsort(world.prices_usd, kind="stable")
    n_models = len(by_price)
    seen = np.array([complexity(text) for text in stream.texts])
    tier = np.minimum((seen * n_models).astype(np.int64), n_models - 1)
    counts = np.eye(n_models, dtype=np.int64)[by_price[tier]]
    return [score_choices(stream, "tiers", feedback.verification, 0.0, counts)]


def score_threshold(world: World, feedback: FeedbackSpec) -> list[Scored]:
    """A point for each share of tasks sent to the strong model; strong and weak are the dearest and the cheapest.

    The cost weight of a point is the place of its share in `QUANTILES`: cheaper points come last.
    """
    stream = world.stream
    by_price = np.argsort(world.prices_usd, kind="stable")
    weak, strong = int(by_price[0]), int(by_price[-1])
    difference = stream.success[:, strong] - stream.success[:, weak]
    is_second = world.streams.at("halves", 0).permutation(stream.n_tasks) % 2 == 0
    wins = np.zeros(stream.n_tasks)
    for used in (is_second, ~is_second):
        told = ~used & (difference != 0.0)  # a pair of equals prefers nothing
        theta = fit_logistic(world.contexts.x[told], difference[told] > 0.0, np.abs(difference[told]))
        wins[used] = world.contexts.x[used] @ theta
    points = []
    rank = np.argsort(np.argsort(-wins, kind="stable"), kind="stable")
    for place, share in enumerate(reversed(QUANTILES)):
        to_strong = rank < round(share * stream.n_tasks)
        counts = np.zeros(stream.success.shape, dtype=np.int64)
        counts[np.arange(stream.n_tasks), np.where(to_strong, strong, weak)] = 1
        points.append(score_choices(stream, "threshold", feedback.verification, float(place), counts))
    return points


def fit_logistic(x: Array, is_win: npt.NDArray[np.bool_], weights: Array, ridge: float = 1.0) -> Array:
    """θ of P(win) = 1 / (1 + exp(-xᵀθ)), by Newton's method on the penalised likelihood.

    Args:
        x: shape (n, d); weights: of each pair, shape (n,).
        ridge: λ > 0, so that θ is finite also where wins are separable or there is no pair.

    >>> theta = fit_logistic(np.array([[1.0], [-1.0]]), np.array([True, False]), np.ones(2))
    >>> bool(theta[0] > 0.0)
    True
    """
    theta = np.zeros(x.shape[1])
    for _ in range(30):
        probability = 1.0 / (1.0 + np.exp(-np.clip(x @ theta, -30.0, 30.0)))
        gradient = x.T @ (weights * (is_win - probability)) - ridge * theta
        curvature = (x * (weights * probability * (1.0 - probability))[:, None]).T @ x + ridge * np.eye(x.shape[1])
        step = np.linalg.solve(curvature, gradient)
        theta += step
        if np.abs(step).max(initial=0.0) < 1e-9:
            break
    return theta


def score_cascade(
    world: World, feedback: FeedbackSpec, false_pass: float = FALSE_PASS, false_fail: float = FALSE_FAIL
) -> list[Scored]:
    """A point for each length of the ladder from cheap to dear; the last attempt of a ladder is taken unverified.

    Attempts of one task are independent given its success rates. An attempt that succeeds with probability s passes
    with probability s(1 - false_fail) + (1 - s) false_pass. A verifier that cannot read the family passes nothing: all
    of them but the patch family under `single`, a misclassified task under `adaptive`.
    """
    stream = world.stream
    by_price = np.argsort(world.prices_usd, kind="stable").tolist()
    reads = np.array([readable(feedback, name) for name in stream.families])[stream.family]
    points = []
    for length in range(len(by_price), 0, -1):
        reach = np.ones(stream.n_tasks)
        success, cost = np.zeros(stream.n_tasks), np.zeros(stream.n_tasks)
        share = np.zeros(stream.success.shape)
        for place, model in enumerate(by_price[:length]):
            solved = stream.success[:, model]
            share[:, model] = reach
            cost += reach * stream.cost_usd[:, model]
            if place == length - 1:
                success += reach * solved
                break
            success += reach * reads * solved * (1.0 - false_fail)
            reach = reach * (1.0 - reads * (solved * (1.0 - false_fail) + (1.0 - solved) * false_pass))
        points.append(Scored("cascade", feedback.verification, float(len(by_price) - length), share, success, cost))
    return points


OFFLINE: dict[str, Callable[[World, FeedbackSpec], list[Scored]]] = {
    "cascade": score_cascade,
    "threshold": score_threshold,
    "tiers": score_tiers,
}
"""By the name that `--policies` takes."""
