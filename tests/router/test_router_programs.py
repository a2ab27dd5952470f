"""A program's end: told, idle, out of budget, cancelled; verdicts in every order; what is remembered, and how long."""

import itertools

import pytest
from router_host import MODELS, Host, backend, find, kinds, make_stack

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.work import EndReason, ProgramState
from loadwise.policy.registry import PolicySpec
from loadwise.policy.reward import RewardSpec
from loadwise.router import program as programs
from loadwise.router.config import (
    DivertConfig,
    EscalationConfig,
    FeedbackConfig,
    SelectorConfig,
    TradeConfig,
)
from loadwise.router.program import TRANSITIONS


def host(*backends, verifiers=None, **router):
    """A host over these backends; one with a slot of the small model where none is said."""
    return Host(make_stack(*(backends or [backend("a", slots=1)]), verifiers=verifiers, **router))


def state_of(h, program_id="p"):
    """Where a program stands."""
    return h.router.table.by_id[program_id].state


def test_slot_and_reservation_are_free_before_the_verifier_runs():
    """Whoever waits is dispatched by the very event that ends the program."""
    h = host(verifiers={"patch": "command"})
    h.serve("p", task_type="patch")
    h.arrive("q")
    commands = h.finish("p")
    find(commands, c.Verify, program_id="p", verifier="command", task_type="patch")
    find(commands, c.Dispatch, program_id="q")
    assert state_of(h) is ProgramState.VERIFYING


def test_external_verifier_is_not_asked():
    """Somebody else reports."""
    h = host()
    h.serve("p", task_type="patch")
    assert kinds(h.finish("p")) == []


def test_verdict_teaches_once_and_closes():
    """Success, cost and reward are written down; the same again changes nothing (law L11)."""
    h = host(reward=RewardSpec(cost_weight=0.5, scale_usd=1e-4))
    h.serve("p", components=(0.5,) * 16)
    h.finish("p")
    credit = find(h.judge("p", "pass", 0.5), c.RecordCredit, program_id="p", model="small", success=0.5)
    assert credit.reward == pytest.approx(0.5 * 0.5 - 0.5 * credit.cost_usd / 1e-4)
    assert state_of(h) is ProgramState.CLOSED and h.router.credit.n_landed == 1
    assert not h.router.table.by_id["p"].components, "10,000 closed programs need no embedding"
    assert h.judge("p", "fail") == []
    assert h.router.counts.verdicts_stale == 1 and h.router.credit.n_landed == 1


def test_verdict_for_an_open_program_ends_it():
    """A verdict before the finish: no verifier is asked for what is known."""
    h = host(verifiers={"patch": "command"})
    h.serve("p", task_type="patch")
    h.arrive("p")
    commands = h.judge("p", "fail")
    assert kinds(commands) == ["CancelAttempt", "EndTurn", "RecordCredit"]
    find(commands, c.EndTurn, status=409, code="program_finished")
    assert h.router.table.by_id["p"].end_reason is EndReason.VERDICT


def test_verdict_for_a_program_that_had_no_answer_is_stale():
    """It is forgotten with the turn that the verdict cut off."""
    h = host()
    h.arrive("p")
    assert kinds(h.judge("p")) == ["CancelAttempt", "EndTurn"]
    assert not h.router.table.by_id and h.router.counts.verdicts_stale == 1


def test_verdict_for_an_unknown_program_is_counted():
    """Nothing else happens."""
    h = host()
    assert h.judge("nobody") == []
    assert h.router.counts.verdicts_stale == 1


def test_abstaining_is_not_zero():
    """The decision is undone; the learner has seen neither success nor failure."""
    h = host()
    h.serve("p")
    h.finish("p")
    assert kinds(h.judge("p", "abstain")) == []
    assert h.router.credit.learners[0].ridge.counts("small") == (0, 0)
    assert state_of(h) is ProgramState.CLOSED and h.router.counts.verdicts_abstained == 1


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_verdicts_in_any_order_find_their_decisions(order):
    """Credit belongs to the program, not to the time of its verdict."""
    h = host(backend("a"))
    for n in range(3):
        h.serve(f"p{n}")
        h.finish(f"p{n}")
    for n in order:
        credit = find(h.judge(f"p{n}", "pass", n / 4), c.RecordCredit)
        assert (credit.program_id, credit.decision_id, credit.success) == (f"p{n}", n + 1, n / 4)


