"""The engine against queueing theory (`sim.queueing`): estimates within three standard errors, and those small."""

import numpy as np
import pytest

from loadwise.sim.fast_run import run_fast
from loadwise.sim.programs import Programs
from loadwise.sim.queueing import (
    FINITE_SOURCES,
    LOADS,
    MOST_ERROR,
    ONE,
    SERVICES,
    STATIONS,
    TICK_S,
    ZERO,
    Law,
    balance,
    estimate,
    finite_source,
    fixed,
    open_wait,
    rates_over_kv,
)
from loadwise.sim.vllm_engine import VllmEngineSpec


def assert_lawful(law: Law) -> None:
    """Theory is met, by an estimate that could have missed it."""
    assert law.relative_error <= MOST_ERROR
    assert law.low <= law.found <= law.high


@pytest.mark.parametrize("rho", LOADS)
@pytest.mark.parametrize("kind", SERVICES)
def test_one_server_waits_as_pollaczek_and_khinchine_say(kind: str, rho: float) -> None:
    """Mean wait λE[S²]/(2(1-ρ)) with one request at a time, for constant, two-valued and memoryless answers."""
    assert_lawful(open_wait(kind, rho))


@pytest.mark.parametrize("n_agents", FINITE_SOURCES)
@pytest.mark.parametrize("station", STATIONS)
def test_a_closed_loop_is_the_finite_source_queue(station: str, n_agents: int) -> None:
    """Throughput of N agents is that of M/M/1//N, one at a time and with steps in proportion to the batch."""
    assert_lawful(finite_source(station, n_agents))


def test_an_estimate_off_by_five_percent_is_seen() -> None:
    """A wrong law is refused: the same estimate beside a theory that is 5 % higher lies outside its band."""
    law = finite_source("fcfs", 4)
    wrong = law._replace(theory=1.05 * law.theory)
    assert not wrong.low <= wrong.found <= wrong.high


def test_controls_leave_the_mean_and_shrink_the_error() -> None:
    """A value that is its control plus a constant is known exactly; without the control it is not."""
    noise = np.random.default_rng(0).normal(size=50)
    with_control = estimate([(3.0 + x, x) for x in noise.tolist()])
    assert with_control[0] == pytest.approx(3.0)
    assert with_control[1] < 1e-9 < estimate([(3.0 + x,) for x in noise.tolist()])[1]


@pytest.mark.parametrize("seed", range(3))
def test_less_kv_is_never_faster(seed: int) -> None:
    """Throughput of one closed loop does not rise while its KV pool shrinks to an eighth, and falls by half in all."""
    rates = rates_over_kv(seed)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.55 * rates[0]


def test_little_and_the_utilisation_law_hold_exactly() -> None:
    """On a run that ends empty, read from the engine's signals: area under N(t) = time spent; busy time = X S."""
    both = balance()
    assert both.area == pytest.approx(both.spent_s, rel=1e-9)
    assert both.busy_s == pytest.approx(both.served_s, rel=1e-6)


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
