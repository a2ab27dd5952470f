"""Environments in lock-step: each is the run that it would be alone, in one array."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadwise.kernel.errors import ConfigError
from loadwise.sim.compiled import HAS_NUMBA
from loadwise.sim.fast_run import FastRun
from loadwise.sim.lock_step import LOAD_COLUMNS, LockStep
from loadwise.sim.programs import Programs, pack
from loadwise.sim.vllm_engine import VllmEngineSpec

SPECS = [VllmEngineSpec(num_gpu_blocks=1200), VllmEngineSpec(num_gpu_blocks=700)]
N_ENVIRONMENTS = 64


def programs(seed: int, n: int = 6) -> Programs:
    """A few agents; environments have different numbers of calls."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(n):
        k = 1 + int(rng.integers(4))
        growth = (1 + rng.gamma(1, 200, k)).astype(int)
        output = np.maximum(rng.gamma(2, 20, k), 1).astype(int)
        made.append((growth.tolist(), output.tolist(), rng.exponential(1.0, k).tolist()))
    return pack(made)


def rule(environment: int, program: int) -> int:
    """Some choice that differs between environments."""
    return (environment + program) % 2


def test_64_environments_are_64_runs() -> None:
    """Law: advanced together, each does exactly what it does alone under the same choices."""
    worlds = [programs(seed) for seed in range(N_ENVIRONMENTS)]
    together = LockStep(SPECS, worlds, 3, is_compiled=False)
    n_calls = min(world.n_calls for world in worlds)
    asked = together.advance()
    n_asked = 0
    while (asked >= 0).any():
        n_asked += int((asked >= 0).sum())
        asked = together.advance(np.array([rule(i, int(program)) for i, program in enumerate(asked)]))
    assert n_asked > N_ENVIRONMENTS
    for i, world in enumerate(worlds):
        alone = FastRun(SPECS, world, 3, decides=True, max_calls=n_calls, is_compiled=False)
        program = alone.advance()
        while program >= 0:
            program = alone.advance(choice=rule(i, program))
        log, other = together.runs[i].log(), alone.log()
        for name in ("call", "engine", "hit_tokens", "finished_at_s"):
            assert np.array_equal(getattr(log, name), getattr(other, name)), (i, name)
        assert together.now_s()[i] == alone.now_s


@pytest.mark.skipif(not HAS_NUMBA, reason="the extra `sim` (numba) is not installed")
def test_compiled_environments_do_the_same() -> None:
    """Machine code on rows of one array gives the array that plain Python gives."""
    worlds = [programs(seed) for seed in range(4)]
    memories = []
    for is_compiled in (False, True):
        together = LockStep(SPECS, worlds, 3, is_compiled=is_compiled)
        asked = together.advance()
        while (asked >= 0).any():
            asked = together.advance(asked % 2)
        memories.append(together.memory)
    assert np.array_equal(*memories)


def test_the_sample_of_the_page_runs() -> None:
    """What a reader copies from docs/simulator.md goes on to its end."""
    page = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()
    (source,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    space: dict[str, Any] = {}
    exec(compile(source.replace("* 64", "* 2"), "simulator.md", "exec"), space)
    assert (space["asked"] == -1).all()
    assert len(space["runs"].runs[0].log()) == 100


def test_what_is_seen_is_the_engines_load() -> None:
    """Running, waiting, usage and context, by environment and engine; nothing before anything runs."""
    together = LockStep(SPECS, [programs(1), programs(2)], 4, is_compiled=False)
    asked = together.advance()
    assert together.loads().shape == (2, 2, len(LOAD_COLUMNS))
    assert not together.loads().any()
    first = [int(world.growth_tokens[0]) for world in (programs(1), programs(2))]
    assert together.first_prompts(asked).tolist() == first
    for _ in range(3):
        asked = together.advance(np.array([0, 1]))
    loads = together.loads()
    assert loads[0, 0, 0] + loads[0, 0, 1] >= 1
    assert loads[1, 1, 2] > 0
    assert not loads[0, 1].any() and not loads[1, 0].any()


def test_a_copy_of_the_array_is_a_snapshot_of_all() -> None:
    """Written back, all environments do again what they did."""
    together = LockStep(SPECS, [programs(seed) for seed in range(4)], 3, is_compiled=False)
    zeros = np.zeros(4, int)
    together.advance()
    together.advance(zeros)
    saved = together.memory.copy()
    first = together.advance(zeros)
    after = together.memory.copy()
    together.memory[:] = saved
    assert np.array_equal(together.advance(zeros), first)
    assert np.array_equal(together.memory, after)


def test_what_does_not_fit_together_is_refused() -> None:
    """No environments, different numbers of programs, wrong numbers of choices, engines that do not exist."""
    with pytest.raises(ConfigError, match=r"\[\] programs"):
        LockStep(SPECS, [], 2)
    with pytest.raises(ConfigError, match=r"\[3, 4\] programs"):
        LockStep(SPECS, [programs(1, 3), programs(1, 4)], 2)
    together = LockStep(SPECS, [programs(1), programs(2)], 2, is_compiled=False)
    together.advance()
    with pytest.raises(ConfigError, match="3 choices for 2"):
        together.advance(np.zeros(3, int))
    with pytest.raises(ConfigError, match="choice is 2"):
        together.advance(np.array([0, 2]))
    with pytest.raises(ConfigError, match="needs"):
        FastRun(SPECS, programs(1), 2, memory=np.zeros(3, np.int64))
