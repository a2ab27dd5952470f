"""Backends join, leave, drain and recover; signals age; the host restarts, also under another pool file."""

import math

import pytest
from router_host import MODELS, Host, backend, encoded, find, kinds, make_stack

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.errors import ConfigError
from loadwise.kernel.pool import BackendHealth, ModelSpec, Price
from loadwise.kernel.work import TurnOutcome
from loadwise.policy.registry import PolicySpec
from loadwise.router.backends import SIGNALS_MAX, Backends
from loadwise.router.config import AdmissionConfig, FeedbackConfig, SelectorConfig
from loadwise.router.pool import MODELS_MAX

UP, DOWN, DRAINING = BackendHealth.UP, BackendHealth.DOWN, BackendHealth.DRAINING


def host(*backends, **router):
    """A host over these backends; one with a slot of the small model where none is said."""
    return Host(make_stack(*(backends or [backend("a", slots=1)]), **router))


def add(h, spec, model=None):
    """An operator adds a backend."""
    return h.send(e.BackendAdded(at_s=h.now_s, backend=spec, model=model))


def remove(h, backend_id):
    """An operator removes a backend."""
    return h.send(e.BackendRemoved(at_s=h.now_s, backend_id=backend_id))


def observe(h, values, age_s=0.0, backend_id="a"):
    """A reading arrives, taken some time ago."""
    return h.send(e.SignalsObserved(at_s=h.now_s, backend_id=backend_id, values=values, observed_at_s=h.now_s - age_s))


def test_backend_that_joins_takes_who_is_held():
    """No arrival is needed to notice it."""
    h = host()
    h.arrive("p")
    h.arrive("q")
    find(add(h, backend("b", slots=1)), c.Dispatch, program_id="q", backend_id="b")


@pytest.mark.parametrize("capacity", [{"kv_tokens": 1000}, {"kv_tokens": 100_000, "kv_pool": "gpu"}])
@pytest.mark.parametrize("kind", ["ledger", "footprint"])
def test_who_waits_for_a_shared_cache_hears_when_another_needs_less_of_it(kind, capacity):
    """It leaves the cache for one of its own, or the cache holds more of its tokens: nothing has left either way."""
    shared = backend("a", kv_tokens=1000, kv_pool="gpu"), backend("b", "large", kv_tokens=1000, kv_pool="gpu")
    h = host(*shared, admission=AdmissionConfig(kind=kind), expected_tokens=100)
    h.arrive("p", model="large", prompt_tokens=800)
    h.arrive("q", model="small", prompt_tokens=300)
    assert [d.program_id for d in h.running.values()] == ["p"]
    find(add(h, backend("b", "large", **capacity)), c.Dispatch, program_id="q", backend_id="a")


def test_model_joins_with_its_backend():
    """From then on it is a candidate, and may be pinned."""
    h = host()
    add(h, backend("b", "new"), ModelSpec(usd_per_million=Price(input=9.0)))
    find(h.arrive("p", model="new"), c.Dispatch, backend_id="b", model="new")
    decision = find(h.arrive("q"), c.RecordDecision)
    assert [view.candidate for view in decision.candidates] == ["small", "new"]


def test_backend_of_an_unknown_model_changes_nothing():
    """Counted as malformed."""
    h = host()
    assert add(h, backend("b", "new")) == []
    assert h.router.counts.malformed == 1 and list(h.router.backends.by_id) == ["a"]


def test_models_are_bounded():
    """A learner remembers no more."""
    h = host()
    for n in range(MODELS_MAX):
        add(h, backend(f"b{n}", f"m{n}"), ModelSpec())
    assert len(h.router.backends.model_by_id) == MODELS_MAX
    assert h.router.counts.malformed == len(MODELS)
    h.arrive("p")


def test_larger_capacity_starts_who_is_held():
    """Described anew, the backend keeps what runs on it."""
    h = host()
    h.arrive("p")
    h.arrive("q")
    find(add(h, backend("a", slots=2)), c.Dispatch, program_id="q")
    assert h.router.backends.by_id["a"].n_running == 2


@pytest.mark.parametrize("anew", [backend("a", kv_tokens=1000), backend("a", "large", slots=1)])
def test_backend_of_another_unit_or_model_is_another_backend(anew):
    """What ran there is ended: its reservations mean nothing in the new unit."""
    h = host()
    h.serve("p")
    h.arrive("p")
    find(add(h, anew), c.EndTurn, turn_id=2, status=502, code="backend_removed")
    assert h.router.admission.ledger.headroom("a", at_s=0.0) == anew.capacity[1]


def test_removed_backend_fails_what_runs_there_and_gets_nothing_more():
    """Held turns are not dispatched to a backend on its way out, however much it frees."""
    h = host(backend("a", slots=1), backend("b", slots=1))
    for name in "pqrs":
        h.arrive(name)
    commands = remove(h, "a")
    assert kinds(commands) == ["CancelAttempt", "EndTurn"]
    find(commands, c.EndTurn, outcome=TurnOutcome.FAILED, status=502, code="backend_removed")
    assert h.router.counts.failed == 1 and h.router.admission.n_held == 2


