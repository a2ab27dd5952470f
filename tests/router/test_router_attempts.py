"""Attempts that fail: retried, moved, passed on; and what becomes of the backend."""

import math

import pytest
from router_host import MODELS, Host, backend, find, kinds, make_stack

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.pool import BackendHealth, ModelSpec, Price
from loadwise.kernel.work import AttemptOutcome, TurnOutcome, Usage
from loadwise.router.config import FeedbackConfig
from loadwise.router.failure import RETRYABLE_STATUSES

UP, DOWN, DRAINING = BackendHealth.UP, BackendHealth.DOWN, BackendHealth.DRAINING


def host(*backends, **router):
    """A host over these backends; two replicas of the small model where none is said."""
    return Host(make_stack(*(backends or [backend("a", slots=1), backend("b", slots=1)]), **router))


@pytest.mark.parametrize("outcome", ["refused", "connect_timeout", "first_byte_timeout", "broken", "idle_timeout"])
def test_failure_before_the_first_byte_is_retried_on_another_replica(outcome):
    """The client sees nothing of it, and the reservation moves along."""
    h = host()
    h.arrive("p")
    find(h.end_attempt(1, outcome), c.Dispatch, turn_id=1, attempt=2, backend_id="b")
    assert h.router.admission.ledger.holds("p", "b") and not h.router.admission.ledger.holds("p", "a")
    assert h.end_attempt(1) == []


@pytest.mark.parametrize("status", [400, 401, 404, 408, 422, 425, 429, 500, 501, 502, 503, 504])
def test_only_statuses_that_may_pass_are_retried(status):
    """A wrong request is wrong everywhere; it goes to the client as the engine said it."""
    h = host()
    h.arrive("p")
    commands = h.end_attempt(1, "status", status=status, retry_after_s=7.0)
    if status in RETRYABLE_STATUSES:
        find(commands, c.Dispatch, backend_id="b")
    else:
        find(commands, c.EndTurn, outcome=TurnOutcome.FAILED, status=status, is_upstream_answer=True, retry_after_s=7.0)


@pytest.mark.parametrize("status", [0, 200, 302, 999])
def test_status_that_no_engine_should_send_is_a_bad_gateway(status):
    """The client gets an error that HTTP knows."""
    h = host()
    h.arrive("p")
    find(h.end_attempt(1, "status", status=status), c.EndTurn, status=502, code="upstream_broken")


@pytest.mark.parametrize(
    ("outcome", "status", "code"),
    [
        ("refused", 502, "upstream_unreachable"),
        ("connect_timeout", 502, "upstream_unreachable"),
        ("first_byte_timeout", 504, "upstream_timeout"),
        ("idle_timeout", 504, "upstream_timeout"),
        ("broken", 502, "upstream_broken"),
    ],
)
def test_failure_after_the_first_byte_is_told(outcome, status, code):
    """Never retried: the client has begun to read. The message names the backend and the detail."""
    h = host()
    h.arrive("p")
    commands = h.end_attempt(1, outcome, first_byte_at_s=0.0, detail="reset by peer")
    failed = find(commands, c.EndTurn, outcome=TurnOutcome.FAILED, status=status, code=code)
    assert "'a'" in failed.message and "reset by peer" in failed.message
    assert kinds(commands) == ["EndTurn"]


def test_attempts_are_bounded():
    """attempts_max in all, and then the last failure is told."""
    h = host(attempts_max=2)
    h.arrive("p")
    h.end_attempt(1, "idle_timeout")
    find(h.end_attempt(1, "idle_timeout"), c.EndTurn, status=504)


def test_answer_that_broke_off_is_tried_once_more_where_it_was():
    """The only replica gets a second chance, not a third."""
    h = host(backend("a"), attempts_max=5)
    h.serve("p")
    h.arrive("p")
    find(h.end_attempt(2, "broken"), c.Dispatch, attempt=2, backend_id="a")
    find(h.end_attempt(2, "broken"), c.EndTurn, code="upstream_broken")


def test_retry_waits_for_a_replica_that_is_full():
    """The failed replica's room goes to others meanwhile; the hold has its full time from then on."""
    h = host(hold_max_s=60.0)
    h.arrive("p")
    h.arrive("other")
    h.after(100.0)
    assert kinds(h.end_attempt(1, "idle_timeout")) == []
    assert kinds(h.after(59.0).wake()) == []
    h.end_attempt(2)
    find(h.finish("other"), c.Dispatch, turn_id=1, attempt=2, backend_id="b", wait_s=59.0)


