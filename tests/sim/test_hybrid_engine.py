"""The compiled engine for hybrid models against the block-level reference: the same, token by token and bit by bit."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import loadwise
from loadwise.kernel.errors import ConfigError, LawBroken, Overloaded
from loadwise.kernel.streams import Streams
from loadwise.sim import hybrid_state as at
from loadwise.sim.compiled import HAS_NUMBA
from loadwise.sim.engine import ContextTooLong, EngineRequest
from loadwise.sim.hybrid_engine import HybridEngine, fits_hybrid
from loadwise.sim.hybrid_pool import find_block, name_block, unname_block
from loadwise.sim.programs import CallLog, run_by_block
from loadwise.sim.scenario import Scenario, open_engine, parse_scenario, preset_workload
from loadwise.sim.simulate import is_worth_compiling, simulate
from loadwise.sim.step_time import StepCost
from loadwise.sim.vllm_engine import VllmEngine, VllmEngineSpec
from loadwise.sim.workload import Workload

from .engine_driver import drive
from .vllm_requests import QUICK, Ask, asks, most_tokens, script

STEPS = [
    QUICK,
    StepCost(fixed_s=0.011, host_s=0.05, host_s_per_request=1.3e-3, kv_s_per_token=2e-6, scan_s_per_token=1e-5),
    StepCost(fixed_s=0.01, host_s=0.003, is_host_overlapped=False, expert_weights_s=0.01, expert_ratio=0.3),
]

specs = st.builds(
    VllmEngineSpec,
    num_gpu_blocks=st.integers(24, 60),
    block_size=st.just(8),
    n_state_groups=st.integers(0, 3),
    step=st.sampled_from(STEPS),
    max_num_seqs=st.sampled_from([2, 3, 16]),
    max_num_batched_tokens=st.sampled_from([32, 64, 1024]),
    long_prefill_token_threshold=st.sampled_from([0, 24]),
    scheduler_reserve_full_isl=st.booleans(),
    watermark_ratio=st.sampled_from([0.0, 0.05]),
)


@settings(max_examples=100, deadline=None)
@given(
    turns=asks,
    spec=specs,
    is_patient=st.booleans(),
    has_macro_steps=st.booleans(),
    tick_s=st.sampled_from([math.inf, math.inf, 0.1]),
)
def test_it_is_the_reference(
    turns: list[Ask], spec: VllmEngineSpec, is_patient: bool, has_macro_steps: bool, tick_s: float
) -> None:
    """Law: any requests, cancelled or edited, any limits: equal tokens, hits, counters and instants, to the last bit.

    After every call the books of both balance, and they hold equally many blocks.
    """
    made = script(turns, most_tokens(spec), is_patient=is_patient)
    one = VllmEngine(spec, has_macro_steps=has_macro_steps)
    other = HybridEngine(spec, has_macro_steps=has_macro_steps, is_compiled=False)
    tick_s = math.inf if is_patient else tick_s  # whose turns are minutes apart
    runs = [drive(engine, made.arrivals, made.cancels, tick_s=tick_s) for engine in (one, other)]
    assert repr(runs[0]) == repr(runs[1])
    assert one.signals(1e9) == other.signals(1e9)
    assert one.cache.pool.n_free == other.memory[at.N_FREE] == spec.n_blocks


def named(i: int, prompt: int, ids: tuple[int, ...]) -> EngineRequest:
    return EngineRequest(request_id=i, program_id=f"p{i}", prompt_tokens=prompt, output_tokens=40, prefix_ids=ids)


def test_blocks_that_a_trace_names_are_found() -> None:
    """Names of a trace, far above the engine's own, are told apart and hit as in the reference."""
    spec = VllmEngineSpec(num_gpu_blocks=40, block_size=256, n_state_groups=3, step=QUICK)
    large = (1 << 30) - 1
    prompts = [(1100, (large, 5)), (1500, (large, 5, 8)), (1500, (4, 5, 8)), (1500, (large - 1, 5))]
    arrivals = [(10.0 * i, named(i, n, ids)) for i, (n, ids) in enumerate(prompts)]
    one, other = (drive(engine, arrivals) for engine in (VllmEngine(spec), HybridEngine(spec, is_compiled=False)))
    assert one == other
    assert [one[i].cached_tokens for i in range(4)] == [0, 1024, 0, 0]


