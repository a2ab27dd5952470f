"""Property test: whatever the world does, the pool's own stack keeps the laws that the world checks."""

from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadwise.kernel.commands import Command
from loadwise.kernel.events import Event
from loadwise.sim.scenario import Scenario
from loadwise.sim.simulate import simulate

N_PROGRAMS = 25


class Lines:
    """A journal in memory, as bytes."""

    def __init__(self) -> None:
        self.data = bytearray()

    def append(self, event: Event, commands: list[Command]) -> None:
        self.data += msgspec.json.encode((event, commands))

    def flush(self) -> None:
        return None


failures = st.lists(
    st.fixed_dictionaries(
        {
            "at_s": st.floats(0, 60),
            "backend": st.sampled_from("abc"),
            "kind": st.sampled_from(["crash", "hang", "slow"]),
            "for_s": st.floats(0.5, 60),
        }
    ),
    max_size=3,
    unique_by=lambda failure: failure["backend"],
)
arrivals = st.one_of(
    st.builds(lambda rate: {"kind": "poisson", "programs_per_s": rate}, st.floats(0.05, 20)),
    st.builds(lambda n: {"kind": "closed", "n_agents": n}, st.integers(1, 12)),
)
capacities = st.one_of(
    st.builds(lambda n: {"slots": n}, st.integers(1, 6)),
    st.builds(lambda n: {"kv_tokens": n}, st.integers(3000, 40_000)),
    st.builds(lambda n: {"requests_per_minute": n}, st.integers(5, 600)),
    st.just({}),
)
policies = st.sampled_from(["linucb", "random", "round_robin", "least_loaded", "power_of_two", "lints"])


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    limits = {"first_byte_timeout_s": 20.0, "idle_timeout_s": 10.0}
    backends = [
        {"name": name, "model": model} | limits | draw(capacities)
        for name, model in zip("abc", ("large", "small", "large"), strict=True)
    ]
    engine = {"kind": "simple", "slots": draw(st.integers(1, 8)), "kv_tokens": draw(st.integers(6000, 60_000))}
    document: dict[str, Any] = {
        "scenario": 1,
        "name": "law",
        "n_programs": N_PROGRAMS,
        "max_events": 100_000,
        "pool": {
            "models": {"large": {"usd_per_million": {"input": 1.0}}, "small": {}},
            "backends": backends,
            "router": {"policy": draw(policies), "hold_max_s": draw(st.sampled_from([2.0, 60.0]))},
        },
        "engines": dict.fromkeys("abc", engine),
        "workload": {
            "arrivals": draw(arrivals),
            "turns": {"geometric": draw(st.floats(1, 5)), "max": 10},
            "first_prompt_tokens": {"exponential": 1500},
            "ends": draw(st.sampled_from(["finish", "final"])),
            "patience_s": draw(st.none() | st.just({"exponential": 10.0})),
            "budget_s": draw(st.none() | st.just(30.0)),
            "context_limit_tokens": 5900,
        },
        "verdicts": {
            "source": "agent",
            "delay_s": {"exponential": 20},
            "loss_ratio": 0.2,
            "duplicate_ratio": 0.3,
            "abstain_ratio": 0.1,
        },
        "signals": {"every_s": draw(st.sampled_from([0.0, 1.0])), "delay_s": draw(st.sampled_from([0.0, 3.0]))},
        "failures": draw(failures),
    }
    return msgspec.convert(document, Scenario)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenario=scenarios(), seed=st.integers(0, 2**32))
def test_the_stack_keeps_the_laws_in_any_world(scenario: Scenario, seed: int) -> None:
    """L1, L2, L4, L5, L9, L15 are checked by machine, engines and world in every run; L6 by running twice.

    Every program comes to an end, because every wait has a bound.
    """
    journals = (Lines(), Lines())
    reports = [simulate(scenario, seed, journal=journal).to_json() for journal in journals]
    assert journals[0].data == journals[1].data
    assert reports[0] == reports[1]
    programs = msgspec.json.decode(reports[0])["programs"]
    assert programs.pop("open") == 0
    assert sum(programs.values()) == N_PROGRAMS


def test_a_rate_limited_backend_that_is_down_does_not_spin_the_timer() -> None:
    """Turns are held for a backend whose rate window empties while it is down: time goes on, and the run ends."""
    document: dict[str, Any] = {
        "scenario": 1,
        "name": "rate-window",
        "n_programs": 20,
        "max_events": 5000,
        "pool": {
            "models": {"m": {}},
            "backends": [{"name": "a", "model": "m", "requests_per_minute": 5}],
            "router": {"policy": "random"},
        },
        "workload": {"arrivals": {"kind": "poisson", "programs_per_s": 5.0}, "ends": "final"},
        "failures": [{"at_s": 30.0, "backend": "a", "kind": "crash", "for_s": 60.0}],
    }
    report = simulate(msgspec.convert(document, Scenario), 1)
    assert report.programs["open"] == 0
