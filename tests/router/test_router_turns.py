"""Arrival, admission and holding: event list in, command list out."""

import math

import pytest
from router_host import Host, backend, find, kinds, make_stack, matches

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.pool import BackendHealth
from loadwise.kernel.work import AttemptOutcome, ProgramState, TurnOutcome, Usage
from loadwise.policy.context import ContextSpec
from loadwise.policy.registry import PolicySpec
from loadwise.router.config import FeedbackConfig


def host(*backends, **router):
    """A host over these backends; one with a slot of the small model where none is said."""
    return Host(make_stack(*(backends or [backend("a", slots=1)]), **router))


def test_first_turn_is_decided_recorded_and_dispatched_in_that_order():
    """The decision is written before anything that follows from it."""
    commands = host().arrive("p", domain="retail")
    assert kinds(commands) == ["RecordDecision", "Dispatch"]
    decision = find(commands, c.RecordDecision, program_id="p", chosen="small", reason="policy", slot=0)
    find(commands, c.Dispatch, turn_id=1, attempt=1, backend_id="a", decision_id=decision.decision_id, wait_s=0.0)
    assert [view.candidate for view in decision.candidates] == ["small"]  # nobody serves the large model


def test_later_turn_of_a_bound_program_goes_straight_to_its_backend():
    """No second decision, no timer, no holding."""
    h = host()
    h.serve("p")
    commands = h.after(1.0).arrive("p", priority=3)
    assert [type(command) for command in commands] == [c.Dispatch]
    assert matches(commands[0], c.Dispatch, turn_id=2, backend_id="a", priority=3)
    assert h.end_attempt(2) == []


def test_held_turns_start_first_in_first_out_when_a_program_ends():
    """Who came first starts first (law L9)."""
    h = host()
    h.serve("first")
    for name in ("second", "third"):
        assert kinds(h.arrive(name)) == ["RecordDecision"]
    assert h.router.counts.held == 2
    started = h.after(5.0).finish("first")
    assert matches(find(started, c.Dispatch), c.Dispatch, program_id="second", wait_s=5.0)
    h.end_attempt(2)
    find(h.after(1.0).finish("second"), c.Dispatch, program_id="third", wait_s=6.0)


def test_head_that_does_not_fit_holds_back_a_smaller_one_behind_it():
    """No overtaking: a stream of small programs cannot starve a large one."""
    h = host(backend("a", kv_tokens=1000), expected_tokens=100)
    h.arrive("running", prompt_tokens=500)
    assert kinds(h.arrive("large", prompt_tokens=600)) == ["RecordDecision"]
    assert kinds(h.arrive("small", prompt_tokens=100)) == ["RecordDecision"]
    h.end_attempt(1, usage=Usage(prompt_tokens=500))
    started = h.finish("running")
    assert [d.program_id for d in started if type(d) is c.Dispatch] == ["large", "small"]


def test_empty_backend_admits_its_head_whatever_its_size():
    """A program larger than the limit would otherwise wait for ever."""
    h = host(backend("a", kv_tokens=1000))
    find(h.arrive("huge", prompt_tokens=50_000), c.Dispatch, backend_id="a")
    assert h.router.admission.ledger.headroom("a", at_s=0.0) == -49_000
    assert kinds(h.arrive("next")) == ["RecordDecision"]


def test_growth_of_what_runs_passes_the_limit_and_only_admission_stops():
    """The reservation follows the context; nothing is evicted."""
    h = host(backend("a", kv_tokens=1000), expected_tokens=100)
    h.arrive("p")
    h.end_attempt(1, usage=Usage(prompt_tokens=1000, completion_tokens=600))
    assert h.router.admission.ledger.headroom("a", at_s=0.0) == -600
    find(h.arrive("p"), c.Dispatch, turn_id=2)
    assert kinds(h.arrive("q")) == ["RecordDecision"]
    find(h.end_attempt(2, usage=Usage(prompt_tokens=50)), c.Dispatch, program_id="q")  # the context was compacted