def test_retry_is_not_held_beyond_the_limit():
    """Where held_max is reached a failed attempt has nowhere to wait, and its failure is told."""
    h = host(held_max=1)
    for name in ("p", "q", "held"):
        h.arrive(name)
    find(h.end_attempt(1, "idle_timeout"), c.EndTurn, turn_id=1, status=504)


def test_failure_for_good_leaves_the_program_its_place():
    """A bound program whose turn failed is not sent to the end of the line."""
    h = host(backend("a", slots=1))
    h.serve("p")
    h.arrive("waiting")
    h.arrive("p")
    h.end_attempt(3, "idle_timeout")
    find(h.arrive("p"), c.Dispatch, backend_id="a")


def test_head_without_another_way_takes_the_backend_it_had_tried():
    """It would stand in the way of all behind it for as long as it may be held."""
    h = host()
    h.arrive("p")
    h.arrive("other")
    h.end_attempt(1, "idle_timeout")  # waits for b
    find(h.set_health("b", DOWN), c.Dispatch, turn_id=1, attempt=2, backend_id="a")


@pytest.mark.parametrize(("outcome", "status"), [("refused", 0), ("status", 429)])
def test_head_takes_the_backend_it_had_tried_when_the_other_falls_silent(outcome, status):
    """Nothing came free: the one it waited for went away."""
    h = host(backend("a", slots=2), backend("b", slots=1), attempts_max=2)
    h.serve("other")
    h.arrive("other")
    find(h.end_attempt(2, "idle_timeout"), c.Dispatch, backend_id="b")
    h.arrive("p")
    assert kinds(h.end_attempt(3, "idle_timeout")) == []
    find(h.end_attempt(2, outcome, status=status), c.Dispatch, turn_id=3, backend_id="a")


def test_fallback_stays_with_its_slots_learner():
    """The slot decided, the slot learns."""
    feedback = FeedbackConfig(arm="per_slot", size=2)
    h = host(backend("a"), backend("b", "large"), feedback=feedback)
    h.arrive("p")
    h.arrive("q")
    first = h.running[2].model
    fallen = find(h.end_attempt(2, "status", status=500), c.RecordDecision, reason="fallback")
    assert fallen.slot == 1 and fallen.chosen != first


def test_program_without_an_answer_falls_back_to_another_model():
    """The old decision is undone, the new one is recorded, and the verdict teaches the model that ran."""
    h = host(backend("a"), backend("b", "large"))
    first = find(h.arrive("p"), c.RecordDecision, chosen="small")
    commands = h.end_attempt(1, "status", status=500)
    assert kinds(commands) == ["RecordDecision", "Dispatch"]
    second = find(commands, c.RecordDecision, chosen="large", reason="fallback")
    assert h.router.credit.n_undone == 1
    h.end_attempt(1)
    h.finish("p")
    credit = find(h.judge("p"), c.RecordCredit, model="large", decision_id=second.decision_id)
    assert credit.decision_id != first.decision_id
    learner = h.router.credit.learners[0]
    assert learner.ridge.counts("small") == (0, 0) and learner.ridge.counts("large") == (1, 1)


def test_every_model_is_tried_once_and_then_the_failure_is_told():
    """No model gets a program back that it failed."""
    h = host(backend("a"), backend("b", "large"), attempts_max=9)
    h.arrive("p")
    h.end_attempt(1, "status", status=500)
    find(h.end_attempt(1, "status", status=500), c.EndTurn, status=500, outcome=TurnOutcome.FAILED)
    assert not h.router.table.by_id and not h.router.credit.pending_by_decision


THREE = dict.fromkeys(("m0", "m1", "m2", "m3"), MODELS["small"])


@pytest.mark.parametrize("attempts_max", [1, 2, 3])
@pytest.mark.parametrize("n_replicas", [1, 2, 4])
def test_another_model_is_reached_however_many_attempts_replicas_have_used(attempts_max, n_replicas):
    """The limit is one model's; all in all there are attempts_max for each of the models that may be tried."""
    pool = [backend(f"{model}-{n}", model) for model in THREE for n in range(n_replicas)]
    h = Host(make_stack(*pool, models=THREE, attempts_max=attempts_max, fallbacks_max=2))
    h.arrive("p")
    models = []
    while 1 in h.running:
        models.append(h.running[1].model)
        commands = h.end_attempt(1, "status", status=500)
    find(commands, c.EndTurn, status=500)
    per_model = min(attempts_max, n_replicas)
    assert len(set(models)) == 3 and len(models) == 3 * per_model


