"""The fast core against the block-level engine: the same hits, preemptions, order and instants."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadwise.kernel.errors import ConfigError
from loadwise.sim.compiled import HAS_NUMBA
from loadwise.sim.fast_run import FastRun, run_fast
from loadwise.sim.programs import CallLog, Programs, pack, run_by_block
from loadwise.sim.step_time import StepCost
from loadwise.sim.vllm_engine import VllmEngine, VllmEngineSpec

COSTS = [
    StepCost(fixed_s=0.0123, gemm_s_per_token=1.1e-4, kv_s_per_token=1.7e-6, attention_s_per_pair=1e-7, request_s=1e-3),
    StepCost(fixed_s=0.011, host_s=0.02, host_s_per_request=1.3e-3, kv_s_per_token=2e-6, scan_s_per_token=1e-5),
    StepCost(fixed_s=0.017, host_s=0.003, is_host_overlapped=False, kv_s_per_token=0.0, state_s_per_request=1e-4),
]

turns = st.lists(
    st.tuples(st.integers(0, 90), st.integers(1, 70), st.floats(0.0, 3.0, allow_subnormal=False)),
    min_size=1,
    max_size=6,
)


@st.composite
def programs(draw: st.DrawFn) -> Programs:
    """A few programs with irregular gaps, so that no two events fall together by rule."""
    shared = draw(st.sampled_from([0, 0, 20, 40]))
    drawn = draw(st.lists(turns, min_size=1, max_size=9))
    packed = []
    for i, program in enumerate(drawn):
        growth = [turn[0] for turn in program]
        growth[0] += shared + 1
        gaps = [turn[2] + 0.0137 * (i + 1) + 0.00071 * k for k, turn in enumerate(program)]
        packed.append((growth, [turn[1] for turn in program], gaps))
    return pack(packed, shared)


def least_blocks(some: Programs, block_size: int) -> int:
    """The smallest pool that every program fits into."""
    totals = np.add.reduceat(some.growth_tokens + some.output_tokens, some.offsets[:-1])
    return -(-int(totals.max()) // block_size)


def assert_equal(log: CallLog, other: CallLog, within_s: float = 1e-9) -> None:
    """Two runs did the same."""
    assert log.n_preemptions == other.n_preemptions
    for name in ("call", "engine", "hit_tokens", "prompt_tokens", "output_tokens"):
        assert np.array_equal(getattr(log, name), getattr(other, name)), name
    for name in ("arrived_at_s", "first_at_s", "finished_at_s"):
        assert np.allclose(getattr(log, name), getattr(other, name), rtol=0, atol=within_s), name


@settings(max_examples=150, deadline=None)
@given(
    some=programs(),
    spare_blocks=st.integers(0, 30),
    block_size=st.sampled_from([4, 8, 70]),
    n_engines=st.integers(1, 3),
    n_agents=st.integers(1, 8),
    max_num_seqs=st.sampled_from([1, 3, 20]),
    budget=st.sampled_from([21, 64, 500]),
    cost=st.sampled_from(COSTS),
)
def test_segments_equal_blocks(
    some: Programs,
    spare_blocks: int,
    block_size: int,
    n_engines: int,
    n_agents: int,
    max_num_seqs: int,
    budget: int,
    cost: StepCost,
) -> None:
    """Law: on random programs, pools and limits, segments and counters do exactly what blocks and lists do.

    So do single steps, and compiled code where there is a compiler.
    """
    spec = VllmEngineSpec(
        num_gpu_blocks=least_blocks(some, block_size) + spare_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        step=cost,
    )
    by_block = run_by_block([VllmEngine(spec) for _ in range(n_engines)], some, n_agents)
    assert len(by_block) == some.n_calls
    specs = [spec] * n_engines
    fast = run_fast(specs, some, n_agents, is_compiled=False)
    assert_equal(fast, by_block)
    assert_equal(run_fast(specs, some, n_agents, is_compiled=False, has_macro_steps=False), by_block)


def agents(n: int, seed: int, *, shared: int = 0) -> Programs:
    """Programs of some size, for runs that thrash."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(n):
        k = 2 + int(rng.integers(12))
        growth = (1 + rng.gamma(1, 300, k)).astype(int)
        growth[0] += 1500
        output = np.maximum(rng.gamma(2, 60, k), 1).astype(int)
        made.append((growth.tolist(), output.tolist(), rng.exponential(2.0, k).tolist()))
    return pack(made, shared)


@pytest.mark.parametrize(("n_blocks", "shared"), [(1200, 0), (1200, 512), (3000, 0)])
def test_long_runs_agree_under_pressure(n_blocks: int, shared: int) -> None:
    """Hundreds of calls on two engines, with thousands of evictions and some preemptions, agree to the last hit."""
    some, spec = agents(50, 5, shared=shared), VllmEngineSpec(num_gpu_blocks=n_blocks)
    by_block = run_by_block([VllmEngine(spec), VllmEngine(spec)], some, 24)
    assert 0.1 < by_block.hit_ratio < 0.95
    assert_equal(run_fast([spec, spec], some, 24, is_compiled=False), by_block)