def test_held_too_long_is_evicted_with_retry_after():
    """503 after hold_max_s, and the program leaves no trace."""
    h = host(hold_max_s=10.0)
    h.arrive("running")
    h.arrive("waiting")
    assert kinds(h.after(9.9).wake()) == []
    ended = find(h.after(0.1).wake(), c.EndTurn, turn_id=2, outcome=TurnOutcome.EVICTED, status=503)
    assert ended.code == "held_too_long" and ended.retry_after_s == 1.0
    assert "waiting" not in h.router.table.by_id
    assert h.router.counts.evicted == 1


def test_a_head_that_leaves_makes_way_for_the_next():
    """The next may be smaller and fit at once."""
    h = host(backend("a", kv_tokens=1000), expected_tokens=100)
    h.arrive("running", prompt_tokens=500)
    h.arrive("large", prompt_tokens=600)
    h.arrive("small", prompt_tokens=100)
    find(h.abandon(2), c.Dispatch, program_id="small")


def test_too_many_held_are_refused():
    """held_max bounds the order."""
    h = host(held_max=1)
    for name in ("running", "held"):
        h.arrive(name)
    find(h.arrive("too many"), c.EndTurn, status=503, code="too_many_held", outcome=TurnOutcome.REJECTED)


def test_too_many_open_turns_are_refused():
    """turns_max bounds what one client's flood may open."""
    h = host(backend("a"), turns_max=2)
    h.arrive("p")
    h.arrive("p")
    find(h.arrive("p"), c.EndTurn, status=503, code="too_many_turns", retry_after_s=1.0)
    assert h.router.table.by_id["p"].is_open


def test_turns_of_an_admitted_program_need_not_stand_in_line():
    """Parallel calls of one program share its reservation."""
    h = host()
    h.arrive("running")
    h.arrive("p")
    h.arrive("other")
    h.arrive("p")
    h.end_attempt(1)
    started = h.finish("running")
    assert [(d.program_id, d.turn_id) for d in started if type(d) is c.Dispatch] == [("p", 2), ("p", 4)]


def test_pinned_turn_binds_without_the_policy():
    """The client's choice is certain, and recorded as such."""
    h = host(backend("a"), backend("b", "large"))
    decision = find(h.arrive("p", model="large"), c.RecordDecision, chosen="large", reason="pinned")
    assert [(view.candidate, view.propensity) for view in decision.candidates] == [("large", 1.0)]


def test_turn_pinned_elsewhere_is_a_side_turn_with_a_reservation_of_its_own():
    """The program's own binding and context stay as they are."""
    h = host(backend("a", slots=1), backend("b", "large", slots=1))
    h.serve("p")
    find(h.arrive("p", model="large"), c.Dispatch, backend_id="b", model="large")
    assert h.router.admission.ledger.headroom("b", at_s=0.0) == 0
    h.end_attempt(2, usage=Usage(prompt_tokens=1_000_000))
    assert h.router.admission.ledger.headroom("b", at_s=0.0) == 1
    program = h.router.table.by_id["p"]
    assert (program.model, program.context_tokens) == ("small", 110)
    assert program.cost_usd == pytest.approx(1.0 + (100 * 0.1 + 10 * 0.4) / 1e6)


def test_a_pin_is_kept_while_the_program_still_waits_for_its_model():
    """Two turns at once, the second pinned: it runs where the client said, once the first is routed."""
    h = host(backend("a"), backend("b", "large"), feedback=FeedbackConfig(arm="sequential"))
    h.serve("first")
    h.arrive("p")
    h.arrive("p", model="large")
    h.finish("first")
    started = h.judge("first")
    assert [(d.turn_id, d.model) for d in started if type(d) is c.Dispatch] == [(2, "small"), (3, "large")]


def test_implicit_program_gives_its_reservation_back_between_turns():
    """Nobody may ever say that it is over."""
    h = host()
    h.serve("guessed", is_implicit=True)
    assert h.router.admission.ledger.headroom("a", at_s=0.0) == 1
    find(h.arrive("named"), c.Dispatch)
    assert kinds(h.arrive("guessed")) == []  # held: it must be admitted anew
    h.end_attempt(2)
    find(h.finish("named"), c.Dispatch, program_id="guessed")


