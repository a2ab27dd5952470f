"""What the linear learners cost: microseconds of choose, observe, learn and undo at 3 candidates and 40 features.

python -m bench.linear [--json] [--quick] [--features 40] [--candidates 3]
"""

import argparse
import os
import statistics
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np

from bench import result
from bench.figures import check
from loadwise.policy.base import Candidate, Context, Feedback
from loadwise.policy.linear import LinTS, LinUCB, LinUCBOptions

BOUNDS_US = {"linucb.choose_us": 40.0, "linucb.observe_us": 40.0, "linucb.learn_us": 40.0}
"""Twice the aim of 20 µs: a machine that is shared must not fail the check by itself."""


def acts(policy: LinUCB | LinTS, n_candidates: int, n_features: int) -> dict[str, Callable[[], Any]]:
    """The four acts on a policy that has learned for a while."""
    rng = np.random.default_rng(0)
    pool = [Candidate(name=f"m{index}", price_usd=float(index)) for index in range(n_candidates)]
    for decision_id in range(300):
        x, name = rng.normal(size=n_features), f"m{decision_id % n_candidates}"
        policy.observe(decision_id, name, x)
        policy.learn(Feedback(decision_id=decision_id, candidate=name, x=x, reward=float(rng.random() < 0.5)))
    x = rng.normal(size=n_features)
    context = Context(decision_id=0, x=x)
    feedback = Feedback(decision_id=0, candidate="m0", x=x, reward=1.0)
    choice = policy.choose(context, pool, rng)
    return {
        "choose_us": lambda: policy.choose(context, pool, rng),
        "observe_us": lambda: policy.observe(0, "m0", x),
        "learn_us": lambda: policy.learn(feedback),
        "undo_us": lambda: policy.undo(0, "m0", x),
        "propensities_us": lambda: policy.propensities(choice, rng),
        "dump_us": policy.dump,
    }


def measure(n_candidates: int, n_features: int, number: int) -> dict[str, float]:
    """The median of five timings of each act, in microseconds a call."""
    values = {}
    for policy in (LinUCB(LinUCBOptions(exploration_floor=0.02)), LinTS()):
        for act, run in acts(policy, n_candidates, n_features).items():
            # Undo makes an inverse afresh, and may not be repeated more often than observe was.
            times = min(number, 300) if act in ("undo_us", "propensities_us", "dump_us") else number
            runs = timeit.repeat(run, number=times, repeat=5)
            values[f"{policy.name}.{act}"] = round(statistics.median(runs) / times * 1e6, 2)
    return values


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--features", type=int, default=40)
    parser.add_argument("--candidates", type=int, default=3)
    arguments = parser.parse_args()
    values = measure(arguments.candidates, arguments.features, 500 if arguments.quick else 5000)
    checks = [check(key, "<=", bound, values[key]) for key, bound in BOUNDS_US.items()]
    config = {
        "n_candidates": arguments.candidates,
        "n_features": arguments.features,
        "load_average": os.getloadavg()[0],
    }
    built = result.build("linear", values=values, config=config, seeds=[0], checks=checks)
    result.show(built, as_json=arguments.json)


if __name__ == "__main__":
    main()