def test_fallbacks_can_be_turned_off():
    """Then a failing model's error is the answer."""
    h = host(backend("a"), backend("b", "large"), fallbacks_max=0)
    h.arrive("p")
    find(h.end_attempt(1, "status", status=500), c.EndTurn, status=500)


@pytest.mark.parametrize("how", ["answered", "pinned", "parallel"])
def test_no_fallback_for_a_program_that_is_bound(how):
    """Another model would not know the conversation, or the client chose this one."""
    h = host(backend("a"), backend("b", "large"))
    if how == "answered":
        h.serve("p")
    if how == "parallel":
        h.arrive("p")
    h.arrive("p", **({"model": "small"} if how == "pinned" else {}))
    find(h.end_attempt(h.n_turns, "status", status=500), c.EndTurn, status=500)


def test_backend_that_refuses_is_down_for_a_cooldown_that_doubles():
    """1 s, 2 s, 4 s, ... at most 30 s; success ends it."""
    h = host(backend("a"))
    waits = []
    for _ in range(7):
        h.arrive("p")
        h.end_attempt(h.n_turns, "refused")
        assert h.router.backends.by_id["a"].health is DOWN
        due = dict(h.router.agenda.dump())["retry:a"]
        waits.append(due - h.now_s)
        h.now_s = due
        h.wake()
        assert h.router.backends.by_id["a"].health is UP
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    h.serve("p")
    assert h.router.backends.by_id["a"].n_failures == 0


def test_backend_that_hangs_is_down_after_three_in_a_row():
    """Once is bad luck."""
    h = host(backend("a"))
    for n in (1, 2, 3):
        h.arrive(f"p{n}")
        h.end_attempt(h.n_turns, "first_byte_timeout")
        assert (h.router.backends.by_id["a"].health is DOWN) == (n == 3)


@pytest.mark.parametrize("status", [500, 502, 504, 520, 599, 401, 403, 302, 0, 999])
def test_backend_that_answers_nonsense_is_down_after_three_in_a_row(status):
    """Being done at once it is the least loaded, and would draw all traffic."""
    h = host(backend("a"))
    for n in (1, 2, 3):
        h.arrive(f"p{n}")
        h.end_attempt(h.n_turns, "status", status=status)
        assert (h.router.backends.by_id["a"].health is DOWN) == (n == 3)


@pytest.mark.parametrize("status", [400, 404, 408, 413, 422, 429, 501, 503, 505])
def test_answers_that_a_client_can_cause_blame_nobody(status):
    """Or that ask for patience: the quiet that follows is answer enough."""
    h = host(backend("a"))
    for _ in range(5):
        h.after(100.0).arrive("p")
        h.end_attempt(h.n_turns, "status", status=status)
    assert h.router.backends.by_id["a"].health is UP


def test_engine_that_fails_every_call_at_once_draws_no_traffic():
    """Two replicas, one a black hole whose probe says that all is well: it gets a try now and then."""
    h = host(backend("good", slots=50), backend("hole", slots=50))
    taken = {"good": 0, "hole": 0}
    for n in range(600):
        h.after(0.5)
        if h.router.backends.by_id["hole"].health is DOWN:
            h.set_health("hole", UP)
        h.arrive(f"p{n}")
        while h.n_turns in h.running:
            name = h.running[h.n_turns].backend_id
            taken[name] += 1
            h.end_attempt(h.n_turns, *(("status",) if name == "hole" else ()), status=500 if name == "hole" else 200)
        h.finish(f"p{n}")
    assert taken["good"] == 600 and taken["hole"] <= 3 + 5 + 300 / 30.0


def test_probe_does_not_end_a_cooldown_that_failed_calls_have_earned():
    """Neither by saying up, nor by saying down and up again; when it is over, one turn at a time is let in."""
    h = host(backend("a", slots=5))
    for n in range(3):
        h.arrive(f"p{n}")
        h.end_attempt(h.n_turns, "status", status=500)
    for health in (UP, DOWN, UP):
        h.set_health("a", health)
        assert h.router.backends.by_id["a"].health is DOWN
    h.arrive("p")
    h.arrive("q")
    assert not h.running
    find(h.after(1.0).wake(), c.Dispatch, program_id="p")
    assert sorted(h.running) == [4]
    assert kinds(h.arrive("r")) == ["RecordDecision"]
    commands = h.end_attempt(4)
    assert [command.program_id for command in commands if type(command) is c.Dispatch] == ["q", "r"]


