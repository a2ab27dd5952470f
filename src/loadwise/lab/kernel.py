"""The loops that `lab.compiled` compiles for linear policies; plain Python runs them too, slowly.

Axes: W cost weights, T decisions, n tasks, K models, R trials, d features, C learners.
"""

from typing import Any

import numpy as np

LINEAR = (
    *("refresh", "update", "quadratic", "dot", "solve", "enter", "land"),
    *("pick", "shift", "cross", "overdue", "charge", "choose", "reset", "replay_weights"),
)
"""Names to compile, each before those that call it."""

REFRESH_UPDATES = 2000
"""Updates after which an inverse is made afresh."""

TRIED, JUDGED = 0, 1
"""Places of V (all decisions) and L (judged ones) in what is kept of a model."""

Array = Any


def refresh(inverse: Array, counts: Array, ends: Array, features: Array, values: Array, ridge: float) -> None:
    """inverse = (λI + Σ_i counts[i] x_i x_iᵀ)⁻¹, shape (d, d), by Gauss-Jordan elimination."""
    d = len(inverse)
    left = np.zeros((d, d))
    for j in range(d):
        left[j, j] = ridge
    for i in range(len(counts)):
        if counts[i] == 0:
            continue
        for a in range(ends[i], ends[i + 1]):
            for b in range(ends[i], ends[i + 1]):
                left[features[a], features[b]] += counts[i] * values[a] * values[b]
    inverse[:] = 0.0
    for j in range(d):
        inverse[j, j] = 1.0
    for j in range(d):  # symmetric and positive definite: no pivot is small
        pivot = left[j, j]
        left[j] /= pivot
        inverse[j] /= pivot
        for i in range(d):
            if i != j:
                factor = left[i, j]
                if factor != 0.0:
                    left[i] -= factor * left[j]
                    inverse[i] -= factor * inverse[j]


def update(inverse: Array, u: Array, features: Array, values: Array, begin: int, end: int, sign: float) -> None:
    """(V ± x xᵀ)⁻¹ from V⁻¹, in place; u is room for V⁻¹ x."""
    d = len(inverse)
    for i in range(d):
        total = 0.0
        for a in range(begin, end):
            total += inverse[i, features[a]] * values[a]
        u[i] = total
    shrink = 0.0
    for a in range(begin, end):
        shrink += values[a] * u[features[a]]
    scale = sign / (1.0 + sign * shrink)
    for i in range(d):
        if u[i] != 0.0:
            factor = scale * u[i]
            for j in range(d):
                inverse[i, j] -= factor * u[j]


def quadratic(inverse: Array, features: Array, values: Array, begin: int, end: int) -> float:
    """xᵀ V⁻¹ x."""
    total = 0.0
    for a in range(begin, end):
        row = inverse[features[a]]
        inner = 0.0
        for b in range(begin, end):
            inner += row[features[b]] * values[b]
        total += values[a] * inner
    return total


def dot(vector: Array, features: Array, values: Array, begin: int, end: int) -> float:
    """xᵀ θ."""
    total = 0.0
    for a in range(begin, end):
        total += vector[features[a]] * values[a]
    return total


def solve(theta: Array, inverse: Array, credits: Array) -> None:
    """θ = V⁻¹ b, in place."""
    d = len(theta)
    for i in range(d):
        total = 0.0
        for j in range(d):
            total += inverse[i, j] * credits[j]
        theta[i] = total


def enter(
    which: int, sign: int, inverses: Array, counts: Array, ages: Array, u: Array, contexts: Any, task: int, ridge: float
) -> None:
    """A context enters (or with sign -1 leaves) V or L of one model."""
    ends, features, values = contexts
    counts[which, task] += sign
    update(inverses[which], u, features, values, ends[task], ends[task + 1], float(sign))
    ages[which] += 1
    if ages[which] >= REFRESH_UPDATES:
        refresh(inverses[which], counts[which], ends, features, values, ridge)
        ages[which] = 0