def test_verdict_that_never_comes_is_censored():
    """Silence is not failure: undone after verdict_max_s; a later verdict is kept and not credited."""
    h = host(verdict_max_s=100.0)
    h.serve("p")
    h.finish("p")
    h.after(100.0).wake()
    assert state_of(h) is ProgramState.CENSORED
    assert h.router.counts.censored == 1 and not h.router.credit.pending_by_decision
    assert h.judge("p") == []
    assert h.router.counts.verdicts_late == 1 and h.router.table.by_id["p"].verdict is not None


def test_final_turn_ends_its_program():
    """No finish call is needed; other open turns are cut off."""
    h = host(backend("a"))
    h.arrive("p", is_final=True)
    h.arrive("p")
    commands = h.end_attempt(1)
    find(commands, c.EndTurn, turn_id=2, status=409)
    assert h.router.table.by_id["p"].end_reason is EndReason.FINAL


def test_final_turn_that_fails_leaves_its_program_open():
    """The client may try again."""
    h = host()
    h.serve("p")
    h.arrive("p", is_final=True)
    h.end_attempt(2, "idle_timeout", first_byte_at_s=0.0)
    assert h.router.table.by_id["p"].is_open


def test_idle_program_is_parked_and_then_ended():
    """Its room is free after park_s, itself after idle_s; a turn in between brings it back."""
    h = host(park_s=10.0, idle_s=100.0)
    h.serve("p")
    h.arrive("waiting")
    find(h.after(10.0).wake(), c.Dispatch, program_id="waiting")
    h.end_attempt(2)
    assert h.router.table.by_id["p"].is_open
    h.finish("waiting")
    find(h.after(50.0).arrive("p"), c.Dispatch, backend_id="a")
    h.end_attempt(3)
    h.after(10.0).wake()
    assert not h.router.table.by_id["p"].is_reserved, "parked anew, not only when it was first due to end"
    h.after(90.0).wake()
    assert h.router.table.by_id["p"].end_reason is EndReason.IDLE


def test_program_is_not_idle_while_a_turn_runs():
    """However long the engine takes."""
    h = host(park_s=10.0, idle_s=50.0)
    h.arrive("p")
    for _ in range(20):
        h.after(10.0).wake()
    assert h.router.table.by_id["p"].is_reserved
    h.end_attempt(1)
    h.after(49.0).wake()
    assert h.router.table.by_id["p"].is_open
    h.after(1.0).wake()
    assert not h.router.table.by_id["p"].is_open


def test_operators_cancel_teaches_nothing_and_asks_nobody():
    """State CANCELLED, the decision undone, no verifier; a later verdict is late."""
    h = host(verifiers={"patch": "command"})
    h.serve("p", task_type="patch")
    assert kinds(h.finish("p", EndReason.CANCELLED)) == []
    assert state_of(h) is ProgramState.CANCELLED and not h.router.credit.pending_by_decision
    h.judge("p")
    assert h.router.counts.verdicts_late == 1


@pytest.mark.parametrize("where", ["running", "held", "paced", "selector"])
@pytest.mark.parametrize("reason", [EndReason.FINISH, EndReason.CANCELLED])
def test_program_finished_before_any_answer_stays_finished(where, reason):
    """Its turn is told, its decision undone; a late turn is refused, a verdict earns nothing."""
    options = {
        "paced": {"feedback": FeedbackConfig(arm="sequential")},
        "selector": {"selector": SelectorConfig(url="http://selector")},
    }
    h = Host(make_stack(backend("a", slots=1), **options.get(where, {})))
    if where in ("held", "paced"):
        h.serve("other")
    h.arrive("p")
    find(h.finish("p", reason), c.EndTurn, status=409, code="program_finished")
    program = h.router.table.by_id["p"]
    assert program.state is ProgramState.CANCELLED and program.end_reason is reason
    assert set(h.router.credit.pending_by_decision) == ({1} if where in ("held", "paced") else set())
    assert h.finish("p", reason) == [] and h.router.counts.stale == 1
    find(h.arrive("p"), c.EndTurn, status=409, code="program_finished")
    assert h.judge("p", "pass") == [] and not program.is_credited and h.router.counts.verdicts_late == 1


