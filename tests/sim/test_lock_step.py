"""Environments in lock-step: each is the run that it would be alone, in one array."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadwise.kernel.errors import ConfigError
from loadwise.sim.block_run import BlockRun
from loadwise.sim.compiled import HAS_NUMBA
from loadwise.sim.fast_run import FastRun
from loadwise.sim.lock_step import LOAD_COLUMNS, LockStep
from loadwise.sim.programs import CallLog, Programs, pack
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


def assert_same(log: CallLog, other: CallLog) -> None:
    """Two logs are equal to the last bit."""
    for name in CallLog.__struct_fields__:
        assert np.array_equal(getattr(log, name), getattr(other, name)), name


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
        assert together.memory is not None
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
    assert together.memory is not None
    saved = together.memory.copy()
    assert np.array_equal(together.save(), saved)
    first = together.advance(zeros)
    after = together.memory.copy()
    for restore in (lambda: together.memory.__setitem__(slice(None), saved), lambda: together.restore(saved)):
        restore()
        assert np.array_equal(together.advance(zeros), first)
        assert np.array_equal(together.memory, after)


HYBRIDS = [
    VllmEngineSpec(num_gpu_blocks=60, block_size=528, n_state_groups=3),
    VllmEngineSpec(num_gpu_blocks=500, scheduling_policy="priority"),
]


def decided(run: FastRun | BlockRun, environment: int) -> CallLog:
    """A run to its end under the rule."""
    program = run.advance()
    while program >= 0:
        program = run.advance(choice=rule(environment, program))
    return run.log()


def test_engines_beyond_the_fast_core_run_by_block() -> None:
    """64 environments of hybrid and priority engines, each the run that it is alone, with loads to decide by."""
    worlds = [programs(seed, 3) for seed in range(N_ENVIRONMENTS)]
    together = LockStep(HYBRIDS, worlds, 3, is_compiled=False)
    assert together.memory is None
    n_calls = min(world.n_calls for world in worlds)
    asked = together.advance()
    while (asked >= 0).any():
        assert together.loads().shape == (N_ENVIRONMENTS, 2, len(LOAD_COLUMNS))
        asked = together.advance(np.array([rule(i, int(program)) for i, program in enumerate(asked)]))
    for i in (0, 1, N_ENVIRONMENTS - 1):
        alone = BlockRun(HYBRIDS, worlds[i], 3, max_calls=n_calls, is_compiled=False)
        assert_same(decided(alone, i), together.runs[i].log())
        assert together.now_s()[i] == alone.now_s


@pytest.mark.parametrize("seed", range(5))
def test_runs_by_block_are_those_of_the_fast_core(seed: int) -> None:
    """Where both can, asked and answered alike, they log alike, and so do their engines' loads on the way."""
    world = programs(seed, 8)
    runs = (FastRun(SPECS, world, 4, decides=True, is_compiled=False), BlockRun(SPECS, world, 4, is_compiled=False))
    one, other = (decided(run, seed) for run in runs)
    for name in ("call", "engine", "hit_tokens", "prompt_tokens"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert other.finished_at_s == pytest.approx(one.finished_at_s)


def test_a_snapshot_of_runs_by_block_is_restored() -> None:
    """Saved once, gone on from twice: the same choices lead to the same logs, others to others."""
    worlds = [programs(seed, 6) for seed in (3, 4)]
    together = LockStep(HYBRIDS, worlds, 3, is_compiled=False)
    together.advance()
    together.advance(np.array([0, 1]))
    saved, ends = together.save(), []
    for engine in (0, 0, 1):
        together.restore(saved)
        asked = together.advance(np.full(2, engine))
        while (asked >= 0).any():
            asked = together.advance(np.full(2, engine))
        ends.append([run.log() for run in together.runs])
    for i in range(2):
        assert_same(ends[0][i], ends[1][i])
        assert not np.array_equal(ends[0][i].engine, ends[2][i].engine)


def test_what_is_seen_by_block_is_the_engines_load() -> None:
    """What runs, waits and decodes, and what it holds."""
    world = pack([([3000], [400], [0.0])] * 3)
    run = BlockRun(HYBRIDS[:1], world, 3, is_compiled=False)
    assert run.loads() == [(0, 0, 0, 0)]
    for _ in range(4):
        run.advance(until_s=2.0, choice=0)
    ((n_running, n_waiting, kv_usage_ratio, n_context),) = run.loads()
    assert (n_running, n_waiting) == (3, 0)
    assert 3 * 6 / 60 <= kv_usage_ratio <= 1
    assert 9000 <= n_context <= 3 * 3400


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
    with pytest.raises(ConfigError, match="grows to 31690 tokens"):
        LockStep(HYBRIDS, [pack([([31_680], [10], [0.0])])], 2)
    with pytest.raises(ConfigError, match="0 engines"):
        LockStep([], [programs(1)], 2)
    with pytest.raises(ConfigError, match="0 agents"):
        LockStep(HYBRIDS, [programs(1)], 0)
    with pytest.raises(ConfigError, match="needs"):
        FastRun(SPECS, programs(1), 2, memory=np.zeros(3, np.int64))