def land(
    step: int,
    task: int,
    model: int,
    cost_weight: float,
    decisions: Any,
    lost: Array,
    contexts: Any,
    outcomes: Any,
    learned: Any,
    gram: int,
    ridge: float,
    known: Array,
    beyond: Array,
) -> None:
    """The verdict of one decision reaches its model: learn, or undo where it is lost."""
    trial_draw, credited = decisions[1], decisions[2]
    ends, features, values = contexts
    trial_success, trial_cost, n_trials = outcomes
    inverses, counts, ages, credits, theta, u = learned
    if lost[step]:
        enter(TRIED, -1, inverses, counts, ages, u, contexts, task, ridge)
    else:
        n = n_trials[task, model]
        trial = min(int(trial_draw[step] * n), n - 1)
        reward = credited[step] * trial_success[task, model, trial] - cost_weight * trial_cost[task, model, trial]
        reward -= known[task, model]
        beyond[0] += reward
        beyond[1] += 1.0
        for a in range(ends[task], ends[task + 1]):
            beyond[2 + features[a]] += values[a]
        enter(JUDGED, 1, inverses, counts, ages, u, contexts, task, ridge)
        for a in range(ends[task], ends[task + 1]):
            credits[features[a]] += reward * values[a]
    solve(theta, inverses[TRIED if gram == 1 else JUDGED], credits)


def choose(
    step: int,
    task: int,
    contexts: Any,
    chance: Any,
    inverses: Array,
    theta: Array,
    scores: Array,
    penalties: Array,
    sizes: Any,
    numbers: Any,
    known: Array,
    beyond: Array,
    doubts: Any,
    n_tried: Array,
) -> int:
    """The model with the highest score, ties to the cheaper; or by the floor any."""
    ends, features, values = contexts
    normals, draws, name_rank, price_rank, by_name = chance
    _, _, gram, is_thompson = sizes
    alpha, _, floor, tie_ratio = numbers
    n_models = len(scores)
    if floor > 0.0 and draws[step] < floor:
        return int(by_name[min(int(draws[step] / floor * n_models), n_models - 1)])
    begin, end = ends[task], ends[task + 1]
    for k in range(n_models):
        spread = quadratic(inverses[k, JUDGED if gram == 2 else TRIED], features, values, begin, end)
        spread = np.sqrt(spread) if spread > 0.0 else 0.0
        noise = normals[step, name_rank[k]] if is_thompson else 1.0
        mean = known[task, k] + dot(theta[k], features, values, begin, end)
        moved = shift(beyond[k, 0], beyond[k, 1], doubts)
        if moved != 0.0:
            inverse = inverses[k, TRIED if gram == 1 else JUDGED]
            mean += moved * (1.0 - cross(inverse, beyond[k], features, values, begin, end))
        scores[k] = mean + alpha * spread * noise - penalties[k]
    best = pick(scores, tie_ratio, price_rank)
    return overdue(best, n_tried, price_rank) if doubts[1] >= 0.0 and not is_thompson else best


def shift(total: float, n: float, doubts: Any) -> float:
    """How far evidence moves a prior mean; see `policy.prior`. Without a prior, doubt is negative: not at all."""
    noise, doubt, surprise = doubts
    if n == 0.0 or doubt < 0.0:
        return 0.0
    off = total / n
    expected = surprise * (noise / n + doubt)
    return off if off * off > expected else 0.0


def cross(inverse: Array, beyond: Array, features: Array, values: Array, begin: int, end: int) -> float:
    """zᵀ V⁻¹ s with s the sum of judged contexts, which `beyond` holds from its third place on."""
    total = 0.0
    for a in range(begin, end):
        row = inverse[features[a]]
        inner = 0.0
        for j in range(len(inverse)):
            inner += row[j] * beyond[2 + j]
        total += values[a] * inner
    return total


def overdue(best: int, n_tried: Array, price_rank: Array) -> int:
    """The model tried least, where that is less than a prior's learner owes it; otherwise the best."""
    total = 0
    least = n_tried[0]
    for k in range(len(n_tried)):
        total += n_tried[k]
        least = min(least, n_tried[k])
    if len(n_tried) == 1 or least >= np.log2(1.0 + total / (16.0 * len(n_tried))):
        return best
    found = -1
    for k in range(len(n_tried)):
        if n_tried[k] == least and (found < 0 or price_rank[k] < price_rank[found]):
            found = k
    return found