@pytest.mark.parametrize(("credit", "rewards"), [("fail", [0.0]), ("censor", [])])
def test_program_out_of_budget_is_timed_out(credit, rewards):
    """Its turns end with 429; it teaches a failure or nothing, as configured."""
    h = host(budget_s=30.0, budget_credit=credit)
    h.serve("p")
    h.arrive("p")
    commands = h.after(30.0).wake()
    find(commands, c.CancelAttempt, turn_id=2)
    find(commands, c.EndTurn, turn_id=2, status=429, code="budget_exceeded")
    assert [command.reward for command in commands if type(command) is c.RecordCredit] == rewards
    assert state_of(h) is ProgramState.TIMED_OUT
    find(h.arrive("p"), c.EndTurn, status=409)
    assert kinds(h.judge("p")) == [] and h.router.counts.verdicts_late == 1


@pytest.mark.parametrize("is_late", [False, True])
def test_resolved_is_inside_the_budget_and_accepted(is_late):
    """A program that ended in time is credited whenever its verdict comes; a pass after the budget ran out is none."""
    h = host(budget_s=30.0)
    h.serve("p")
    if is_late:
        h.after(31.0).wake()
    else:
        h.after(29.0)
        h.finish("p")
        h.after(100.0).wake()
    credits = [command for command in h.judge("p", "pass") if type(command) is c.RecordCredit]
    assert [credit.success for credit in credits] == ([] if is_late else [1.0])
    assert h.router.table.by_id["p"].is_credited is not is_late


def test_budget_runs_while_the_program_waits():
    """A held program that never had an answer is remembered as timed out, not forgotten."""
    h = host(hold_max_s=500.0)
    h.arrive("running")
    h.arrive("p", budget_s=5.0)
    find(h.after(5.0).wake(), c.EndTurn, turn_id=2, status=429)
    assert state_of(h) is ProgramState.TIMED_OUT and not h.router.credit.learners[0].ridge.counts("small")[1]


@pytest.mark.parametrize("budget_s", [float("nan"), float("inf"), 0.0, -4.0])
def test_impossible_budget_is_none(budget_s):
    """Counted, and the default applies."""
    h = host(budget_s=7.0)
    h.arrive("p", budget_s=budget_s)
    assert h.router.counts.malformed == 1
    assert dict(h.router.agenda.dump())["budget:p"] == 7.0


def test_programs_without_a_verdict_are_bounded():
    """verifying_max: the one that has waited longest is censored."""
    h = host(backend("a"), verifying_max=2)
    for name in ("p", "q", "r"):
        h.serve(name)
        h.finish(name)
    assert state_of(h, "p") is ProgramState.CENSORED
    assert [state_of(h, name) for name in "qr"] == [ProgramState.VERIFYING] * 2


def test_open_programs_are_bounded():
    """programs_max: who is idle longest is ended; if all are busy the newcomer is refused."""
    h = host(backend("a"), programs_max=2)
    h.serve("p")
    h.after(1.0).serve("q")
    h.after(1.0).serve("p")
    h.arrive("r")
    assert not h.router.table.by_id["q"].is_open and h.router.table.by_id["p"].is_open
    h.arrive("p")
    find(h.arrive("s"), c.EndTurn, status=503, code="too_many_programs")


def test_closed_programs_are_archived_oldest_first():
    """closed_max bounds how many are remembered."""
    h = host(backend("a"), closed_max=2)
    for name in ("p", "q", "r"):
        h.serve(name)
        h.finish(name)
    for name in ("q", "p"):
        assert not [command for command in h.judge(name) if type(command) is c.Archive]
    archived = find(h.judge("r"), c.Archive).program
    assert (archived.program_id, archived.state, archived.is_credited) == ("q", ProgramState.CLOSED, True)
    assert "q" not in h.router.table.by_id