def test_program_of_a_removed_backend_moves_to_another_replica():
    """Its binding to the model stays."""
    h = host(backend("a"), backend("b"))
    h.serve("p")
    remove(h, "a")
    find(h.arrive("p"), c.Dispatch, backend_id="b", decision_id=1)
    add(h, backend("a"))
    h.end_attempt(2)
    find(h.arrive("p"), c.Dispatch, backend_id="b")


def test_removing_twice_is_stale():
    """Counted."""
    h = host()
    remove(h, "a")
    remove(h, "a")
    h.set_health("a", UP)
    observe(h, {"running": 1.0})
    assert h.router.counts.stale == 3


def test_draining_backend_finishes_its_programs_and_takes_no_new_one():
    """A program that lives there goes on."""
    h = host(backend("a"), backend("b"))
    h.serve("p")
    h.set_health("a", DRAINING)
    find(h.arrive("p"), c.Dispatch, backend_id="a")
    find(h.arrive("q"), c.Dispatch, backend_id="b")
    h.end_attempt(2)
    h.set_health("b", DOWN)
    find(h.arrive("r"), c.EndTurn, code="no_backend_available")


def test_backend_that_comes_up_takes_who_is_held():
    """A bound program waits for its backend rather than hear that nobody is there."""
    h = host()
    h.serve("p")
    h.set_health("a", DOWN)
    assert kinds(h.arrive("p")) == []
    find(h.set_health("a", UP), c.Dispatch, turn_id=2)


def test_program_leaves_a_backend_that_went_down():
    """Its reservation goes along, and nothing is left behind."""
    h = host(backend("a"), backend("b"))
    h.serve("p")
    h.set_health("a", DOWN)
    find(h.arrive("p"), c.Dispatch, backend_id="b")
    assert not h.router.admission.ledger.holds("p", "a") and h.router.admission.ledger.holds("p", "b")


def test_fresh_signals_stand_in_the_record_of_a_decision():
    """With the age they had; what is older than the limit is unknown, not zero (law L10)."""
    h = host(signal_max_age_s=5.0)
    observe(h, {"running": 3.0})
    observe(h.after(1.0), {"waiting": 0.0})
    decision = find(h.after(4.5).arrive("p"), c.RecordDecision)
    assert list(decision.candidates[0].signals) == ["a/waiting"]
    assert decision.candidates[0].signals["a/waiting"].observed_at_s == 1.0


def test_impossible_readings_are_refused():
    """Not a number, from the future, one name too many: counted, and what was known stays."""
    h = host()
    h.now_s = 100.0
    observe(h, {"running": 1.0})
    observe(h, {"running": math.nan, "waiting": math.inf})
    observe(h, {"running": 9.0}, age_s=-1.0)
    observe(h, {"running": 9.0}, age_s=math.nan)
    assert h.router.counts.malformed == 4
    observe(h, {f"s{n}": 1.0 for n in range(SIGNALS_MAX)})
    signals = h.router.backends.by_id["a"].signals
    assert h.router.counts.malformed == 5 and len(signals) == SIGNALS_MAX and signals["running"].value == 1.0


def test_older_reading_does_not_replace_a_newer_one():
    """Probes may overtake each other."""
    h = host()
    h.now_s = 100.0
    observe(h, {"running": 1.0})
    observe(h, {"running": 2.0}, age_s=50.0)
    assert h.router.backends.by_id["a"].signals["running"].value == 1.0


def test_pool_file_with_a_backend_of_no_model_is_a_config_error():
    """The parts are checked too, for library callers."""
    with pytest.raises(ConfigError, match="'b' serves 'new'"):
        Backends({}, (backend("b", "new"),))


# --- the host restarts ---


def test_restart_ends_open_turns_and_keeps_bindings():
    """Nothing is dispatched for a client that is gone; a program bound at its first turn keeps its decision."""
    h = host(backend("a", slots=1), backend("b", "large", slots=1), hold_max_s=5.0)
    h.serve("answered", model="small")
    h.arrive("answered")
    h.arrive("first turn", model="large")
    h.arrive("held", model="large")
    commands = h.after(100.0).send(e.HostRestarted(at_s=h.now_s))
    assert set(kinds(commands)) == {"CancelAttempt"} and len(commands) == 3
    find(commands, c.SetTimer)
    assert set(h.router.credit.pending_by_decision) == {1, 2, 3}
    find(h.arrive("first turn"), c.Dispatch, decision_id=2)
    h.finish("held")
    find(h.judge("held"), c.RecordCredit, decision_id=3)


def test_restart_forgets_who_was_not_bound_yet():
    """Nothing of them is worth keeping."""
    h = host(selector=SelectorConfig(url="http://selector"))
    h.arrive("p")
    h.send(e.HostRestarted(at_s=0.0))
    assert not h.router.table.by_id and not h.router.asked


def test_restart_makes_signals_unknown():
    """The clock of the run stood still while the host was away: they would look fresh (law L10)."""
    h = host()
    observe(h, {"running": 3.0})
    h.send(e.HostRestarted(at_s=0.0))
    assert find(h.arrive("p"), c.RecordDecision).candidates[0].signals == {}


