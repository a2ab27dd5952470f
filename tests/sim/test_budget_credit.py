"""A congested model looks weak where running out of time counts as failure, and does not where it teaches nothing."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from loadwise.policy.base import Candidate, Context
from loadwise.router.machine import Router
from loadwise.settings import open_stack
from loadwise.sim.report import Report
from loadwise.sim.scenario import Scenario, convert_scenario
from loadwise.sim.world import World

SUCCESS = {"strong": 0.8, "weak": 0.5}
CAPACITY_PER_S = 0.8
"""Programs that both models serve together: 16 places, 20 s each."""


def scenario(preset: str, load_ratio: float, **router: Any) -> Scenario:
    """Two models of eight places; programs of four turns must be over within 60 s of their arrival."""
    engine = {"kind": "simple", "slots": 8, "batch_slowdown_ratio": 0.0}
    backends = [{"name": name, "model": name, "engine": "emulator", "slots": 8} for name in SUCCESS]
    router = {"budget_s": 60, "budget_starts": "arrival", "hold_max_s": 3600, **router}
    return convert_scenario(
        {
            "scenario": 1,
            "name": "congested",
            "n_programs": 400,
            "pool": {"preset": preset, "models": {m: {} for m in SUCCESS}, "backends": backends, "router": router},
            "engines": dict.fromkeys(SUCCESS, engine),
            "workload": {
                "arrivals": {"kind": "poisson", "programs_per_s": load_ratio * CAPACITY_PER_S},
                "turns": 4,
                "first_prompt_tokens": 500,
                "output_tokens": {"gamma": {"shape": 8, "mean": 200}, "min": 1},
                "tool_s": 1,
            },
            "truth": {"success": {model: {"*": p} for model, p in SUCCESS.items()}},
            "verdicts": {"source": "agent", "delay_s": 1},
        }
    )


@cache
def run(preset: str, load_ratio: float, seed: int) -> tuple[dict[str, float], Report]:
    """What the learner holds of each model's success at the end, and the run."""
    world = scenario(preset, load_ratio)
    stack = open_stack(world.config, seed)
    router = stack.machine_by_name["router"]
    assert isinstance(router, Router)
    report = World(world, stack, seed).run()
    x = world.config.router.context.features(None, None, ())
    candidates = [Candidate(name=name) for name in SUCCESS]
    choice = router.credit.learners[0].choose(Context(decision_id=1, x=x), candidates, np.random.default_rng(0))
    return dict(zip(SUCCESS, choice.means, strict=True)), report


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_under_threefold_load_estimates_drift_only_where_a_time_out_is_a_failure(seed: int) -> None:
    """At a load of .4 both presets know the models. At three the paper's believes them far worse; ours does not."""
    for preset in ("oracle", "loadwise"):
        calm, report = run(preset, 0.4, seed)
        assert report.programs["finished"] > 380
        assert calm["strong"] == pytest.approx(SUCCESS["strong"], abs=0.1)
    paper, report = run("oracle", 3.0, seed)
    assert report.programs["finished"] < 150, "most run out of time"
    ours, _ = run("loadwise", 3.0, seed)
    assert ours["strong"] == pytest.approx(SUCCESS["strong"], abs=0.12)
    assert paper["strong"] < 0.5 * SUCCESS["strong"]
    assert ours["strong"] - ours["weak"] > 0.1