def test_implicit_program_frees_its_place_for_whoever_is_held():
    """Between its turns others run."""
    h = host()
    h.arrive("guessed", is_implicit=True)
    h.arrive("held")
    find(h.end_attempt(1), c.Dispatch, program_id="held")


def test_unknown_model_names_the_known_ones():
    """404, and no program is opened; a bound program is not harmed by it."""
    h = host()
    refused = find(h.arrive("p", model="gpt-17"), c.EndTurn, status=404, code="model_not_found")
    assert (
        "'gpt-17'" in refused.message
        and refused.message.endswith("known: auto, small")
        and "large" not in refused.message
    )
    assert not h.router.table.by_id
    h.serve("p")
    find(h.arrive("p", model="gpt-17"), c.EndTurn, status=404)
    assert h.router.table.by_id["p"].is_open


def test_turn_of_a_finished_program_is_refused():
    """409, as the interface says."""
    h = host()
    h.serve("p")
    h.finish("p")
    find(h.arrive("p"), c.EndTurn, status=409, code="program_finished")


@pytest.mark.parametrize("program_id", ["", "x" * 257, "a\nb", "\x1fturn:1", "\u202ereversed"])
def test_impossible_program_id_is_refused(program_id):
    """No name can be mistaken for a key of ours, or break a log line."""
    find(host().arrive(program_id), c.EndTurn, status=400, code="invalid_program_id")


def test_nobody_usable_is_said_at_once():
    """503 with Retry-After rather than a wait for a backend that may never come."""
    h = host()
    h.set_health("a", BackendHealth.DOWN)
    find(h.arrive("p"), c.EndTurn, status=503, code="no_backend_available", retry_after_s=1.0)
    find(h.arrive("p", model="small"), c.EndTurn, status=503, code="no_backend_available")
    assert not h.router.table.by_id


def test_client_that_leaves_cancels_its_engine_call():
    """The slot is free at once, whatever the engine still says."""
    h = host()
    h.serve("p")
    h.arrive("p")
    assert kinds(h.abandon(2)) == ["CancelAttempt"]
    assert h.router.backends.by_id["a"].n_running == 0
    assert h.end_attempt(2, "cancelled") == []
    assert h.router.counts.stale == 0
    assert h.abandon(2) == []


def test_program_whose_only_turn_is_abandoned_is_forgotten():
    """Its decision is undone; the same id begins anew."""
    h = host()
    h.arrive("p")
    h.abandon(1)
    assert not h.router.table.by_id and h.router.credit.n_undone == 1
    find(h.arrive("p"), c.RecordDecision, decision_id=2)


def test_turn_number_of_an_open_turn_is_counted_and_ignored():
    """A host that repeats itself does no harm."""
    h = host()
    h.arrive("p")
    again = e.TurnArrived(at_s=0.0, turn_id=1, program_id="q")
    assert h.send(again) == []
    assert h.router.counts.malformed == 1 and h.router.counts.arrived == 1


@pytest.mark.parametrize("components", [(1.0, 2.0, 3.0), (math.nan, 1.0), (math.inf, 0.0)])
def test_impossible_embedding_is_none(components):
    """Too long, or not finite: the whole block of the context is zero."""
    h = host(context=ContextSpec(n_components=2))
    decision = find(h.arrive("p", components=components), c.RecordDecision)
    assert decision.context == (1.0, 0.0, 0.0)
    assert h.router.counts.malformed == (1 if len(components) == 3 else 0)


@pytest.mark.parametrize("n_tokens", [-5, 2**62])
def test_impossible_token_counts_are_brought_into_range(n_tokens):
    """Neither a negative reservation nor a negative cost."""
    h = host(backend("a", kv_tokens=1000), backend("b", "large", kv_tokens=1000))
    h.arrive("p", prompt_tokens=n_tokens)
    h.end_attempt(1, usage=Usage(prompt_tokens=n_tokens, completion_tokens=n_tokens, cached_tokens=n_tokens))
    h.arrive("p", model="large", prompt_tokens=n_tokens)
    program = h.router.table.by_id["p"]
    assert 0 <= program.prompt_tokens <= 10**9 and 0.0 <= program.cost_usd < math.inf
    h.end_attempt(2)
    h.finish("p")
    h.judge("p")
    assert program.state is ProgramState.CLOSED