def test_lines_and_calls_find_room() -> None:
    """More open calls, and conversations edited more often, than there was room for at first."""
    spec = VllmEngineSpec(num_gpu_blocks=400, block_size=8, n_state_groups=2, step=QUICK)
    arrivals: list[tuple[float, EngineRequest]] = []
    for i in range(700):
        arrivals.append((0.001 * i, EngineRequest(request_id=i, program_id=f"p{i}", prompt_tokens=30, output_tokens=9)))
    for k in range(40):
        request = EngineRequest(
            request_id=1000 + k,
            program_id="edited",
            prompt_tokens=60 + 8 * k,
            output_tokens=4,
            prefix_tokens=50 + 8 * k,
        )
        arrivals.append((1000.0 + 10 * k, request))
    one, other = (
        drive(engine, arrivals, checks=False) for engine in (VllmEngine(spec), HybridEngine(spec, is_compiled=False))
    )
    assert one == other


lines = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=3).map(
    lambda runs: ((0, 1), *((sum(n for n, _ in runs[: i + 1]), origin) for i, (_, origin) in enumerate(runs)))
)


@settings(max_examples=60, deadline=None)
@given(
    asked=st.lists(
        st.tuples(lines, st.integers(1, 120), st.integers(1, 20), st.sampled_from([0.0, 0.02, 1.0])), min_size=2
    ),
    spec=specs,
)
def test_prompts_told_by_their_content_are_found(
    asked: list[tuple[tuple[tuple[int, int], ...], int, int, float]], spec: VllmEngineSpec
) -> None:
    """Law: lines as the emulator tells them (forks, common beginnings), at any token, hit as in the reference."""
    arrivals, now_s = [], 0.0
    for i, (line, prompt, output, gap_s) in enumerate(asked):
        now_s += gap_s
        request = EngineRequest(
            request_id=i, program_id=f"p{i % 5}", prompt_tokens=prompt, output_tokens=output, line=line
        )
        arrivals.append((now_s, request))
    one, other = VllmEngine(spec), HybridEngine(spec, is_compiled=False)
    assert repr(drive(one, arrivals)) == repr(drive(other, arrivals))
    assert one.signals(1e9) == other.signals(1e9)


def assert_same(log: CallLog, other: CallLog) -> None:
    """Two logs are equal to the last bit."""
    for name in CallLog.__struct_fields__:
        assert np.array_equal(getattr(log, name), getattr(other, name)), name


@pytest.mark.parametrize("n_blocks", [130, 400])
def test_programs_that_thrash(n_blocks: int) -> None:
    """Agents on a pool that is too small: thousands of evictions, preemptions, and not a bit of difference."""
    programs = Workload(preset_workload("terminus", {"kind": "closed", "n_agents": 1}), Streams(3)).programs(12)
    spec = VllmEngineSpec(num_gpu_blocks=n_blocks, block_size=528, n_state_groups=3)
    log = run_by_block([VllmEngine(spec)], programs, 8)
    assert 0 < log.hit_ratio < 0.99
    assert_same(run_by_block([HybridEngine(spec, is_compiled=False)], programs, 8), log)
    if HAS_NUMBA:
        assert_same(run_by_block([HybridEngine(spec, is_compiled=True)], programs, 8), log)


def pair(**changes: Any) -> Scenario:
    """Two hybrid models, one of them failing for a while, with impatient clients."""
    text = """
scenario: 1
name: pair
n_programs: 14
pool:
  models: {large: {usd_per_million: {input: 1, output: 2}}, small: {}}
  backends: [{name: a, model: large, engine: vllm}, {name: b, model: small, engine: vllm}]
engines:
  a: {kind: vllm, hardware: {gpu: gh200, model: qwen3.6-27b, precision: fp8}}
  b: {kind: vllm, hardware: {gpu: gh200, model: qwen3.5-9b}}
workload: {preset: terminus, arrivals: {kind: closed, n_agents: 7}, turns: 9, patience_s: {exponential: 3}}
truth: {success: {large: {"*": 0.5}}}
verdicts: {delay_s: {exponential: 20}}
failures:
  - {at_s: 30, backend: a, kind: crash, for_s: 20}
  - {at_s: 60, backend: b, kind: slow, for_s: 30}
"""
    return msgspec.structs.replace(parse_scenario(text), **changes)


@pytest.mark.skipif(not HAS_NUMBA, reason="the extra `sim` (numba) is not installed")
@pytest.mark.parametrize("model", ["qwen3.5-9b", "qwen3-8b"])
def test_a_world_gives_the_same_bytes(model: str) -> None:
    """Through router, failures and cancellations: compiled engines and the reference report equal bytes."""
    scenario = pair()
    small = msgspec.convert({"kind": "vllm", "hardware": {"gpu": "h100", "model": model}}, VllmEngineSpec)
    scenario = msgspec.structs.replace(scenario, engines=scenario.engines | {"b": small})
    report = simulate(scenario, 5, is_compiled=False)
    assert simulate(scenario, 5, is_compiled=True).to_json() == report.to_json()
    assert report.programs.get("cancelled", 0) + report.turns["cancelled"] > 0
    assert isinstance(open_engine(scenario.engines["a"], Streams(0), "a", is_compiled=True), HybridEngine)