def test_restart_sets_the_timer_again():
    """The old one died with the host."""
    h = host()
    h.serve("p")
    assert h.timer_at_s == 120.0
    find(h.send(e.HostRestarted(at_s=0.0)), c.SetTimer, fires_at_s=120.0)


def continued(h, *backends, models=MODELS, **router):
    """A host whose stack begins from the dump of another's, under its own pool file."""
    other = Host(make_stack(*backends, models=models, **router))
    other.stack.load(h.stack.dump())
    other.now_s, other.n_turns = h.now_s, h.n_turns
    other.open, other.running = set(h.open), dict(h.running)
    other.n_attempts_by_turn, other.decided = dict(h.n_attempts_by_turn), dict(h.decided)
    return other


def test_dump_wins_over_the_same_pool_file():
    """What events made of the pool is part of the state."""
    h = host(backend("a"), backend("b", "large"))
    remove(h, "a")
    add(h, backend("c"))
    add(h, backend("d", "new"), ModelSpec())
    add(h, backend("b", "large", slots=7))
    h.set_health("c", DRAINING)
    other = continued(h, backend("a"), backend("b", "large"))
    assert list(other.router.backends.by_id) == ["b", "c", "d"]
    assert encoded(other.arrive("p")) == encoded(h.arrive("p"))
    assert other.stack.dump() == h.stack.dump()


def test_loaded_stack_does_not_look_at_held_turns_before_something_is_due():
    """A rate window that has passed unheard is found at the same moment, in the same order, by both."""
    h = host(backend("a", requests_per_minute=1), park_s=2.0)
    h.serve("p")
    h.arrive("p")
    other = continued(h, backend("a", requests_per_minute=1), park_s=2.0)
    h.now_s = other.now_s = 4000.0
    assert encoded(other.wake()) == encoded(h.wake())


def test_loaded_replica_policy_goes_on_where_it_was():
    """Whose turn it is belongs to the state; another policy begins anew."""
    pool = (backend("a"), backend("b"))
    h = host(*pool, replica_policy=PolicySpec(name="round_robin"))
    h.arrive("p")
    same = continued(h, *pool, replica_policy=PolicySpec(name="round_robin"))
    assert find(same.arrive("q"), c.Dispatch).backend_id == "b"
    find(continued(h, *pool, replica_policy=PolicySpec(name="random")).arrive("q"), c.Dispatch)


def test_changed_pool_file_is_applied_to_a_loaded_state():
    """Backends that left the file go, new ones join, the rest keeps what is believed of it."""
    h = host(backend("gone"), backend("kept"), backend("grown", slots=1))
    add(h, backend("z, added at run time"))
    h.set_health("kept", DOWN)
    h.router.backends.by_id["z, added at run time"].is_joining = False
    h.serve("p")
    h.arrive("p")
    assert h.running[2].backend_id == "gone"
    other = continued(h, backend("kept"), backend("grown", slots=2), backend("new"))
    assert set(other.router.backends.by_id) == {"kept", "grown", "z, added at run time", "new"}
    assert other.router.backends.by_id["kept"].health is DOWN
    assert other.router.admission.ledger.account_by_backend["grown"].capacity == 2
    other.open.clear()  # the turn on the backend that is gone was ended by the loading
    other.running.clear()
    other.stack.check()
    other.send(e.HostRestarted(at_s=0.0))
    find(other.arrive("p"), c.Dispatch, decision_id=1)


def test_another_number_of_slots_begins_with_fresh_learners():
    """Decisions of slots that are gone are still closed, and teach nobody."""
    h = host(backend("a"), feedback=FeedbackConfig(arm="per_slot", size=3))
    for name in "pqr":
        h.serve(name)
    other = continued(h, backend("a"), feedback=FeedbackConfig(arm="per_slot", size=2))
    find(other.judge("r"), c.RecordCredit, reward=1.0)
    other.judge("q", "abstain")
    assert [learner.ridge.names for learner in other.router.credit.learners] == [(), ()]


def test_model_without_any_backend_is_refused_for_good():
    """409 for the programs that are bound to it, 404 for who asks for it by name; waiting would help neither."""
    h = host(backend("a"), backend("l", "large"))
    h.serve("p", model="small")
    remove(h, "a")
    bound = find(h.arrive("p"), c.EndTurn, status=409, code="model_removed", retry_after_s=None)
    assert "'small'" in bound.message
    pinned = find(h.arrive("q", model="small"), c.EndTurn, status=404, code="model_not_found", retry_after_s=None)
    assert pinned.message.endswith("known: auto, large")
    find(h.arrive("p", model="large"), c.Dispatch, backend_id="l")
    add(h, backend("a"))
    find(h.arrive("p"), c.Dispatch, backend_id="a")


def test_backend_that_is_down_is_not_one_that_was_removed():
    """It may come back: 503 with Retry-After."""
    h = host(backend("a"))
    h.serve("p")
    h.finish("p")
    h.set_health("a", DOWN)
    assert find(h.arrive("q", model="small"), c.EndTurn, status=503).retry_after_s is not None
