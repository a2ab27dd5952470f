"""The engine against queueing theory, where a choice of constants makes it a station that theory knows.

Means over independent replications; an estimate must lie within three standard errors of theory, and the standard error
itself must be small, so that the test can fail. What is known about a replication's own input (its mean gap, its mean
and mean squared service) serves as control variates. References: L. Kleinrock, Queueing Systems I (1975), eq. 5.69
(P-K) and section 3.7 (M/M/1//N); J. D. C. Little, Operations Research 9 (1961); A. M. Law, Simulation Modeling and
Analysis (2015), section 11.4.
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from loadwise.sim.compiled import HAS_NUMBA
from loadwise.sim.engine import EngineRequest
from loadwise.sim.fast_run import run_fast
from loadwise.sim.programs import Programs
from loadwise.sim.step_time import StepCost
from loadwise.sim.vllm_engine import VllmEngine, VllmEngineSpec

TICK_S = 1e-3
ZERO = StepCost(fixed_s=TICK_S, weights_s=0, gemm_s_per_token=0, kv_s_per_token=0, attention_s_per_pair=0, request_s=0)
"""A step takes a tick, so a request of n tokens takes n ticks when it is alone."""
ONE = VllmEngineSpec(num_gpu_blocks=4000, step=ZERO, max_num_seqs=1)
SHARED = VllmEngineSpec(
    num_gpu_blocks=4000,
    step=StepCost(
        fixed_s=0, weights_s=0, gemm_s_per_token=0, kv_s_per_token=0, attention_s_per_pair=0, request_s=TICK_S
    ),
)
"""A step takes a tick per request, so all that run share the engine equally."""

Draw = Callable[[np.random.Generator, int], npt.NDArray[np.int64]]
N_RUNS = 42 if HAS_NUMBA else 10
N_CALLS = 20_000 if HAS_NUMBA else 6_000
MOST_ERROR = 0.005 if HAS_NUMBA else 0.08
"""Standard error that is aimed at; without a compiler fewer calls must do."""


def estimate(samples: list[tuple[float, ...]]) -> tuple[float, float]:
    """Mean and standard error of replications, each a value and controls whose means are known to be 0."""
    rows = np.array(samples)
    design = np.column_stack([np.ones(len(rows)), rows[:, 1:]])
    fit, *_ = np.linalg.lstsq(design, rows[:, 0], rcond=None)
    left = rows[:, 0] - design @ fit
    variance = float(left @ left) / (len(rows) - design.shape[1])
    return float(fit[0]), math.sqrt(variance * np.linalg.inv(design.T @ design)[0, 0])


def open_wait_s(seed: int, rho: float, draw: Draw, mean_tokens: float, square: float) -> tuple[float, ...]:
    """Mean wait until service of a Poisson stream at one server, the first part left out; and controls."""
    rng = np.random.default_rng(seed)
    mean_s = mean_tokens * TICK_S
    programs = Programs(
        offsets=np.arange(N_CALLS + 1, dtype=np.int64),
        growth_tokens=np.ones(N_CALLS, dtype=np.int64),
        output_tokens=draw(rng, N_CALLS),
        gap_s=np.zeros(N_CALLS),
    )
    gaps = rng.exponential(mean_s / rho, N_CALLS)
    log = run_fast([ONE], programs, N_CALLS, start_s=np.cumsum(gaps))
    late = log.call >= N_CALLS // 20
    served = programs.output_tokens.astype(float)
    controls = (gaps.mean() / (mean_s / rho) - 1, served.mean() / mean_tokens - 1, (served**2).mean() / square - 1)
    # The first token comes one tick after service began.
    return float(np.mean((log.first_at_s - log.arrived_at_s)[late])) - TICK_S, *controls


def fixed(rng: np.random.Generator, n: int) -> npt.NDArray[np.int64]:
    """Always 200 tokens."""
    return np.full(n, 200, dtype=np.int64)


def two_kinds(rng: np.random.Generator, n: int) -> npt.NDArray[np.int64]:
    """Mostly short, some long: squared coefficient of variation 2.25."""
    return np.where(rng.random(n) < 0.9, 100, 1100).astype(np.int64)


def geometric(rng: np.random.Generator, n: int) -> npt.NDArray[np.int64]:
    """Memoryless in ticks."""
    return rng.geometric(1 / 200, n).astype(np.int64)


@pytest.mark.parametrize("rho", [0.3, 0.6, 0.8])
@pytest.mark.parametrize(
    ("draw", "mean", "square"),
    [(fixed, 200.0, 200.0**2), (two_kinds, 200.0, 0.9 * 100**2 + 0.1 * 1100**2), (geometric, 200.0, 2 * 200**2 - 200)],
    ids=["M/D/1", "M/G/1", "M/Geo/1"],
)
def test_one_server_waits_as_pollaczek_and_khinchine_say(rho: float, draw: Draw, mean: float, square: float) -> None:
    """Mean wait λE[S²]/(2(1-ρ)) with one request at a time, for constant, two-valued and memoryless answers."""
    n_runs = N_RUNS * (1 if rho < 0.8 or not HAS_NUMBA else {fixed: 2, two_kinds: 7, geometric: 4}[draw])
    waits = [open_wait_s(seed, rho, draw, mean, square) for seed in range(n_runs)]
    if draw is fixed:
        waits = [(wait, gap) for wait, gap, _, _ in waits]
    found, error = estimate(waits)
    rate = rho / (mean * TICK_S)
    theory = rate * square * TICK_S**2 / (2 * (1 - rho))
    # What a request feels is its whole stay; that is what the error is measured against.
    stay = theory + mean * TICK_S
    assert error / stay <= MOST_ERROR
    assert abs(found - theory) <= 3 * error


def closed_rate(seed: int, spec: VllmEngineSpec, n_agents: int, mean_s: float, think_s: float) -> tuple[float, ...]:
    """Calls per second of a closed loop with exponential service and thinking, the first tenth left out."""
    rng = np.random.default_rng(seed)
    n = N_CALLS // n_agents
    programs = Programs(
        offsets=np.arange(0, n * n_agents + 1, n, dtype=np.int64),
        growth_tokens=np.ones(n * n_agents, dtype=np.int64),
        output_tokens=rng.geometric(TICK_S / mean_s, n * n_agents).astype(np.int64),
        gap_s=rng.exponential(think_s, n * n_agents),
    )
    spec = VllmEngineSpec(num_gpu_blocks=n * 2000, step=spec.step, max_num_seqs=spec.max_num_seqs)
    log = run_fast([spec], programs, n_agents, max_calls=n * n_agents // 2)
    begin_s = log.end_s / 10
    done = np.zeros(n * n_agents, dtype=bool)
    done[log.call] = True
    served, thought = programs.output_tokens[done].mean() * TICK_S / mean_s, programs.gap_s[done].mean() / think_s
    return float((log.finished_at_s > begin_s).sum() / (log.end_s - begin_s)), served - 1, thought - 1


def finite_source_rate(n: int, mean_s: float, think_s: float) -> float:
    """Throughput of M/M/1//N, the same for one at a time and for equal sharing."""
    weights = [math.perm(n, k) * (mean_s / think_s) ** k for k in range(n + 1)]
    return (1 - weights[0] / sum(weights)) / mean_s