def test_closed_programs_are_archived_after_an_hour():
    """closed_s bounds how long; each at its own time."""
    h = host(backend("a"), closed_s=3600.0)
    for name in ("p", "q"):
        h.serve(name)
        h.finish(name)
        h.judge(name)
        h.after(100.0)
    assert find(h.after(3400.0).wake(), c.Archive).program.program_id == "p"
    assert h.timer_at_s == 3700.0
    find(h.after(100.0).wake(), c.Archive)
    assert not h.router.table.by_id and len(h.router.agenda) == 0


def test_costly_propensities_are_written_when_the_program_ends():
    """Thompson sampling estimates them off the decision path, whichever way the program ends."""
    for end in (Host.finish, lambda h: h.finish(reason=EndReason.CANCELLED), lambda h: h.after(30.0).wake()):
        h = host(
            backend("a"), backend("b", "large"), policy=PolicySpec(name="lints"), budget_s=30.0, budget_credit="fail"
        )
        decision = find(h.arrive("p"), c.RecordDecision)
        assert [view.propensity for view in decision.candidates] == [None, None]
        h.end_attempt(1)
        commands = end(h)
        written = find(commands, c.RecordPropensities, decision_id=decision.decision_id).propensities
        assert sum(written) == pytest.approx(1.0) and min(written) > 0.0


def test_repeated_end_changes_nothing():
    """Finish twice, or of nobody: counted."""
    h = host()
    h.serve("p")
    h.finish("p")
    assert h.finish("p") == [] and h.finish("nobody") == []
    assert h.router.counts.stale == 2


def test_every_transition_of_the_table_is_reachable(monkeypatch):
    """The table permits nothing that cannot happen, and a random course stays within it (`test_router_storm`)."""
    seen = set()
    move = programs.Program.move

    def spy(program, state):
        seen.add((program.state, state))
        move(program, state)

    monkeypatch.setattr(programs.Program, "move", spy)
    for scene in SCENES:
        scene()
    missing = {(start, end) for start, ends in TRANSITIONS.items() for end in ends} - seen
    assert not missing, sorted(f"{start} -> {end}" for start, end in missing)


def _arrived_exits():
    h = host(feedback=FeedbackConfig(arm="sequential"), hold_max_s=10.0)
    h.serve("first")
    h.arrive("rejected")
    h.arrive("cancelled")
    h.abandon(3)
    h.arrive("timed out", budget_s=5.0)
    h.after(5.0).wake()
    h.after(5.0).wake()


def _routed_with_a_side_turn_only(ending):
    """The program's own turn meets a full order, while its turn pinned to a third model runs on."""

    def scene():
        models = {**MODELS, "tiny": MODELS["small"]}
        backends = [backend("a", slots=1), backend("b", "large", slots=1), backend("t", "tiny")]
        selector = SelectorConfig(url="http://selector")
        h = Host(make_stack(*backends, models=models, selector=selector, held_max=1, budget_s=30.0))
        h.arrive("on a", model="small")
        h.arrive("on b", model="large")
        h.arrive("held for b", model="large")
        h.arrive("p")
        h.arrive("p", model="tiny")
        h.send(e.SelectorAnswered(at_s=0.0, decision_id=next(iter(h.asked)), model="small"))
        assert state_of(h) is ProgramState.ROUTED and 5 in h.running
        ending(h)

    return scene


def _held_exits():
    h = host(backend("a", slots=1), backend("b", "large"), hold_max_s=10.0)
    for name in ("running", "evicted", "cancelled", "failed", "ended", "timed out"):
        h.arrive(name, model="small", budget_s=8.0 if name == "timed out" else None)
    h.arrive("failed", model="large")
    h.arrive("ended", model="large")
    h.abandon(3)
    h.abandon(4)
    h.end_attempt(7, "status", status=400)
    h.end_attempt(8)
    h.finish("ended")
    h.after(8.0).wake()
    h.after(2.0).wake()


