"""The M/M/k station against queueing theory."""

import math
import statistics

import pytest

from loadwise.kernel.errors import ConfigError, Overloaded
from loadwise.kernel.streams import Streams
from loadwise.sim.engine import EngineRequest
from loadwise.sim.servers_engine import ServersEngine, ServersEngineSpec, erlang_c_wait_s

from .engine_driver import Seen, drive


def arrivals(seed: int, n: int, per_s: float) -> list[tuple[float, EngineRequest]]:
    """A Poisson stream."""
    rng = Streams(seed).at("test/arrivals", 0)
    at_s, found = 0.0, []
    for i in range(n):
        at_s += float(rng.exponential(1.0 / per_s))
        found.append((at_s, EngineRequest(request_id=i, program_id="", prompt_tokens=1, output_tokens=2, luck=i)))
    return found


def run(seed: int, n: int, per_s: float, k: int) -> tuple[ServersEngine, list[tuple[float, EngineRequest]], list[Seen]]:
    engine = ServersEngine(ServersEngineSpec(n_servers=k), Streams(seed), "x")
    stream = arrivals(seed, n, per_s)
    seen = drive(engine, stream, checks=False)
    return engine, stream, [seen[i] for i in range(n)]


@pytest.mark.parametrize(("per_s", "k"), [(0.7, 1), (1.4, 2), (3.2, 4)])
def test_mean_wait_is_erlang_c(per_s: float, k: int) -> None:
    """The mean wait of M/M/k lies within three standard errors of Erlang C over 12 independent long runs."""
    means = []
    for seed in range(12):
        _, stream, seen = run(seed, 4000, per_s, k)
        waits = [s.first_at_s - at for (at, _), s in zip(stream, seen, strict=True)]
        means.append(statistics.fmean(waits[400:]))
    error = statistics.stdev(means) / math.sqrt(len(means))
    assert abs(statistics.fmean(means) - erlang_c_wait_s(per_s, 1.0, k)) < 3 * error


def test_utilisation_is_offered_load_per_server() -> None:
    """Busy time per server and second is arrivals times service over servers, within three standard errors."""
    shares = []
    for seed in range(12):
        engine, _, seen = run(seed, 4000, 1.4, 2)
        end_at_s = max(s.finished_at_s for s in seen)
        shares.append(engine.signals(end_at_s)["busy_server_seconds"] / (2 * end_at_s))
    error = statistics.stdev(shares) / math.sqrt(len(shares))
    assert abs(statistics.fmean(shares) - 0.7) < 3 * error


def test_little_holds_exactly_on_a_run_that_ends_empty() -> None:
    """Time integral of the number in the station, read from signals, equals the sum of the times spent in it."""
    engine = ServersEngine(ServersEngineSpec(n_servers=2), Streams(3), "x")
    stream = arrivals(3, 500, 1.5)
    todo, now_s, wake_at_s, area, n_in, spent = list(stream), 0.0, math.inf, 0.0, 0.0, 0.0
    while todo or wake_at_s < math.inf:
        next_at_s = min(wake_at_s, todo[0][0] if todo else math.inf)
        area += n_in * (next_at_s - now_s)
        now_s = next_at_s
        if todo and todo[0][0] == now_s:
            engine.submit(todo.pop(0)[1])
        step = engine.step(now_s)
        spent += sum(now_s - stream[o.request_id][0] for o in step.outputs if o.is_finished)
        wake_at_s = now_s + step.seconds if step.seconds else math.inf
        signals = engine.signals(now_s)
        n_in = signals["n_running"] + signals["n_waiting"]
        engine.check()
    assert area == pytest.approx(spent, rel=1e-9)


def test_service_depends_on_luck_not_on_order() -> None:
    """Equal work meets equal service time, whatever else is there (common random numbers)."""
    one = EngineRequest(request_id=7, program_id="", prompt_tokens=1, output_tokens=1, luck=42)
    alone = drive(ServersEngine(ServersEngineSpec(), Streams(5), "x"), [(0.0, one)])
    other = EngineRequest(request_id=1, program_id="", prompt_tokens=1, output_tokens=1, luck=1)
    behind = drive(ServersEngine(ServersEngineSpec(), Streams(5), "x"), [(0.0, other), (0.0, one)])
    service_s = behind[7].finished_at_s - behind[7].first_at_s
    assert service_s == pytest.approx(alone[7].finished_at_s)


def test_cancel_frees_the_server() -> None:
    """A cancelled service ends at once, and the next request starts then."""
    engine = ServersEngine(ServersEngineSpec(mean_service_s=1e6), Streams(1), "x")
    requests = [EngineRequest(request_id=i, program_id="", prompt_tokens=1, output_tokens=1, luck=i) for i in (1, 2)]
    engine.submit(requests[0])
    engine.submit(requests[1])
    engine.step(0.0)
    assert engine.cancel(1)
    assert [o.request_id for o in engine.step(5.0).outputs] == [2]
    assert not engine.cancel(1)


def test_bad_specs_and_full_queues_are_refused() -> None:
    """No servers, no service time, or one waiting request too many."""
    with pytest.raises(ConfigError, match="n_servers"):
        ServersEngineSpec(n_servers=0)
    with pytest.raises(ConfigError, match="mean_service_s"):
        ServersEngineSpec(mean_service_s=math.inf)
    engine = ServersEngine(ServersEngineSpec(max_waiting=1), Streams(0), "x")
    engine.submit(EngineRequest(request_id=1, program_id="", prompt_tokens=1, output_tokens=1))
    with pytest.raises(Overloaded):
        engine.submit(EngineRequest(request_id=2, program_id="", prompt_tokens=1, output_tokens=1))


@pytest.mark.parametrize(("per_s", "k", "wait_s"), [(0.5, 1, 1.0), (0.9, 1, 9.0), (1.0, 2, 1 / 3), (1.4, 2, 0.960784)])
def test_erlang_c_known_values(per_s: float, k: int, wait_s: float) -> None:
    """Textbook values: rho/(1-rho) at one server, and M/M/2 in closed form rho²/(1-rho²)."""
    assert erlang_c_wait_s(per_s, 1.0, k) == pytest.approx(wait_s, rel=1e-5)


def test_erlang_c_beyond_capacity_is_infinite() -> None:
    """An overloaded station has no mean wait."""
    assert erlang_c_wait_s(2.0, 1.0, 2) == math.inf