def test_trial_that_is_called_off_lets_the_next_one_try():
    """Its client left; nothing is known yet."""
    h = host(backend("a", slots=5))
    for n in range(3):
        h.arrive(f"p{n}")
        h.end_attempt(h.n_turns, "first_byte_timeout")
    h.arrive("p")
    h.arrive("q")
    h.after(1.0).wake()
    find(h.abandon(4), c.Dispatch, program_id="q")
    assert h.end_attempt(5, "status", status=500) and h.router.backends.by_id["a"].health is DOWN
    assert dict(h.router.agenda.dump())["retry:a"] == 3.0


def test_new_turns_wait_for_a_backend_that_is_only_quiet():
    """It said when it would be back; auto and pinned alike, and never longer than a turn is held."""
    h = host(backend("a"), hold_max_s=10.0)
    h.arrive("p")
    h.end_attempt(1, "status", status=429, retry_after_s=10.0)
    assert kinds(h.arrive("auto")) == ["RecordDecision"]
    h.arrive("pinned", model="small")
    assert h.router.admission.n_held == 2
    h.now_s = 10.0
    assert len([command for command in h.wake() if type(command) is c.Dispatch]) == 2
    h.arrive("q")
    h.end_attempt(h.n_turns, "status", status=429, retry_after_s=10.5)
    find(h.arrive("late"), c.EndTurn, status=503, code="no_backend_available")


def test_new_turns_do_not_wait_for_a_backend_that_cannot_be_reached():
    """Its cooldown says when to try, not when it will be there."""
    h = host(backend("a"))
    h.arrive("p")
    h.end_attempt(1, "refused")
    find(h.arrive("p"), c.EndTurn, status=503, code="no_backend_available")
    h.set_health("a", DOWN)
    find(h.arrive("p"), c.EndTurn, status=503, code="no_backend_available")


def test_new_programs_go_to_a_model_that_takes_turns_rather_than_wait():
    """Waiting is for when there is no other."""
    h = host(backend("a"), backend("b", "large"))
    h.arrive("p", model="small")
    h.end_attempt(1, "status", status=429, retry_after_s=5.0)
    find(h.arrive("q"), c.RecordDecision, chosen="large")
    h.end_attempt(2, "status", status=429, retry_after_s=7.0)
    decision = find(h.arrive("r"), c.RecordDecision)
    assert [view.candidate for view in decision.candidates] == ["small", "large"]


def test_failures_after_the_first_byte_do_not_blame_the_backend():
    """It answered; what broke may be anything."""
    h = host(backend("a"))
    for _ in range(5):
        h.arrive("p")
        h.end_attempt(h.n_turns, "broken", first_byte_at_s=0.0)
    assert h.router.backends.by_id["a"].health is UP


def test_probes_word_ends_the_cooldown():
    """Neither does a cooldown revive what a probe found dead, nor does it hold back what a probe found alive."""
    h = host(backend("a"))
    h.arrive("p")
    h.end_attempt(1, "refused")
    h.set_health("a", DOWN)
    h.after(100.0).wake()
    assert h.router.backends.by_id["a"].health is DOWN
    h.set_health("a", UP)
    find(h.arrive("p"), c.Dispatch)


def test_failure_of_a_backend_that_a_probe_took_down_starts_no_cooldown():
    """Its end is the probe's to say."""
    h = host(backend("a"))
    h.arrive("p")
    h.set_health("a", DOWN)
    h.end_attempt(1, "refused")
    h.after(100.0).wake()
    assert h.router.backends.by_id["a"].health is DOWN


def test_late_success_revives_what_failures_took_down_and_starts_who_waits():
    """Another attempt was still running there."""
    h = host(backend("a", slots=2))
    h.serve("p")
    h.arrive("p")
    h.arrive("q")
    h.arrive("held")
    h.end_attempt(3, "refused")  # q is gone, a is down
    assert h.router.backends.by_id["a"].health is DOWN
    find(h.end_attempt(2), c.Dispatch, program_id="held")


def test_overloaded_backend_is_left_alone_as_long_as_it_asked():
    """429 with Retry-After: nothing new goes there until then, and then the held turn starts by itself."""
    h = host()
    h.arrive("p")
    h.arrive("other")
    assert kinds(h.end_attempt(1, "status", status=429, retry_after_s=7.0)) == []  # held for b
    h.end_attempt(2, "status", status=429, retry_after_s=20.0)
    h.now_s = 6.9
    assert kinds(h.wake()) == []
    h.now_s = 7.0
    assert find(h.wake(), c.Dispatch).backend_id == "a"


