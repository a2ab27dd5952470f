"""The engine against queueing theory, where a choice of constants makes it a station that theory knows.

Means over independent replications; an estimate must lie within three standard errors of theory, and the standard error
itself must be small, so that the comparison can fail. What is known about a replication's own input (its mean gap, its
mean and mean squared service) serves as control variates. References: L. Kleinrock, Queueing Systems I (1975), eq. 5.69
(P-K) and section 3.7 (M/M/1//N); J. D. C. Little, Operations Research 9 (1961); A. M. Law, Simulation Modeling and
Analysis (2015), section 11.4.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .compiled import HAS_NUMBA
from .engine import EngineRequest
from .fast_run import run_fast
from .programs import Programs
from .step_time import StepCost
from .vllm_engine import VllmEngine, VllmEngineSpec

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
Sample = tuple[float, ...]
N_RUNS = 42 if HAS_NUMBA else 10
N_CALLS = 20_000 if HAS_NUMBA else 6_000
MOST_ERROR = 0.005 if HAS_NUMBA else 0.08
"""Standard error that is aimed at, relative; without a compiler fewer calls must do."""
MEAN_TOKENS = 200.0


class Law(NamedTuple):
    """One estimate beside what theory says."""

    key: str
    theory: float
    found: float
    standard_error: float
    scale: float
    """What the standard error is measured against."""
    slack: float = 0.0
    """By how much a whole token, the least that can be shared out, may move the figure."""

    @property
    def low(self) -> float:
        """Three standard errors below theory."""
        return self.theory - 3 * self.standard_error - self.slack

    @property
    def high(self) -> float:
        """Three standard errors above theory."""
        return self.theory + 3 * self.standard_error + self.slack

    @property
    def relative_error(self) -> float:
        """Standard error, relative."""
        return self.standard_error / self.scale


def estimate(samples: list[Sample]) -> tuple[float, float]:
    """Mean and standard error of replications, each a value and controls whose means are known to be 0."""
    rows = np.array(samples)
    design = np.column_stack([np.ones(len(rows)), rows[:, 1:]])
    fit, *_ = np.linalg.lstsq(design, rows[:, 0], rcond=None)
    left = rows[:, 0] - design @ fit
    variance = float(left @ left) / (len(rows) - design.shape[1])
    return float(fit[0]), math.sqrt(variance * np.linalg.inv(design.T @ design)[0, 0])


def fixed(rng: np.random.Generator, n: int) -> npt.NDArray[np.int64]:
    """Always 200 tokens."""
    return np.full(n, 200, dtype=np.int64)


def two_kinds(rng: np.random.Generator, n: int) -> npt.NDArray[np.int64]:
    """Mostly short, some long: squared coefficient of variation 2.25."""
    return np.where(rng.random(n) < 0.9, 100, 1100).astype(np.int64)


def geometric(rng: np.random.Generator, n: int) -> npt.NDArray[np.int64]:
    """Memoryless in ticks."""
    return rng.geometric(1 / 200, n).astype(np.int64)


class Service(NamedTuple):
    """How long answers are."""

    draw: Draw
    square: float
    """Mean squared tokens; the mean is `MEAN_TOKENS`."""
    n_times: int
    """Replications at high load, in multiples of `N_RUNS`: the more tokens vary, the more are needed."""


SERVICES = {
    "md1": Service(fixed, 200.0**2, 2),
    "mg1": Service(two_kinds, 0.9 * 100**2 + 0.1 * 1100**2, 7),
    "mgeo1": Service(geometric, 2 * 200**2 - 200, 4),
}
LOADS = (0.3, 0.6, 0.8)
STATIONS = {"fcfs": ONE, "ps": SHARED}
FINITE_SOURCES = (4, 10)


def single_calls(tokens: npt.NDArray[np.int64]) -> Programs:
    """Programs of one call each, whose prompt is one token."""
    n = len(tokens)
    return Programs(
        offsets=np.arange(n + 1, dtype=np.int64),
        growth_tokens=np.ones(n, dtype=np.int64),
        output_tokens=tokens,
        gap_s=np.zeros(n),
    )


def open_wait(kind: str, rho: float) -> Law:
    """Mean wait of a Poisson stream at one server: λE[S²]/(2(1-ρ)), as Pollaczek and Khinchine say."""
    service = SERVICES[kind]
    n_runs = N_RUNS * (1 if rho < 0.8 or not HAS_NUMBA else service.n_times)
    waits = [_open_wait_s(seed, rho, service) for seed in range(n_runs)]
    if service.draw is fixed:
        waits = [wait[:2] for wait in waits]
    found, error = estimate(waits)
    theory = rho / (MEAN_TOKENS * TICK_S) * service.square * TICK_S**2 / (2 * (1 - rho))
    # What a request feels is its whole stay; that is what the error is measured against.
    return Law(f"{kind}.load_{rho:g}.wait_s", theory, found, error, theory + MEAN_TOKENS * TICK_S)


def _open_wait_s(seed: int, rho: float, service: Service) -> Sample:
    """Mean wait until service, the first part left out; and controls."""
    rng = np.random.default_rng(seed)
    mean_gap_s = MEAN_TOKENS * TICK_S / rho
    programs = single_calls(service.draw(rng, N_CALLS))
    gaps = rng.exponential(mean_gap_s, N_CALLS)
    log = run_fast([ONE], programs, N_CALLS, start_s=np.cumsum(gaps))
    late = log.call >= N_CALLS // 20
    served = programs.output_tokens.astype(float)
    controls = (gaps.mean() / mean_gap_s - 1, served.mean() / MEAN_TOKENS - 1, (served**2).mean() / service.square - 1)
    # The first token comes one tick after service began.
    return float(np.mean((log.first_at_s - log.arrived_at_s)[late])) - TICK_S, *controls


def finite_source(station: str, n_agents: int, mean_s: float = 0.5, think_s: float = 2.0) -> Law:
    """Throughput of N agents is that of M/M/1//N, one at a time and shared equally."""
    rates = [_closed_rate(seed, STATIONS[station], n_agents, mean_s, think_s) for seed in range(N_RUNS)]
    found, error = estimate(rates)
    theory = finite_source_rate(n_agents, mean_s, think_s)
    return Law(f"mm1n.{station}.{n_agents}.calls_per_s", theory, found, error, theory, 2 * TICK_S * theory)