def test_long_runs_are_compiled_unasked() -> None:
    """Where nothing is said: with a vLLM engine, and a hundred programs or nobody knows how many."""
    scenario = pair()
    assert not is_worth_compiling(scenario)
    assert is_worth_compiling(msgspec.structs.replace(scenario, n_programs=100))
    assert is_worth_compiling(msgspec.structs.replace(scenario, n_programs=None, until_s=9.0))
    assert not is_worth_compiling(msgspec.structs.replace(scenario, n_programs=100, engines={}))


@pytest.mark.parametrize(
    "changes",
    [
        {"scheduling_policy": "priority"},
        {"has_prefix_cache": False},
        {"num_gpu_blocks": 2_000_000},
    ],
)
def test_what_it_cannot_take_stays_with_the_reference(changes: dict[str, Any]) -> None:
    """Other engines are refused by name, and opened as the reference."""
    spec = VllmEngineSpec(**{"block_size": 16, "n_state_groups": 3, **changes})
    assert not fits_hybrid(spec)
    with pytest.raises(ConfigError, match="hybrid core"):
        HybridEngine(spec)
    assert isinstance(open_engine(msgspec.structs.replace(spec, num_gpu_blocks=50), Streams(0), "a"), VllmEngine)


def test_what_can_never_fit_is_refused() -> None:
    """Empty requests, requests beyond the model's length or the pool, and a queue that is full."""
    spec = VllmEngineSpec(
        num_gpu_blocks=30, block_size=8, n_state_groups=3, step=QUICK, max_waiting=1, max_num_seqs=1, max_model_len=200
    )
    engine = HybridEngine(spec, is_compiled=False)

    def ask(i: int, prompt: int, output: int) -> EngineRequest:
        return EngineRequest(request_id=i, program_id="p", prompt_tokens=prompt, output_tokens=output)

    for prompt, output, story in ((0, 1, "each must be"), (199, 2, "max_model_len is 200"), (190, 8, "has 30")):
        with pytest.raises(ContextTooLong, match=story):
            engine.submit(ask(0, prompt, output))
    engine.submit(ask(1, 50, 9))
    with pytest.raises(Overloaded, match="limit is 1"):
        engine.submit(ask(2, 50, 9))
    assert not engine.cancel(2)
    assert engine.cancel(1)
    engine.check()
    assert engine.step(0.0).seconds == 0.0


@pytest.mark.parametrize("what", [at.USERS, at.N_FREE, at.N_WAITING])
def test_books_that_do_not_balance_are_found(what: int) -> None:
    """A spoilt count of users, of free blocks or of waiting calls is noticed."""
    engine = HybridEngine(VllmEngineSpec(num_gpu_blocks=30, block_size=8, n_state_groups=3), is_compiled=False)
    engine.check()
    engine.memory[what if what != at.USERS else engine.memory[at.BLOCKS] + at.USERS] += 1
    with pytest.raises(LawBroken):
        engine.check()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 5), st.integers(0, 3), st.integers(0, 1)), max_size=60))
def test_the_table_of_names_is_a_dictionary_of_lists(todo: list[tuple[int, int, int, int]]) -> None:
    """Naming and forgetting in any order: the first named block of those left is found, across collisions."""
    engine = HybridEngine(VllmEngineSpec(num_gpu_blocks=12, block_size=8, n_state_groups=1), is_compiled=False)
    m = engine._m
    m[at.TABLE_MASK] = 15
    known: dict[int, list[int]] = {}
    names: dict[int, int] = {}
    for i, origin, k, group in todo:
        block = m[at.BLOCKS] + at.N_BLOCK * i
        if block in names:
            unname_block(m, block)
            known[names.pop(block)].remove(block)
        else:
            # Origins 16 apart begin their search at the same place.
            name = (((16 * origin + 1) << at.BLOCK_BITS) | k) << at.GROUP_BITS | group
            name_block(m, block, name)
            known.setdefault(name, []).append(block)
            names[block] = name
        for name, blocks in known.items():
            assert find_block(m, name) == (blocks[0] if blocks else 0)


def test_numba_is_imported_only_when_asked_for() -> None:
    """Reading and running a scenario does not pay for a compiler that it does not use."""
    code = "import sys, loadwise.sim.simulate, loadwise.sim.scenario; sys.exit('numba' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(loadwise.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