@pytest.mark.parametrize(
    ("asked_s", "quiet_s"), [(None, 1.0), (500.0, 60.0), (0.0, 0.0), (math.nan, 1.0), (math.inf, 1.0), (-3.0, 1.0)]
)
def test_patience_is_bounded(asked_s, quiet_s):
    """An engine cannot silence itself for a day, nor by a number that is none."""
    h = host(backend("a"))
    h.arrive("p")
    told = find(h.end_attempt(1, "status", status=503, retry_after_s=asked_s), c.EndTurn, status=503)
    assert h.router.backends.by_id["a"].quiet_until_s == quiet_s
    assert told.retry_after_s == (asked_s if asked_s in (500.0, 0.0) else None)


def test_quiet_and_cooldown_of_one_backend_do_not_shorten_each_other():
    """Asked to be left alone for 50 s, then refusing: the cooldown's end is not the end of the quiet."""
    h = host(backend("a", slots=2))
    h.serve("p")
    h.serve("q")
    h.arrive("p")
    h.arrive("q")
    h.end_attempt(3, "status", status=429, retry_after_s=50.0)
    h.end_attempt(4, "refused")
    h.arrive("p")  # held: it lives there
    assert kinds(h.after(49.0).wake()) == []
    find(h.after(1.0).wake(), c.Dispatch, program_id="p")


@pytest.mark.parametrize("attempt", [0, 2])
def test_end_of_another_attempt_is_stale(attempt):
    """Only the running attempt counts."""
    h = host()
    h.arrive("p")
    assert h.end_attempt(1, attempt=attempt) == []
    assert h.router.counts.stale == 1 and h.router.counts.completed == 0


def test_tokens_of_retried_attempts_are_not_counted_and_of_failed_ones_are():
    """What the client never saw is not its bill; what broke half way is."""
    h = host()
    h.serve("p")
    h.arrive("p")
    h.end_attempt(2, "broken", usage=Usage(prompt_tokens=40))
    assert h.router.table.by_id["p"].prompt_tokens == 100
    h.end_attempt(2, "broken", usage=Usage(prompt_tokens=50), first_byte_at_s=0.0)
    assert h.router.table.by_id["p"].prompt_tokens == 150


@pytest.mark.parametrize("how", ["abandoned", "finished"])
def test_tokens_of_a_turn_that_was_called_off_are_counted_when_they_become_known(how):
    """The engine has worked for them; the program pays once, and a later program of that name never."""
    h = host()
    h.serve("p")
    h.arrive("p")
    h.abandon(2) if how == "abandoned" else h.finish("p")
    used = {"usage": Usage(prompt_tokens=40, completion_tokens=3), "attempt": 1}
    for _ in range(2):
        assert h.end_attempt(2, "cancelled", **used) == []
    program = h.router.table.by_id["p"]
    assert (program.prompt_tokens, program.completion_tokens, program.n_turns) == (140, 13, 1)
    assert program.cost_usd == pytest.approx((140 * 0.1 + 13 * 0.4) / 1e6)
    assert h.router.counts.stale == 1 and not h.router.desk.called_off


def test_program_that_was_forgotten_is_not_charged_to_the_next_of_its_name():
    """Nor is anything charged for an attempt that died with its host."""
    h = host()
    h.arrive("p")
    h.abandon(1)
    h.after(1.0).arrive("p")
    h.end_attempt(1, "cancelled", attempt=1, usage=Usage(prompt_tokens=40))
    h.abandon(2)
    h.send(e.HostRestarted(at_s=h.now_s))
    h.end_attempt(2, "cancelled", attempt=1, usage=Usage(prompt_tokens=40))
    assert h.router.counts.stale == 2 and not h.router.desk.called_off


def test_two_retries_meet_on_one_replica_that_has_room_for_one():
    """Reservations decide, not hope."""
    h = host(backend("a", slots=2), backend("b", slots=1))
    h.arrive("p")
    h.arrive("q")
    h.arrive("r")
    on_a = [turn_id for turn_id, dispatch in h.running.items() if dispatch.backend_id == "a"]
    h.set_health("a", DOWN)
    for turn_id in on_a:
        h.end_attempt(turn_id, "refused")
    assert h.router.admission.n_held == 2
    on_b = next(iter(h.running))
    h.end_attempt(on_b)
    on_b_id = next(name for name, program in h.router.table.by_id.items() if program.n_turns)
    find(h.finish(on_b_id), c.Dispatch, backend_id="b")
    assert h.router.admission.n_held == 1


