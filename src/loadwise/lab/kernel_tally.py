"""The loops that `lab.compiled` compiles for policies that count by label, and for the nearest outcomes.

Axes as in `lab.kernel`; L labels, M remembered outcomes, N neighbours.
"""

from typing import Any

import numpy as np

from .kernel import pick

TALLY = ("heard", "tally_scores", "replay_tally")
NEAREST = ("heard", "nearest_scores", "replay_nearest")
"""Names to compile, each before those that call it; `pick` of `lab.kernel` before all."""

TABLE, ACROUTER, GREEDY = 0, 1, 2
"""Rules by which counts become scores."""

_UNSEEN = -2e6

Array = Any


def heard(step: int, task: int, model: int, cost_weight: float, decisions: Any, outcomes: Any) -> float:
    """The reward of a decision."""
    trial_draw, credited = decisions[1], decisions[2]
    trial_success, trial_cost, n_trials = outcomes
    n = n_trials[task, model]
    trial = min(int(trial_draw[step] * n), n - 1)
    reward: float = credited[step] * trial_success[task, model, trial] - cost_weight * trial_cost[task, model, trial]
    return reward


def tally_scores(
    scores: Array, n_decisions: Array, n_verdicts: Array, totals: Array, rule: int, numbers: Any, is_default: Array
) -> None:
    """Scores under one label."""
    alpha, prior, _, n_forced = numbers
    n_models = len(scores)
    must_try, has_verdict = False, False
    for k in range(n_models):
        must_try = must_try or n_decisions[k] < n_forced
        has_verdict = has_verdict or n_verdicts[k] > 0
    for k in range(n_models):
        if rule == TABLE:
            scores[k] = totals[k] / (prior + n_verdicts[k]) + alpha / np.sqrt(prior + n_decisions[k])
        elif rule == GREEDY:
            scores[k] = totals[k] / n_verdicts[k] if n_verdicts[k] > 0 else prior
        elif must_try:
            scores[k] = 1.0 if n_decisions[k] < n_forced else 0.0
        elif has_verdict:
            scores[k] = totals[k] / n_verdicts[k] if n_verdicts[k] > 0 else _UNSEEN
        else:
            scores[k] = is_default[k]


def replay_tally(
    chosen: Array,
    decisions: Any,
    verdicts: Any,
    outcomes: Any,
    cost_weights: Array,
    chance: Any,
    label: Array,
    sizes: Any,
    numbers: Any,
    is_default: Array,
) -> None:
    """Fill `chosen` (W, T)."""
    task, learner = decisions[0], decisions[3]
    landing, landing_end, lost = verdicts
    draws, price_rank, by_name = chance
    n_labels, n_learners, rule = sizes
    floor = numbers[2]
    n_models = outcomes[2].shape[1]
    n_decisions = np.zeros((n_learners, n_labels, n_models), dtype=np.int64)
    n_verdicts = np.zeros((n_learners, n_labels, n_models), dtype=np.int64)
    totals = np.zeros((n_learners, n_labels, n_models))
    scores = np.zeros(n_models)
    for w in range(len(cost_weights)):
        n_decisions[:] = 0
        n_verdicts[:] = 0
        totals[:] = 0.0
        landed = 0
        for t in range(len(task)):
            while landed < landing_end[t]:
                s = landing[landed]
                landed += 1
                c, k, i = learner[s], chosen[w, s], label[task[s]]
                if lost[s]:
                    n_decisions[c, i, k] -= 1
                else:
                    n_verdicts[c, i, k] += 1
                    totals[c, i, k] += heard(s, task[s], k, cost_weights[w], decisions, outcomes)
            c, i = learner[t], label[task[t]]
            if floor > 0.0 and draws[t] < floor:
                best = by_name[min(int(draws[t] / floor * n_models), n_models - 1)]
            else:
                tally_scores(scores, n_decisions[c, i], n_verdicts[c, i], totals[c, i], rule, numbers, is_default)
                best = pick(scores, 1e-9, price_rank)
            chosen[w, t] = best
            n_decisions[c, i, best] += 1


def nearest_scores(
    scores: Array,
    near: Array,
    memory: Any,
    alpha: float,
    similarity_min: float,
    room: Any,
) -> None:
    """Scores from the similarities `near` of one context to all; `room` holds the neighbours, (K, N) each."""
    seen, owners, rewards, n_learned = memory
    found, kept, kept_rewards = room
    n_neighbours, capacity = kept.shape[1], len(seen)
    found[:] = 0
    for back in range(min(n_learned, capacity)):  # the latest first: it stays before equals
        place = (n_learned - 1 - back) % capacity
        similarity, k = near[seen[place]], owners[place]
        n = found[k]
        if similarity < similarity_min or (n == n_neighbours and similarity <= kept[k, n - 1]):
            continue
        at = n if n < n_neighbours else n - 1
        while at > 0 and kept[k, at - 1] < similarity:
            kept[k, at] = kept[k, at - 1]
            kept_rewards[k, at] = kept_rewards[k, at - 1]
            at -= 1
        kept[k, at] = similarity
        kept_rewards[k, at] = rewards[place]
        found[k] = min(n + 1, n_neighbours)
    for k in range(len(scores)):
        total = 0.0
        for at in range(found[k]):
            total += kept_rewards[k, at]
        scores[k] = total / (1.0 + found[k]) + alpha / np.sqrt(1.0 + found[k])


def replay_nearest(
    chosen: Array,
    decisions: Any,
    verdicts: Any,
    outcomes: Any,
    cost_weights: Array,
    chance: Any,
    similarity: Array,
    context: Array,
    sizes: Any,
    numbers: Any,
) -> None:
    """Fill `chosen` (W, T)."""
    task, learner = decisions[0], decisions[3]
    landing, landing_end, lost = verdicts
    draws, price_rank, by_name = chance
    capacity, n_learners, n_neighbours = sizes
    alpha, similarity_min, floor = numbers
    n_models = outcomes[2].shape[1]
    seen = np.zeros((n_learners, capacity), dtype=np.int64)
    owners = np.zeros((n_learners, capacity), dtype=np.int64)
    rewards = np.zeros((n_learners, capacity))
    n_learned = np.zeros(n_learners, dtype=np.int64)
    found = np.zeros(n_models, dtype=np.int64)
    room = (found, np.zeros((n_models, n_neighbours)), np.zeros((n_models, n_neighbours)))
    scores = np.zeros(n_models)
    for w in range(len(cost_weights)):
        n_learned[:] = 0
        landed = 0
        for t in range(len(task)):
            while landed < landing_end[t]:
                s = landing[landed]
                landed += 1
                if not lost[s]:
                    c, k = learner[s], chosen[w, s]
                    place = n_learned[c] % capacity
                    seen[c, place], owners[c, place] = context[task[s]], k
                    rewards[c, place] = heard(s, task[s], k, cost_weights[w], decisions, outcomes)
                    n_learned[c] += 1
            c = learner[t]
            if floor > 0.0 and draws[t] < floor:
                best = by_name[min(int(draws[t] / floor * n_models), n_models - 1)]
            else:
                memory = (seen[c], owners[c], rewards[c], n_learned[c])
                nearest_scores(scores, similarity[context[task[t]]], memory, alpha, similarity_min, room)
                best = pick(scores, 1e-9, price_rank)
            chosen[w, t] = best