def _closed_rate(seed: int, spec: VllmEngineSpec, n_agents: int, mean_s: float, think_s: float) -> Sample:
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


class Balance(NamedTuple):
    """Both sides of two laws that hold exactly on a run that ends empty, read from the engine's signals."""

    area: float
    """Under N(t), the requests in the engine: request-seconds."""
    spent_s: float
    """Of all requests, from arrival to end. Little: equal to the area."""
    busy_s: float
    """With a request running."""
    served_s: float
    """Calls times service time. The utilisation law: equal to the busy time."""


def balance(seed: int = 2, n: int = 400) -> Balance:
    """Little's law and the utilisation law on one server."""
    rng = np.random.default_rng(seed)
    engine = VllmEngine(ONE)
    arrivals = np.cumsum(rng.exponential(0.25, n)).tolist()
    tokens = rng.geometric(1 / 200, n).tolist()
    i, now_s, wake_at_s, n_in, is_busy = 0, 0.0, math.inf, 0.0, False
    area = spent_s = busy_s = 0.0
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
        spent_s += sum(now_s - arrivals[out.request_id] for out in (*outputs, *step.outputs) if out.is_finished)
        wake_at_s = now_s + step.seconds if step.seconds else math.inf
        signals = engine.signals(now_s)
        n_in, is_busy = signals["n_running"] + signals["n_waiting"], signals["n_running"] > 0
    engine.check()
    return Balance(area, spent_s, busy_s, sum(tokens) * TICK_S)


def rates_over_kv(seed: int = 0, ratios: Iterable[float] = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.125)) -> list[float]:
    """Calls per second of one closed loop of agents while the KV pool shrinks: no cache may make less memory faster.

    Real engines and simulators that credit a preempted request with more than it computed break this law.
    """
    rng = np.random.default_rng(seed)
    n_programs, n_turns = 60, 12
    n = n_programs * n_turns
    growth = (1 + rng.gamma(1.0, 300, n)).astype(np.int64)
    growth[::n_turns] += 1500
    programs = Programs(
        offsets=np.arange(0, n + 1, n_turns, dtype=np.int64),
        growth_tokens=growth,
        output_tokens=np.maximum(rng.gamma(2.0, 60, n), 1).astype(np.int64),
        gap_s=rng.exponential(2.0, n),
    )
    totals = np.add.reduceat(programs.growth_tokens + programs.output_tokens, programs.offsets[:-1])
    least = -(-int(totals.max()) // 16)
    rates = []
    for ratio in ratios:
        spec = VllmEngineSpec(num_gpu_blocks=max(least, int(16 * least * ratio)))
        log = run_fast([spec], programs, 24)
        rates.append(len(log) / log.end_s)
    return rates