@pytest.mark.skipif(not HAS_NUMBA, reason="the extra `sim` (numba) is not installed")
def test_compiled_code_does_the_same() -> None:
    """Machine code and plain Python give the same log, bit by bit."""
    some, spec = agents(120, 6, shared=512), VllmEngineSpec(num_gpu_blocks=1200)
    plain = run_fast([spec, spec], some, 24, is_compiled=False)
    assert_equal(run_fast([spec, spec], some, 24, is_compiled=True), plain, within_s=0.0)
    assert plain.n_preemptions > 0


def test_decisions_are_asked_for_and_runs_are_independent() -> None:
    """64 runs in lock-step ask for an engine per program; answers like the built-in rule give its result, others not.

    A copy of a run's memory is a fork: restored, it goes on from there again.
    """
    some, spec = agents(6, 7), VllmEngineSpec(num_gpu_blocks=1200)
    alone = run_fast([spec, spec], some, 6, is_compiled=False)
    runs = [FastRun([spec, spec], some, 6, decides=True, is_compiled=False) for _ in range(64)]
    asked = [run.advance() for run in runs]
    n_asked = 0
    while max(asked) >= 0:
        assert asked == [asked[0]] * 64
        # The built-in rule sends six programs that start at once to 0 and 1 in turn; the odd runs keep to 0.
        asked = [run.advance(choice=asked[0] % 2 if i % 2 == 0 else 0) for i, run in enumerate(runs)]
        n_asked += 1
    assert n_asked == len(some)
    assert_equal(runs[0].log(), alone, within_s=0.0)
    assert_equal(runs[2].log(), runs[0].log(), within_s=0.0)
    assert set(runs[1].log().engine.tolist()) == {0}


def test_a_copy_of_the_memory_is_a_fork() -> None:
    """Time stops where it is told to; a run that is set back does the same again."""
    some, spec = agents(6, 8), VllmEngineSpec(num_gpu_blocks=1200)
    run = FastRun([spec], some, 6, is_compiled=False)
    run.advance(until_s=5.0)
    assert 0 < run.now_s <= 5.0
    saved = run.memory.copy()
    run.advance()
    first = run.log()
    run.memory[:] = saved
    run.advance()
    assert_equal(run.log(), first, within_s=0.0)
    assert len(first) == some.n_calls


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n_state_groups": 3}, "n_state_groups"),
        ({"scheduling_policy": "priority"}, "fcfs"),
        ({"long_prefill_token_threshold": 100}, "long_prefill"),
        ({"max_num_batched_tokens": 256}, "max_num_seqs = 256"),
        ({"has_prefix_cache": False}, "prefix cache"),
        ({"num_gpu_blocks": 10}, "grows to"),
        ({"max_model_len": 500}, "an engine takes 500"),
    ],
)
def test_what_it_cannot_do_is_refused(changes: dict[str, object], named: str) -> None:
    """Settings and programs beyond the fast core are named; nothing is silently approximated."""
    with pytest.raises(ConfigError, match=named):
        FastRun([VllmEngineSpec(**changes)], agents(3, 1), 2)  # type: ignore[arg-type]


def test_bad_runs_are_refused() -> None:
    """No engines, no agents, start times that fall or are no numbers, a choice that does not exist."""
    some, spec = agents(3, 1), VllmEngineSpec()
    with pytest.raises(ConfigError, match="0 engines"):
        FastRun([], some, 2)
    with pytest.raises(ConfigError, match="n_agents"):
        FastRun([spec], some, 0)
    for bad in ([1.0, 0.5], [0.0, float("nan")], [-1.0, 0.0], [0.0]):
        with pytest.raises(ConfigError, match="start_s"):
            FastRun([spec], some, 2, start_s=np.array(bad))
    with pytest.raises(ConfigError, match="must agree"):
        FastRun([spec, VllmEngineSpec(block_size=32)], some, 2)
    run = FastRun([spec], some, 2, decides=True, is_compiled=False)
    run.advance()
    with pytest.raises(ConfigError, match="choice"):
        run.advance(choice=1)


@pytest.mark.parametrize(
    ("program", "named"),
    [
        (([0], [1], [0.0]), "growth_tokens"),
        (([5, -1], [1, 1], [0.0, 0.0]), "growth_tokens"),
        (([5], [0], [0.0]), "output_tokens"),
        (([5], [1], [float("nan")]), "gap_s"),
        (([5], [1], [-1.0]), "gap_s"),
        (([], [], []), "offsets"),
    ],
)
def test_programs_out_of_range_are_refused(program: tuple[list[int], list[int], list[float]], named: str) -> None:
    """Empty prompts and answers, negative or missing gaps, programs without turns."""
    with pytest.raises(ConfigError, match=named):
        pack([program])