@pytest.mark.parametrize(("n_agents", "mean_s", "think_s"), [(4, 0.5, 2.0), (10, 0.5, 2.0)])
@pytest.mark.parametrize("spec", [ONE, SHARED], ids=["FCFS", "PS"])
def test_a_closed_loop_is_the_finite_source_queue(
    spec: VllmEngineSpec, n_agents: int, mean_s: float, think_s: float
) -> None:
    """Throughput of N agents is that of M/M/1//N, one at a time and with steps in proportion to the batch."""
    rates = [closed_rate(seed, spec, n_agents, mean_s, think_s) for seed in range(N_RUNS)]
    found, error = estimate(rates)
    theory = finite_source_rate(n_agents, mean_s, think_s)
    assert error / theory <= MOST_ERROR
    # Two ticks in a thousand: a whole token is the least that can be shared out.
    assert abs(found - theory) <= 3 * error + 2 * TICK_S * theory


def test_equal_steps_without_a_limit_are_a_delay() -> None:
    """If a step takes a tick whatever runs, nobody feels anybody: each answer takes its own tokens in ticks."""
    rng = np.random.default_rng(1)
    n = 2000
    programs = Programs(
        offsets=np.arange(n + 1, dtype=np.int64),
        growth_tokens=np.ones(n, dtype=np.int64),
        output_tokens=rng.geometric(1 / 100, n).astype(np.int64),
        gap_s=np.zeros(n),
    )
    starts = np.cumsum(rng.exponential(0.01, n))
    log = run_fast([VllmEngineSpec(num_gpu_blocks=400_000, step=ZERO)], programs, n, start_s=starts)
    late = log.finished_at_s - log.arrived_at_s - log.output_tokens * TICK_S
    assert late.min() >= -1e-9
    # At most the step that was in progress on arrival.
    assert late.max() <= TICK_S + 1e-9