def _running_exits():
    h = host(backend("a"), backend("b", "large", slots=1), hold_max_s=10.0, budget_s=100.0)
    h.arrive("on b", model="large")
    h.arrive("rejected", model="small")
    h.arrive("rejected", model="large")
    h.abandon(2)
    h.arrive("failed", model="small")
    h.end_attempt(4, "status", status=400)
    h.arrive("cancelled", model="small")
    h.abandon(5)
    h.after(10.0).wake()
    h.after(90.0).wake()


def _routed_and_refused():
    h = host(held_max=1)
    for name in ("running", "held", "refused"):
        h.arrive(name)


def _fall_back():
    h = host(backend("a"), backend("b", "large"))
    h.arrive("p")
    h.end_attempt(1, "status", status=500)


def _wait_for_another_replica():
    h = host(backend("a", slots=1), backend("b", slots=1))
    h.arrive("p")
    h.arrive("q")
    h.end_attempt(1, "idle_timeout")
    h.abandon(2)


def _verdicts():
    h = host(backend("a"), verdict_max_s=10.0)
    h.serve("closed")
    h.judge("closed")
    h.serve("censored")
    h.finish("censored")
    h.after(10.0).wake()
    h.judge("censored", is_correction=True)


def _divert_while_held():
    """A program that is held for one model starts on another as soon as that has room."""
    h = host(
        backend("a", slots=1),
        backend("b", "large", slots=1),
        policy=PolicySpec(name="known", options={"success": {"small": {"*": 0.9}, "large": {"*": 0.8}}}),
        divert=DivertConfig(when="held"),
        trade=TradeConfig(beta=0.5),
    )
    h.arrive("p")
    assert find(h.arrive("q"), c.Dispatch).model == "large"
    h.arrive("r")
    h.end_attempt(2)
    moved = h.finish("q")
    assert find(moved, c.RecordDecision).routed == "small"
    assert find(moved, c.Dispatch).model == "large"


def _another_attempt():
    h = host(backend("a"), backend("b", "large"), escalation=EscalationConfig(optimism=9.0))
    h.serve("p")
    h.judge("p", "fail")


def _fail_side(h):
    h.end_attempt(5, "status", status=400)


def _answer_side_and_finish(h):
    h.end_attempt(5)
    h.finish("p")


SCENES = [
    _arrived_exits,
    _routed_with_a_side_turn_only(_fail_side),
    _routed_with_a_side_turn_only(lambda h: h.abandon(5)),
    _routed_with_a_side_turn_only(lambda h: h.after(30.0).wake()),
    _routed_with_a_side_turn_only(_answer_side_and_finish),
    _held_exits,
    _running_exits,
    _routed_and_refused,
    _fall_back,
    _wait_for_another_replica,
    _verdicts,
    _divert_while_held,
    _another_attempt,
]


@pytest.mark.parametrize("verdict", ["pass", "fail"])
def test_program_on_which_two_models_have_worked_teaches_nothing(verdict):
    """The verdict is recorded, the decision undone: neither model has earned it alone (law L11)."""
    h = Host(make_stack(backend("s", "small"), backend("l", "large")))
    h.serve("p")
    other = "large" if h.router.table.by_id["p"].model == "small" else "small"
    h.serve("p", model=other)
    h.serve("q")
    h.finish("p")
    assert "RecordCredit" not in kinds(h.judge("p", verdict))
    program = h.router.table.by_id["p"]
    assert program.verdict is not None and not program.is_credited and program.reward is None
    assert (h.router.credit.n_landed, h.router.credit.n_undone) == (0, 1)
    find(h.judge("q", verdict), c.RecordCredit, program_id="q")


def test_side_turn_without_an_answer_leaves_the_credit_where_it_was():
    """Nothing of another model has gone into the program."""
    h = Host(make_stack(backend("s", "small"), backend("l", "large")))
    h.serve("p")
    other = "large" if h.router.table.by_id["p"].model == "small" else "small"
    h.arrive("p", model=other)
    h.abandon(2)
    find(h.judge("p"), c.RecordCredit, program_id="p")
