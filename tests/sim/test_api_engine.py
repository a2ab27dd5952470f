"""A paid API: latencies that do not depend on load, limits that are kept, prefixes that expire."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.events import AttemptEnded
from loadwise.sim.api_engine import ApiEngine, ApiEngineSpec, RateLimited
from loadwise.sim.engine import ContextTooLong, EngineRequest
from loadwise.sim.scenario import parse_scenario
from loadwise.sim.simulate import simulate

from .direct_machine import DirectMachine
from .engine_driver import drive


def request(i: int, prompt: int = 100, output: int = 11, program: str = "") -> EngineRequest:
    return EngineRequest(request_id=i, program_id=program or f"p{i}", prompt_tokens=prompt, output_tokens=output)


@given(at_s=st.lists(st.floats(0, 5), min_size=1, max_size=12), tick_s=st.floats(0.01, 2.0))
def test_nobody_feels_anybody(at_s: list[float], tick_s: float) -> None:
    """Law: each call takes first_token_s and its own tokens, however many there are and however often one looks."""
    spec = ApiEngineSpec(first_token_s=0.5, tokens_per_s=20.0)
    for tick in (math.inf, tick_s):
        seen = drive(ApiEngine(spec), [(at, request(i)) for i, at in enumerate(at_s)], tick_s=tick)
        for i, at in enumerate(at_s):
            assert seen[i].n_tokens == 11
            assert seen[i].first_at_s == pytest.approx(at + 0.5, abs=1e-6)
            assert seen[i].finished_at_s == pytest.approx(at + 1.0, abs=1e-6)


def test_limits_hold_over_a_sliding_minute() -> None:
    """The third request of a minute is refused, says when to come again, and is taken then."""
    engine = ApiEngine(ApiEngineSpec(requests_per_minute=2))
    for i, at in enumerate((0.0, 20.0)):
        engine.step(at)
        engine.submit(request(i))
    engine.step(45.0)
    with pytest.raises(RateLimited) as caught:
        engine.submit(request(2))
    assert caught.value.status == 429
    assert caught.value.retry_after_s == pytest.approx(15.0)
    engine.step(60.0)
    engine.submit(request(2))
    engine.check()


def test_tokens_and_calls_at_once_are_limited_too() -> None:
    """Prompt plus answer count against the minute; open calls against `max_num_seqs`."""
    engine = ApiEngine(ApiEngineSpec(tokens_per_minute=250))
    engine.submit(request(0))
    engine.submit(request(1))
    with pytest.raises(RateLimited, match="250 tokens"):
        engine.submit(request(2))
    few = ApiEngine(ApiEngineSpec(max_num_seqs=1))
    few.submit(request(0))
    with pytest.raises(RateLimited, match="limit is 1"):
        few.submit(request(1))
    assert few.cancel(0)
    few.submit(request(1))
    assert not few.cancel(0)


def test_a_prefix_is_cached_for_a_while() -> None:
    """The next turn within `cache_s` finds the context, a later one nothing; a repeated prompt all but one token."""
    spec = ApiEngineSpec(cache_s=10.0, first_token_s=1.0, tokens_per_s=10.0)
    turns = [
        (0.0, request(1, 100, 11, "a")),
        (5.0, request(2, 200, 11, "a")),
        (12.0, request(3, 200, 11, "a")),
        (60.0, request(4, 300, 11, "a")),
    ]
    seen = drive(ApiEngine(spec), turns)
    assert [seen[i].cached_tokens for i in (1, 2, 3, 4)] == [0, 111, 199, 0]


def test_a_slow_api_is_slow_for_new_calls() -> None:
    """At half the speed everything takes twice as long."""
    engine = ApiEngine(ApiEngineSpec(first_token_s=0.5, tokens_per_s=20.0))
    engine.set_speed(0.5)
    assert drive(engine, [(0.0, request(1))])[1].finished_at_s == pytest.approx(2.0)


@pytest.mark.parametrize(
    "changes",
    [{"first_token_s": 0.0}, {"tokens_per_s": math.inf}, {"cache_s": -1.0}, {"requests_per_minute": 0}],
)
def test_settings_out_of_range_are_named(changes: dict[str, float]) -> None:
    """Zero, infinite and negative settings."""
    with pytest.raises(ConfigError, match=next(iter(changes))):
        ApiEngineSpec(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [request(1, 0, 5), request(1, 5, 0), request(1, 150_000, 60_000)])
def test_what_can_never_be_answered_is_refused(bad: EngineRequest) -> None:
    """No prompt, no answer, or beyond the model's length."""
    with pytest.raises(ContextTooLong):
        ApiEngine(ApiEngineSpec()).submit(bad)