def test_engine_that_counts_nothing_leaves_the_hosts_estimate():
    """usage.is_exact false: the estimate of the prompt stands."""
    h = host()
    h.arrive("p", prompt_tokens=700)
    h.end_attempt(1, usage=Usage(completion_tokens=30, is_exact=False))
    assert h.router.table.by_id["p"].context_tokens == 730


def test_requests_per_minute_come_free_by_time_alone():
    """A held turn starts 60 s after the oldest grant, and the timer is set for it."""
    h = host(backend("a", requests_per_minute=2), hold_max_s=100.0)
    h.serve("p")
    h.after(10.0).serve("q")
    held = h.after(10.0).arrive("r")
    assert kinds(held) == ["RecordDecision"] and h.timer_at_s == 60.0
    assert kinds(h.after(39.0).wake()) == []
    find(h.after(1.0).wake(), c.Dispatch, program_id="r", wait_s=40.0)


def test_turn_held_for_a_spent_rate_window_is_told_so():
    """429 with the instant at which the window frees; where slots are short, too, it is 503."""
    h = host(backend("a", requests_per_minute=1), hold_max_s=10.0)
    h.arrive("p")
    h.after(5.0).arrive("q")
    told = find(h.after(10.0).wake(), c.EndTurn, outcome=TurnOutcome.EVICTED, status=429, code="rate_limited")
    assert told.retry_after_s == 45.0
    h = host(backend("a", requests_per_minute=1), backend("b", slots=1), hold_max_s=10.0)
    for name in "pqr":
        h.arrive(name)
    find(h.after(10.0).wake(), c.EndTurn, status=503, code="held_too_long")


def test_each_request_that_leaves_the_window_starts_one_more():
    """The timer is set anew for whoever is still held."""
    h = host(backend("a", requests_per_minute=1), hold_max_s=300.0)
    for name in "pqr":
        h.arrive(name)
    assert h.timer_at_s == 60.0
    find(h.after(60.0).wake(), c.Dispatch, program_id="q")
    find(h.after(60.0).wake(), c.Dispatch, program_id="r")


def test_estimate_that_falls_starts_who_fits_now():
    """A parked program ends small; nothing is released, but the head is believed to need less."""
    h = host(backend("a", kv_tokens=1000), expected_tokens=450)
    h.serve("parked", is_implicit=True)
    h.arrive("running")
    h.arrive("held")
    find(h.finish("parked"), c.Dispatch, program_id="held")


def test_replicas_in_turn():
    """A replica policy hears of its choices; later turns of a program are none."""
    h = host(backend("a"), backend("b"), replica_policy=PolicySpec(name="round_robin"))
    homes = [find(h.arrive(name), c.Dispatch).backend_id for name in "pqrs"]
    assert homes == ["a", "b", "a", "b"]
    h.end_attempt(1)
    assert find(h.arrive("p"), c.Dispatch).backend_id == "a"


def test_replicas_are_chosen_by_load_and_a_program_stays_where_it_began():
    """Least loaded first; later turns return to their prefix."""
    h = host(backend("a", slots=2), backend("b", slots=2))
    assert find(h.arrive("p"), c.Dispatch).backend_id == "a"
    assert find(h.arrive("q"), c.Dispatch).backend_id == "b"
    h.end_attempt(1)
    h.end_attempt(2)
    assert find(h.arrive("q"), c.Dispatch).backend_id == "b"


def test_attempt_outcome_cancelled_ends_the_turn_without_a_word():
    """The host saw the client leave first."""
    h = host()
    h.serve("p")
    h.arrive("p")
    assert h.end_attempt(2, AttemptOutcome.CANCELLED, usage=Usage(prompt_tokens=50)) == []
    program = h.router.table.by_id["p"]
    assert program.prompt_tokens == 150, "what the engine did is paid for"
    assert program.state is ProgramState.RUNNING
