"""Replicas of one model: where a program goes, what a new replica gets, and what happens when one leaves."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from router_host import Host, backend, find, make_stack

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.pool import BackendHealth
from loadwise.kernel.work import Usage
from loadwise.policy.registry import PolicySpec
from loadwise.router.config import AdmissionConfig

UP, DOWN, DRAINING = BackendHealth.UP, BackendHealth.DOWN, BackendHealth.DRAINING
POLICIES = ("resident", "least_loaded", "power_of_two", "round_robin", "random")


def host(*backends, **router) -> Host:
    """A host over replicas of the small model."""
    return Host(make_stack(*backends, **router))


def add(h, spec) -> list[c.Command]:
    """An operator adds a backend."""
    return h.send(e.BackendAdded(at_s=h.now_s, backend=spec))


def started_at(commands, program_id: str) -> str | None:
    """Where the program was sent."""
    sent = [command for command in commands if type(command) is c.Dispatch and command.program_id == program_id]
    return sent[0].backend_id if sent else None


@settings(max_examples=60)
@given(
    capacities=st.lists(st.tuples(st.integers(8, 40), st.integers(0, 7)), min_size=1, max_size=3),
    new_slots=st.integers(2, 40),
    n=st.integers(2, 12),
    policy=st.sampled_from(POLICIES),
    is_tokens=st.booleans(),
)
def test_a_new_replica_takes_load_at_once_but_not_all_of_it(capacities, new_slots, n, policy, is_tokens):
    """Law: after BackendAdded one of the next two programs is its, and of the next n never all while others have
    room; whatever the policy, the capacities and the load before."""
    unit, each = ("kv_tokens", 1000) if is_tokens else ("slots", 1)
    old = [backend(f"old{i}", **{unit: each * slots}) for i, (slots, _) in enumerate(capacities)]
    h = host(*old, replica_policy=PolicySpec(name=policy), expected_tokens=1000, admission_ratio=1.0)
    for number in range(sum(load for _, load in capacities)):
        h.arrive(f"before {number}")
    add(h, backend("new", **{unit: each * new_slots}))
    ledger, places, others_have_room = h.router.admission.ledger, [], True
    for number in range(n):
        others_have_room &= any(ledger.fits(spec.name, each, at_s=h.now_s) for spec in old)
        places.append(started_at(h.arrive(f"after {number}"), f"after {number}"))
    assert "new" in places[:2]
    assert set(places) != {"new"} or not others_have_room


def test_a_new_replica_catches_up_at_half_of_what_arrives():
    """Every second program, until it has as many as the least of the others; then the policy alone."""
    h = host(backend("a", slots=20), backend("b", slots=20))
    for number in range(8):
        h.arrive(f"before {number}")
    add(h, backend("new", slots=20))
    places = [started_at(h.arrive(f"p{n}"), f"p{n}") for n in range(16)]
    assert [place == "new" for place in places[:14]] == [True, False] * 7
    assert not h.router.backends.by_id["new"].is_joining
    assert {name: state.n_running for name, state in h.router.backends.by_id.items()} == {"a": 8, "b": 8, "new": 8}


def test_who_is_held_need_not_leave_half_of_a_new_replica_empty():
    """Others without room are no reason to wait."""
    h = host(backend("a", slots=1))
    for name in ("p", "q", "r", "s"):
        h.arrive(name)
    add(h, backend("b", slots=3))
    assert h.router.admission.n_held == 0
    assert h.router.backends.by_id["b"].n_running == 3


def test_a_replica_that_comes_back_is_new_again():
    """Its engine may have begun anew: cold, and unproven."""
    h = host(backend("a", slots=20), backend("b", slots=20))
    for number in range(6):
        h.arrive(f"before {number}")
    h.set_health("b", DOWN)
    h.set_health("b", UP)
    assert h.router.backends.by_id["b"].is_joining
    places = [started_at(h.arrive(f"p{n}"), f"p{n}") for n in range(4)]
    assert 0 < places.count("b") < 4


def test_a_parked_program_returns_to_where_its_context_lies():
    """Its place was given back, its cache may still be there: also where another replica is emptier."""
    h = host(backend("a", slots=4), backend("b", slots=4), park_s=1.0)
    h.serve("p")
    home = h.router.table.by_id["p"].backend_id
    other = "b" if home == "a" else "a"
    h.after(2.0).wake()
    assert not h.router.table.by_id["p"].is_reserved
    h.router.check()
    h.arrive("q")
    h.arrive("r")
    assert started_at(h.arrive("p"), "p") == home
    assert h.router.backends.by_id[other].n_running == 1


def test_where_the_home_is_full_a_program_goes_on_elsewhere():
    """A place now at the price of reading the context anew, not a wait."""
    h = host(backend("a", slots=1), backend("b", slots=1), park_s=1.0)
    h.serve("p")
    home = h.router.table.by_id["p"].backend_id
    h.after(2.0).wake()
    other = "b" if home == "a" else "a"
    h.set_health(other, DRAINING)
    h.arrive("q")
    h.set_health(other, UP)
    assert started_at(h.arrive("p"), "p") == other


def test_a_shared_prompt_draws_programs_to_where_it_lies():
    """Between a warm replica that is a little fuller and a cold one, the tokens to be read anew decide."""
    admission = AdmissionConfig(shares_prompts=True)
    for shared, expected in ((0, "b"), (6000, "a")):
        h = host(backend("a", kv_tokens=100_000), admission=admission, expected_tokens=4000)
        for number in range(10):
            h.arrive(f"before {number}", prompt_tokens=7000)
            usage = Usage(prompt_tokens=7000, completion_tokens=10, cached_tokens=shared)
            h.end_attempt(h.n_turns, usage=usage)
            if number:
                h.finish(f"before {number}")
        h.serve("before 0", prompt_tokens=7000)
        add(h, backend("b", kv_tokens=100_000))
        h.router.backends.by_id["b"].is_joining = False  # the policy alone
        assert started_at(h.arrive("new", prompt_tokens=7000), "new") == expected


def test_programs_count_not_turns():
    """A program between two calls still has its place: the replica without running turns may be the fuller one."""
    h = host(backend("a", slots=10), backend("b", slots=10))
    for number in range(6):
        h.arrive(f"p{number}")
    for turn_id, dispatch in list(h.running.items()):
        if dispatch.backend_id == "a":
            h.end_attempt(turn_id)
        elif turn_id <= 4:
            h.end_attempt(turn_id)
            h.finish(dispatch.program_id)
    counts = {name: len(a.amount_by_key) for name, a in h.router.admission.ledger.account_by_backend.items()}
    assert counts["a"] > counts["b"] and h.router.backends.by_id["a"].n_running == 0
    assert started_at(h.arrive("new"), "new") == "b"


def test_draining_keeps_who_runs_and_passes_on_who_parks():
    """What has its place goes on there; a parked program moves, and then the backend can be removed without harm."""
    h = host(backend("a", slots=4), backend("b", slots=4), park_s=1.0)
    h.serve("p")
    home = h.router.table.by_id["p"].backend_id
    other = "b" if home == "a" else "a"
    h.set_health(home, DRAINING)
    assert started_at(h.arrive("p"), "p") == home
    assert started_at(h.arrive("q"), "q") == other
    h.end_attempt(2)
    h.after(2.0).wake()
    assert started_at(h.arrive("p"), "p") == other
    h.send(e.BackendRemoved(at_s=h.now_s, backend_id=home))
    assert h.router.counts.failed == 0
    h.end_attempt(4)


def test_nothing_lies_in_the_cache_of_a_removed_backend():
    """One of the same name that comes later is a new one: its programs of old are not drawn to it."""
    h = host(backend("a", slots=4), backend("b", slots=4), park_s=1.0)
    h.serve("p")
    home = h.router.table.by_id["p"].backend_id
    h.send(e.BackendRemoved(at_s=h.now_s, backend_id=home))
    assert h.router.table.by_id["p"].backend_id is None
    h.router.check()


@pytest.mark.parametrize("outcome", ["refused", "broken"])
def test_a_broken_circuit_lets_one_turn_at_a_time_through(outcome):
    """Down after failures, then on trial: one turn, and only its answer lets the rest in."""
    h = host(backend("a", slots=9), backend("b", slots=9))
    n_failed = 0
    while h.router.backends.by_id["a"].health == "up":
        commands = h.arrive(f"bad {n_failed}")
        sent = find(commands, c.Dispatch)
        n_failed += 1
        if sent.backend_id == "a":
            h.end_attempt(sent.turn_id, outcome)
        assert n_failed < 20
    assert not any(dispatch.backend_id == "a" for dispatch in h.running.values())
    h.after(1.5).wake()
    assert h.router.backends.by_id["a"].is_on_trial
    places = [started_at(h.arrive(f"p{n}"), f"p{n}") for n in range(5)]
    assert places.count("a") == 1
    trial = next(turn_id for turn_id, dispatch in h.running.items() if dispatch.backend_id == "a")
    h.end_attempt(trial)
    assert not h.router.backends.by_id["a"].is_on_trial
    assert "a" in [started_at(h.arrive(f"q{n}"), f"q{n}") for n in range(2)]