def test_event_for_an_unknown_turn_is_counted():
    """Nothing is known of it, nothing changes."""
    h = host()
    event = e.AttemptEnded(at_s=0.0, turn_id=99, attempt=1, outcome=AttemptOutcome.COMPLETED)
    assert h.send(event) == []
    assert h.router.counts.stale == 1


@pytest.mark.parametrize("absurd", [{"prompt_tokens": 10**30}, {"completion_tokens": 10**9}, {"prompt_tokens": 1001}])
@pytest.mark.parametrize("limit", ["kv_tokens", "context_tokens"])
def test_usage_that_cannot_be_true_neither_blocks_the_backend_nor_is_billed(absurd, limit):
    """The estimate of the prompt and what was promised of the answer stand instead; others start as before."""
    kv_tokens, context_tokens = (1000, None) if limit == "kv_tokens" else (4000, 1000)
    models = {"small": ModelSpec(usd_per_million=Price(input=1e6), context_tokens=context_tokens)}
    h = Host(make_stack(backend("b", kv_tokens=kv_tokens), models=models, expected_tokens=1))
    h.arrive("p", prompt_tokens=50, max_output_tokens=20)
    h.end_attempt(1, usage=Usage(**{"prompt_tokens": 60, "completion_tokens": 7, **absurd}))
    program = h.router.table.by_id["p"]
    assert program.prompt_tokens == 50 and program.cost_usd == 50.0
    assert program.completion_tokens == (20 if "completion_tokens" in absurd else 7)
    assert h.router.admission.ledger.account_by_backend["b"].reserved <= 70
    assert h.router.counts.malformed == 1
    find(h.arrive("q", prompt_tokens=100), c.Dispatch)


def test_usage_of_a_turn_that_was_called_off_is_doubted_as_any_other():
    """Its backend and its promise are remembered with it."""
    h = Host(make_stack(backend("b", kv_tokens=1000), expected_tokens=1))
    h.serve("p", prompt_tokens=50)
    h.arrive("p", prompt_tokens=50, max_output_tokens=20)
    h.abandon(2)
    h.end_attempt(2, "cancelled", usage=Usage(prompt_tokens=10**30, completion_tokens=10**30))
    program = h.router.table.by_id["p"]
    assert (program.prompt_tokens, program.completion_tokens) == (150, 30)


def test_usage_on_a_backend_of_slots_is_believed_up_to_the_longest_context_there_is():
    """Without a declared context or KV cache only what no engine has is doubted."""
    h = Host(make_stack(backend("b", slots=4)))
    h.arrive("p", prompt_tokens=50)
    h.end_attempt(1, usage=Usage(prompt_tokens=16_000_000))
    h.arrive("q", prompt_tokens=50)
    h.end_attempt(2, usage=Usage(prompt_tokens=16_000_001))
    by_id = h.router.table.by_id
    assert (by_id["p"].prompt_tokens, by_id["q"].prompt_tokens) == (16_000_000, 50)


@pytest.mark.parametrize("outcome", ["broken", "first_byte_timeout", "status"])
def test_calls_of_one_program_that_fail_in_a_row_take_no_backend_from_the_others(outcome):
    """A poisonous request fails wherever it goes; that others fail too speaks against the backend."""
    h = host(backend("a", slots=9), attempts_max=1)
    for _ in range(7):
        h.arrive("poison")
        h.end_attempt(h.n_turns, outcome, status=500)
    assert h.router.backends.by_id["a"].health is UP
    for n in (2, 3):
        h.arrive(f"p{n}")
        h.end_attempt(h.n_turns, outcome, status=500)
        assert (h.router.backends.by_id["a"].health is DOWN) == (n == 3)


def test_trial_that_one_program_fails_again_ends_in_a_longer_cooldown():
    """On trial every failure counts, whoever had the last."""
    h = host(backend("a", slots=9), attempts_max=1)
    for n in range(3):
        h.arrive(f"p{n}")
        h.end_attempt(h.n_turns, "broken")
    h.after(1.0).wake()
    h.arrive("p2")
    h.end_attempt(h.n_turns, "broken")
    assert dict(h.router.agenda.dump())["retry:a"] == 3.0