def pick(scores: Array, tie_ratio: float, price_rank: Array) -> int:
    """The highest score; of equal ones the cheaper, then the first by name."""
    top = -np.inf
    for k in range(len(scores)):
        top = max(top, scores[k])
    near = top - tie_ratio * max(1.0, abs(top))
    best = -1
    for k in range(len(scores)):
        if scores[k] >= near and (best < 0 or price_rank[k] < price_rank[best]):
            best = k
    return best


def charge(penalties: Array, n_spent: Array, by_name: Array, ratios: Array, step: float) -> None:
    """What the pacer takes off each model's score: λ times its cost as a ratio of the budget."""
    over = 0.0
    for k in by_name:
        over += n_spent[k] * (ratios[k] - 1.0)
    multiplier = step * max(0.0, over)
    for k in range(len(penalties)):
        penalties[k] = multiplier * ratios[k]


def reset(inverses: Array, counts: Array, ages: Array, credits: Array, theta: Array, ridge: float) -> None:
    """Every learner as before its first decision."""
    counts[:] = 0
    ages[:] = 0
    credits[:] = 0.0
    theta[:] = 0.0
    inverses[:] = 0.0
    n_learners, n_models, _, d, _ = inverses.shape
    for c in range(n_learners):
        for k in range(n_models):
            for j in range(d):
                inverses[c, k, TRIED, j, j] = 1.0 / ridge
                inverses[c, k, JUDGED, j, j] = 1.0 / ridge


def replay_weights(
    chosen: Array,
    decisions: Any,
    verdicts: Any,
    contexts: Any,
    outcomes: Any,
    cost_weights: Array,
    chance: Any,
    sizes: Any,
    numbers: Any,
    pacing: Any,
    known: Array,
    doubts: Any,
) -> None:
    """Fill `chosen` (W, T); `known` (n, K) are means that a prior gives, zero without one."""
    ratios, step_of_price = pacing
    n_spent = np.zeros((sizes[1], outcomes[2].shape[1]), dtype=np.int64)
    penalties = np.zeros(outcomes[2].shape[1])
    task, learner = decisions[0], decisions[3]
    landing, landing_end, lost = verdicts
    d, n_learners, gram, _ = sizes
    ridge = numbers[1]
    n, n_models = outcomes[2].shape
    inverses = np.zeros((n_learners, n_models, 2, d, d))
    counts = np.zeros((n_learners, n_models, 2, n), dtype=np.int32)
    ages = np.zeros((n_learners, n_models, 2), dtype=np.int64)
    credits = np.zeros((n_learners, n_models, d))
    theta = np.zeros((n_learners, n_models, d))
    scores, u = np.zeros(n_models), np.zeros(d)
    # Per learner and model: rewards beyond the prior mean, their number, the sum of their contexts.
    beyond = np.zeros((n_learners, n_models, 2 + d))
    for w in range(len(cost_weights)):
        reset(inverses, counts, ages, credits, theta, ridge)
        n_spent[:] = 0
        beyond[:] = 0.0
        landed = 0
        for t in range(len(task)):
            while landed < landing_end[t]:
                s = landing[landed]
                landed += 1
                c, k = learner[s], chosen[w, s]
                learned = (inverses[c, k], counts[c, k], ages[c, k], credits[c, k], theta[c, k], u)
                land(
                    s,
                    task[s],
                    k,
                    cost_weights[w],
                    decisions,
                    lost,
                    contexts,
                    outcomes,
                    learned,
                    gram,
                    ridge,
                    known,
                    beyond[c, k],
                )
                if lost[s]:
                    n_spent[c, k] -= 1
            c = learner[t]
            if step_of_price > 0.0:
                charge(penalties, n_spent[c], chance[4], ratios, step_of_price)
            k = choose(
                t,
                task[t],
                contexts,
                chance,
                inverses[c],
                theta[c],
                scores,
                penalties,
                sizes,
                numbers,
                known,
                beyond[c],
                doubts,
                n_spent[c],
            )
            chosen[w, t] = k
            n_spent[c, k] += 1
            enter(TRIED, 1, inverses[c, k], counts[c, k], ages[c, k], u, contexts, task[t], ridge)
            if gram == 1:
                solve(theta[c, k], inverses[c, k, TRIED], credits[c, k])