def test_little_and_the_utilisation_law_hold_exactly() -> None:
    """On a run that ends empty, read from the engine's signals: area under N(t) = time spent; busy time = X S."""
    rng = np.random.default_rng(2)
    engine = VllmEngine(ONE)
    arrivals = np.cumsum(rng.exponential(0.25, 400)).tolist()
    tokens = rng.geometric(1 / 200, 400).tolist()
    i, now_s, wake_at_s, n_in, is_busy = 0, 0.0, math.inf, 0.0, False
    area = spent = busy_s = 0.0
    while i < len(arrivals) or wake_at_s < math.inf:
        next_at_s = min(wake_at_s, arrivals[i] if i < len(arrivals) else math.inf)
        area += n_in * (next_at_s - now_s)
        busy_s += is_busy * (next_at_s - now_s)
        now_s = next_at_s
        outputs = engine.step(now_s).outputs
        if i < len(arrivals) and arrivals[i] == now_s:
            engine.submit(EngineRequest(request_id=i, program_id=f"p{i}", prompt_tokens=1, output_tokens=tokens[i]))
            i += 1
        step = engine.step(now_s)
        spent += sum(now_s - arrivals[out.request_id] for out in (*outputs, *step.outputs) if out.is_finished)
        wake_at_s = now_s + step.seconds if step.seconds else math.inf
        signals = engine.signals(now_s)
        n_in, is_busy = signals["n_running"] + signals["n_waiting"], signals["n_running"] > 0
    assert area == pytest.approx(spent, rel=1e-9)
    assert busy_s == pytest.approx(sum(tokens) * TICK_S, rel=1e-6)


@pytest.mark.parametrize(("rho", "is_stable"), [(0.9, True), (1.3, False)])
def test_the_queue_is_stable_below_capacity_and_grows_above(rho: float, is_stable: bool) -> None:
    """Above capacity the wait grows in proportion to time, at the rate 1 - 1/ρ; below it stays bounded."""
    rng = np.random.default_rng(3)
    n = 6000
    programs = Programs(
        offsets=np.arange(n + 1, dtype=np.int64),
        growth_tokens=np.ones(n, dtype=np.int64),
        output_tokens=fixed(rng, n),
        gap_s=np.zeros(n),
    )
    starts = np.cumsum(rng.exponential(0.2 / rho, n))
    log = run_fast([ONE], programs, n, start_s=starts)
    last_wait_s = float((log.first_at_s - log.arrived_at_s)[-50:].mean())
    if is_stable:
        assert last_wait_s < 20.0
    else:
        assert last_wait_s == pytest.approx((rho - 1) / rho * log.end_s, rel=0.05)
