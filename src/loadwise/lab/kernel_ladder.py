"""The ladder on one order, compiled: the same attempts as `policy.ladder.Ladder` makes, far sooner.

Plain functions that numba compiles on first use. Rows of the ridge are: first attempts of model k at k, attempts of k
after a failure of m at K + mK + k, costs of k at K + K² + k. θ follows by recursive least squares, θ += u (y - xᵀθ) / s
with u = L⁻¹x and s = 1 + xᵀu, which is L⁻¹b (tests/lab holds it to the class on 10⁴ decisions).
"""

import math
from typing import Any

import numpy as np

from loadwise.policy.ladder import AUDITED_MAX

LADDER = ["learn", "denoised", "worth", "climb", "run_ladder"]
"""In the order in which they are compiled."""


def learn(inverse: Any, theta: Any, row: int, x: Any, y: float) -> None:
    """One verdict, or one cost, enters a row."""
    d = len(x)
    u = np.zeros(d)
    error, s = y, 1.0
    for j in range(d):
        if x[j] != 0.0:
            error -= x[j] * theta[row, j]
            for i in range(d):
                u[i] += inverse[row, i, j] * x[j]
    for j in range(d):
        s += x[j] * u[j]
    for i in range(d):
        theta[row, i] += u[i] * error / s
        for j in range(d):
            inverse[row, i, j] -= u[i] * u[j] / s


def denoised(first: float, passed: float, false_pass: float, false_fail: float) -> Any:
    """`go` and `stop`."""
    clear = 1.0 - false_pass - false_fail
    right = min(max((first - false_pass) / clear, 0.0), 1.0)
    stop = min(false_fail * right / max(1.0 - first, 1e-9), 1.0)
    return min(max((passed - false_pass) / clear, 0.0), 1.0), stop


def worth(first: float, passed: float, rates: Any, rate_max: float) -> float:
    """`go` minus `stop` under the rates, or, where the first is negative, under the worst that are allowed."""
    if rates[0] >= 0.0:
        go, stop = denoised(first, passed, rates[0], rates[1])
        return float(go - stop)
    highest_pass = min(rate_max, min(first, passed))
    highest_fail = min(rate_max, 1.0 - max(first, passed))
    worst = np.inf
    for i in range(2):
        for j in range(2):
            go, stop = denoised(first, passed, i * highest_pass, j * highest_fail)
            worst = min(worst, go - stop)
    return float(worst)


def climb(inverse: Any, theta: Any, x: Any, failed: int, tried: Any, rates: Any, numbers: Any, by_name: Any) -> int:
    """The model to go to, or -1."""
    n_models = len(tried)
    optimism, rate_max, price, d = numbers[0], numbers[1], numbers[2], len(x)
    first = 0.0
    for j in range(d):
        first += x[j] * theta[failed, j]
    first = min(max(first, 0.0), 1.0)
    best, best_value = -1, 0.0
    for place in range(n_models):
        k = by_name[place]
        if tried[k]:
            continue
        row, cost_row = n_models + failed * n_models + k, n_models + n_models * n_models + k
        mean, square, cost = 0.0, 0.0, 0.0
        for j in range(d):
            if x[j] != 0.0:
                mean += x[j] * theta[row, j]
                cost += x[j] * theta[cost_row, j]
                for i in range(d):
                    square += x[i] * inverse[row, i, j] * x[j]
        passed = min(max(mean + optimism * math.sqrt(max(square, 0.0)), 0.0), 1.0)
        value = worth(first, passed, rates, rate_max) - price * max(cost, 0.0)
        if value > best_value:
            best, best_value = k, value
    return best


def run_ladder(
    sums: Any,
    xs: Any,
    tasks: Any,
    chosen: Any,
    draws: Any,
    chance: Any,
    outcomes: Any,
    means: Any,
    by_name: Any,
    rates_told: Any,
    numbers: Any,
    sizes: Any,
    audits: Any,
) -> None:
    """One order: adds the last pass to `sums`, one row a field of `Climbed`.

    Args:
        outcomes: whether right, verdict and cost of each task, model and copy, and the number of copies.
        means: success and cost of each task and model.
        rates_told: φ and ψ; negative where unknown.
        numbers: optimism, the largest rate, the price of a dollar, the share of audits, the ridge.
        sizes: attempts at most, tasks, decisions until an audit is heard, audits worth of the assumed rates.
        audits: scratch, shape (T * attempts, 3).
    """
    is_right, verdicts, costs, n_copies = outcomes
    success, cost_usd = means
    attempts_max, n_tasks, delay, prior = sizes[0], sizes[1], sizes[2], sizes[3]
    n_models, d, total = success.shape[1], xs.shape[1], len(tasks)
    n_rows = 2 * n_models + n_models * n_models
    inverse, theta = np.zeros((n_rows, d, d)), np.zeros((n_rows, d))
    for row in range(n_rows):
        for i in range(d):
            inverse[row, i, i] = 1.0 / numbers[4]
    rates, seen = rates_told.copy(), np.zeros(4)
    n_audits, n_heard = 0, 0
    for step in range(total):
        while n_heard < n_audits and audits[n_heard, 0] <= step:
            first = 2 if audits[n_heard, 2] > 0.5 else 0
            seen[first] += 1.0
            seen[first + 1] += 1.0 if audits[n_heard, 1] != audits[n_heard, 2] else 0.0
            n_heard += 1
            if rates_told[0] >= 0.0 or (seen[0] >= prior and seen[2] >= prior):
                for side in range(2):
                    assumed = rates_told[side] if rates_told[0] >= 0.0 else numbers[1] / 2.0
                    told = (seen[2 * side + 1] + prior * assumed) / (seen[2 * side] + prior)
                    rates[side] = min(told, AUDITED_MAX)
        task, x = tasks[step], xs[tasks[step]]
        tried = np.zeros(n_models, dtype=np.bool_)
        model, failed, draw, n_made = chosen[step], -1, draws[step], 0
        first_right, right, spent = 0.0, 0.0, 0.0
        while True:
            copies = n_copies[task, model]
            copy = min(int(draw * copies), copies - 1)
            right, verdict, cost = is_right[task, model, copy], verdicts[task, model, copy], costs[task, model, copy]
            if n_made == 0:
                first_right = right
            else:
                spent += cost
            learn(inverse, theta, model if failed < 0 else n_models + failed * n_models + model, x, verdict)
            learn(inverse, theta, n_models + n_models * n_models + model, x, cost)
            if chance[step, attempts_max] < numbers[3]:
                audits[n_audits, 0], audits[n_audits, 1], audits[n_audits, 2] = step + delay, verdict, right
                n_audits += 1
            tried[model] = True
            n_made += 1
            if verdict > 0.5 or n_made >= attempts_max:
                break
            following = climb(inverse, theta, x, model, tried, rates, numbers, by_name)
            if following < 0:
                break
            failed, model, draw = model, following, chance[step, n_made - 1]
        if step >= total - n_tasks:
            begun = chosen[step]
            sums[0, task] += success[task, begun] + right - first_right
            sums[1, task] += cost_usd[task, begun] + spent
            sums[2, task] += n_made
            sums[3, task] += success[task, begun]
            sums[4, task] += cost_usd[task, begun]