def test_a_world_with_an_api_that_refuses() -> None:
    """Programs on a limited API end, some of them failed, and the run's laws hold."""
    text = """
scenario: 1
name: api
n_programs: 30
pool:
  models: {m: {usd_per_million: {input: 1, output: 2}}}
  backends: [{name: a, model: m, engine: emulator, slots: 64}]
  router: {policy: least_loaded}
engines: {a: {kind: api, requests_per_minute: 20}}
workload: {preset: single-shot, arrivals: {kind: poisson, programs_per_s: 1}}
"""
    report = simulate(parse_scenario(text), 0)
    assert report.programs["open"] == 0
    assert 10 < report.programs["finished"] <= 30


def test_a_refusal_says_when_to_come_back() -> None:
    """Tokens of a minute are freed in order: a call is told the instant from which on it fits, and fits then."""
    engine = ApiEngine(ApiEngineSpec(tokens_per_minute=100))
    for i, (at_s, tokens) in enumerate([(0.0, 40), (10.0, 40)]):
        engine.step(at_s)
        engine.submit(request(i, tokens - 1, 1))
    engine.step(20.0)
    for tokens, after_s in ((30, 40.0), (70, 50.0)):
        with pytest.raises(RateLimited) as refusal:
            engine.submit(request(9, tokens - 1, 1))
        assert refusal.value.retry_after_s == pytest.approx(after_s)
    engine.step(70.0)
    engine.submit(request(10, 69, 1))
    with pytest.raises(ContextTooLong, match="101 tokens can never fit; the limit is 100"):
        engine.submit(request(11, 100, 1))


def test_the_machine_hears_when_to_come_back() -> None:
    """A 429 of an engine reaches the machine with the seconds it asks for, as a live `Retry-After` does."""
    text = """
scenario: 1
name: api
n_programs: 4
pool:
  models: {m: {}}
  backends: [{name: a, model: m}]
engines: {a: {kind: api, requests_per_minute: 2}}
workload: {arrivals: {kind: closed, n_agents: 4}}
"""
    world = parse_scenario(text)
    machine = DirectMachine(world.backends)
    simulate(world, 0, machine=machine)
    ended = [event for event in machine.events if isinstance(event, AttemptEnded)]
    refused = [event.retry_after_s for event in ended if event.status == 429]
    assert refused == [60.0, 60.0]
    assert [event.retry_after_s for event in ended if event.status != 429] == [None, None]


def test_a_router_that_is_told_leaves_the_api_alone() -> None:
    """After a refusal no call goes to a limited API until the instant that it named; then calls come through."""
    text = """
scenario: 1
name: api
n_programs: 6
pool:
  models: {m: {}}
  backends: [{name: a, model: m}]
  router: {policy: least_loaded, hold_max_s: 300}
engines: {a: {kind: api, requests_per_minute: 2}}
workload: {arrivals: {kind: closed, n_agents: 6}}
"""
    report = simulate(parse_scenario(text), 0)
    # Two at once, two a minute later; each time a third had been sent with them and was refused.
    assert report.programs == {"failed": 2, "finished": 4, "open": 0}
    assert report.n_attempts == 6
    assert 60.0 <= report.hold_max_s < 61.0
