"""Further attempts: offered on the verifier's word only, within every budget, each credited once, never for ever."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from router_host import Host, backend, encoded, find, make_stack, matches

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.errors import ConfigError
from loadwise.kernel.pool import ModelSpec, Price
from loadwise.kernel.work import EndReason, ProgramState, Verdict, VerdictKind
from loadwise.policy.registry import PolicySpec
from loadwise.router.config import DivertConfig, EscalationConfig, FeedbackConfig

EAGER = EscalationConfig(optimism=9.0)
"""Tries every model that it does not know."""
THREE = {name: ModelSpec(usd_per_million=Price(input=1.0, output=1.0)) for name in ("small", "large", "huge")}


def host(*, n_models: int = 2, escalation: EscalationConfig | None = EAGER, **router: Any) -> Host:
    """A backend a model; the first choice is always `small`."""
    backends = [backend(f"b{name}", name) for name in list(THREE)[:n_models]]
    models = {name: THREE[name] for name in list(THREE)[:n_models]}
    router.setdefault("policy", PolicySpec(name="fixed", options={"candidate": "small"}))
    return Host(make_stack(*backends, models=models, escalation=escalation, **router))


def fail(h: Host, program_id: str = "p", **fields: Any) -> list[c.Command]:
    """The verifier fails the program."""
    verdict = Verdict(verdict=VerdictKind.FAIL, **fields)
    return h.send(e.VerdictArrived(at_s=h.now_s, program_id=program_id, verdict=verdict))


def program(h: Host, program_id: str = "p") -> Any:
    return h.router.table.by_id[program_id]


def failed_once(**router: Any) -> Host:
    """Served, finished, failed."""
    h = host(**router)
    h.serve("p")
    h.finish("p")
    fail(h)
    return h


def test_a_failed_program_opens_again_on_another_model() -> None:
    """The attempt is credited to the model that ran it, and the next one is a decision of its own."""
    h = host()
    assert find(h.arrive("p"), c.RecordDecision).chosen == "small"
    h.end_attempt(1)
    h.finish("p")
    commands = fail(h)
    credit = find(commands, c.RecordCredit)
    decision = find(commands, c.RecordDecision, reason="escalation")
    assert (credit.model, credit.success, credit.decision_id) == ("small", 0.0, 1)
    assert decision.chosen == "large" and decision.decision_id == 2
    assert program(h).is_open and program(h).model == "large"
    find(h.arrive("p"), c.Dispatch, model="large", decision_id=decision.decision_id)


def test_an_attempt_runs_from_its_own_start() -> None:
    """What the first attempt took, and the wait for its verdict, are not the second's run time."""
    h = host()
    h.arrive("p")
    h.after(40.0).end_attempt(1)
    h.finish("p")
    h.after(500.0)
    fail(h)
    h.after(60.0).arrive("p")
    h.after(7.0).end_attempt(2)
    h.finish("p")
    demand = h.router.admission.demand_by_model
    assert (demand["small"].recent_runs_s, demand["large"].recent_runs_s) == ([40.0], [7.0])


def test_the_second_attempt_is_judged_and_credited_on_its_own() -> None:
    """Its cost is its own; the learner of first choices does not hear of it, the ladder does."""
    h = failed_once()
    first_usd = program(h).attempts[0].cost_usd
    learner = h.router.credit.learners[0]
    before = learner.dump()
    h.serve("p")
    h.finish("p")
    credit = find(h.judge("p", "pass"), c.RecordCredit)
    assert (credit.model, credit.success) == ("large", 1.0)
    assert credit.cost_usd == pytest.approx(first_usd)  # the same tokens at the same price, once and not twice
    assert program(h).state is ProgramState.CLOSED and program(h).cost_usd == pytest.approx(2 * first_usd)
    assert learner.dump() == before


@pytest.mark.parametrize("n_models", [2, 3])
def test_no_program_is_tried_for_ever(n_models: int) -> None:
    """Every attempt takes a model of its own, and there are no more than `attempts_max`."""
    h = host(n_models=n_models, escalation=EscalationConfig(attempts_max=8, optimism=9.0))
    for _ in range(n_models):
        h.serve("p")
        h.finish("p")
        fail(h)
    found = program(h)
    assert found.state is ProgramState.CLOSED
    assert len({found.model, *(attempt.model for attempt in found.attempts)}) == n_models
    h = host(n_models=3)
    for _ in range(2):
        h.serve("p")
        h.finish("p")
        fail(h)
    assert program(h).state is ProgramState.CLOSED and len(program(h).attempts) == 1


def test_without_a_configuration_a_verdict_is_the_last_word() -> None:
    """The default, and preset oracle."""
    h = host(escalation=None)
    h.serve("p")
    h.finish("p")
    assert not [command for command in fail(h) if type(command) is c.RecordDecision]
    assert program(h).state is ProgramState.CLOSED


@pytest.mark.parametrize("verdict", ["pass", "abstain"])
def test_only_a_fail_escalates(verdict: str) -> None:
    """What passed is done, and silence says nothing."""
    h = host()
    h.serve("p")
    h.finish("p")
    h.judge("p", verdict)
    assert not program(h).is_open and not program(h).attempts


def test_an_agents_own_opinion_escalates_nothing() -> None:
    """A verdict under the name `agent` is written by the agent."""
    h = host()
    h.serve("p")
    h.finish("p")
    fail(h, verifier="agent")
    assert program(h).state is ProgramState.CLOSED


def test_a_pinned_program_stays_where_its_client_put_it() -> None:
    """The client chose the model."""
    h = host()
    h.serve("p", model="small")
    h.finish("p")
    fail(h)
    assert program(h).state is ProgramState.CLOSED


def test_a_program_on_which_two_models_worked_is_not_tried_again() -> None:
    """Nobody's failure."""
    h = host()
    h.serve("p")
    h.serve("p", model="large")
    h.finish("p")
    fail(h)
    assert program(h).state is ProgramState.CLOSED


def test_money_bounds_the_attempts() -> None:
    """No attempt begins that is expected to reach the limit, also where the program has reached it already."""
    h = failed_once(escalation=EscalationConfig(optimism=9.0, cost_max_usd=1e-9))
    assert program(h).state is ProgramState.CLOSED
    h = failed_once(escalation=EscalationConfig(optimism=9.0, cost_max_usd=1.0))
    assert program(h).is_open


def test_time_bounds_the_attempts() -> None:
    """The budget of the program goes on over its attempts; none begins after its end, none outlives it."""
    h = host(budget_s=100.0)
    h.serve("p")
    h.finish("p")
    h.after(100.0)
    fail(h)
    assert program(h).state is ProgramState.CLOSED
    h = host(budget_s=100.0)
    h.serve("p")
    h.finish("p")
    h.after(60.0)
    fail(h)
    h.serve("p")
    h.after(40.0).wake()
    assert program(h).state is ProgramState.TIMED_OUT


def test_an_offer_that_nobody_takes_is_withdrawn() -> None:
    """Idle, finished or out of time: the program is closed under the verdict that it has, credited as it was."""
    ends: list[tuple[float | None, Any]] = [
        (None, lambda h: h.after(901.0).wake()),
        (None, lambda h: h.finish("p")),
        (50.0, lambda h: h.after(50.0).wake()),
    ]
    for budget_s, end in ends:
        h = failed_once(budget_s=budget_s)
        end(h)
        found = program(h)
        assert found.state is ProgramState.CLOSED and found.model == "small" and found.is_credited
        assert found.verdict is not None and not found.attempts
        assert not h.router.credit.pending_by_decision


def test_a_verdict_said_again_is_not_the_next_attempts() -> None:
    """Not before the attempt begins, and under the same id not afterwards either."""
    h = host()
    h.serve("p")
    h.finish("p")
    fail(h, verdict_id="v1")
    n = h.router.counts.verdicts_stale
    assert not [command for command in fail(h, verdict_id="v1") if type(command) is c.RecordCredit]
    h.serve("p")
    fail(h, verdict_id="v1")
    assert program(h).is_open and h.router.counts.verdicts_stale == n + 2
    fail(h, verdict_id="v2")
    assert program(h).state is ProgramState.CLOSED


def test_a_persons_word_withdraws_the_offer() -> None:
    """A correction of the verdict that led to it: the first attempt was right after all."""
    h = failed_once()
    verdict = Verdict(verdict=VerdictKind.PASS, verifier="human")
    commands = h.send(e.VerdictArrived(at_s=h.now_s, program_id="p", verdict=verdict))
    find(commands, c.RecordCredit, model="small", success=1.0)
    assert program(h).state is ProgramState.CLOSED and program(h).verdict == verdict


def judged(h: Host, *kinds: VerdictKind) -> None:
    """Serve an attempt and judge it, then correct that by the words that follow."""
    h.serve("p")
    h.finish("p")
    for number, kind in enumerate(kinds):
        verdict = Verdict(verdict=kind, is_correction=number > 0)
        h.send(e.VerdictArrived(at_s=h.now_s, program_id="p", verdict=verdict))


def beliefs(h: Host) -> list[float]:
    """Means and widths of all that the ladder believes of the two models."""
    ladder = h.router.desk.ladder
    assert ladder is not None
    x = h.router.desk.routing.context(program(h))
    asked = {"first": ["small", "large"], "next": ["small\x1flarge"], "cost": ["small", "large"]}
    told = [ladder._part[name].estimate(x, names) for name, names in asked.items()]
    return [number for means, spreads in told for number in (*means, *spreads)]


@pytest.mark.parametrize("before", [[], [VerdictKind.FAIL]])
@pytest.mark.parametrize("last", [VerdictKind.PASS, VerdictKind.FAIL, VerdictKind.ABSTAIN])
def test_a_corrected_verdict_is_taken_back_from_the_ladder(before: list[VerdictKind], last: VerdictKind) -> None:
    """The ladder then is as if only the last word had been said: of first attempts and of further ones."""
    first = {VerdictKind.PASS: VerdictKind.FAIL, VerdictKind.FAIL: VerdictKind.PASS}.get(last, VerdictKind.PASS)
    corrected, plain, misled = host(), host(), host()
    for h in (corrected, plain, misled):
        for kind in before:
            judged(h, kind)
    judged(corrected, first, VerdictKind.ABSTAIN, last)
    judged(plain, last)
    judged(misled, first)
    assert beliefs(corrected) == pytest.approx(beliefs(plain), abs=1e-9)
    assert beliefs(misled) != pytest.approx(beliefs(plain), abs=1e-3)


def test_a_ladder_that_began_anew_is_not_told_to_take_back() -> None:
    """Under other rates the dump's ladder is left behind; a correction of what it was taught breaks nothing."""
    h = failed_once()
    twin = host(escalation=EscalationConfig(optimism=9.0, false_pass=0.1, false_fail=0.1))
    twin.stack.load(h.stack.dump())
    ladder = twin.router.desk.ladder
    assert ladder is not None
    before = ladder.dump()
    verdict = Verdict(verdict=VerdictKind.PASS, verifier="human")
    twin.stack.handle(e.VerdictArrived(at_s=h.now_s, program_id="p", verdict=verdict))
    assert twin.router.desk.ladder is not None and twin.router.desk.ladder.dump() == before


@pytest.mark.parametrize("audited", [False, True])
def test_a_persons_sample_tells_how_often_the_verifier_is_wrong(audited: bool) -> None:
    """Only where it is said to be a random sample; the agent's opinion and abstentions are no verifier's word."""
    h = host(escalation=EscalationConfig(audited=audited, optimism=0.0))
    said = [("pass", "fail"), ("fail", "fail")] * 6 + [("fail", "pass"), ("pass", "pass"), ("pass", "pass")] * 4
    said += [("abstain", "pass"), ("pass", "abstain")]
    for number, (machine, person) in enumerate(said):
        name = f"p{number}"
        h.serve(name)
        h.finish(name)
        h.judge(name, machine)
        verdict = Verdict(verdict=VerdictKind(person), verifier="human")
        h.send(e.VerdictArrived(at_s=h.now_s, program_id=name, verdict=verdict))
    ladder = h.router.desk.ladder
    assert ladder is not None
    if not audited:
        assert ladder.rates is None
        return
    # Of 12 wrong ones 6 passed, of 12 right ones 4 failed; five of the assumed .15 count with them.
    assert ladder.rates == pytest.approx(((6 + 0.75) / 17, (4 + 0.75) / 17))


def test_what_does_not_pay_is_not_tried() -> None:
    """After attempts that never brought anything the ladder stops, and where they do it goes on."""
    for second, is_open in (("pass", True), ("fail", False)):
        h = host(escalation=EscalationConfig(false_pass=0.0, false_fail=0.2, optimism=0.3))
        for number in range(40):
            name = f"p{number}"
            h.serve(name)
            h.finish(name)
            fail(h, name)
            if program(h, name).is_open:
                h.serve(name)
                h.finish(name)
                h.judge(name, second)
                passed = f"right{number}"  # first attempts are right now and then, so a fail may be a mistake
                h.serve(passed)
                h.finish(passed)
                h.judge(passed, "pass")
        h.serve("last")
        h.finish("last")
        fail(h, "last")
        assert program(h, "last").is_open is is_open


def test_a_stuck_program_is_moved_at_its_next_turn() -> None:
    """By our own counts: turns, failed turns, seconds. The attempt given up is undone."""
    limits: list[dict[str, Any]] = [{"turns_max": 2}, {"failed_turns_max": 1}, {"stall_s": 30.0}]
    for limit in limits:
        h = host(escalation=EscalationConfig(optimism=9.0, **limit))
        h.serve("p")
        if "failed_turns_max" in limit:
            h.arrive("p")
            h.abandon(h.n_turns)
        else:
            h.serve("p")
        h.after(30.0 if "stall_s" in limit else 0.0)
        commands = h.arrive("p")
        find(commands, c.RecordDecision, reason="escalation", chosen="large")
        find(commands, c.Dispatch, model="large")
        assert program(h).attempts[0].verdict is None and not program(h).attempts[0].is_credited
        h.end_attempt(h.n_turns)
        h.finish("p")
        find(h.judge("p"), c.RecordCredit, model="large")


def test_a_dump_continues_in_the_middle_of_an_escalation() -> None:
    """Attempts, and what the ladder learned, are part of the state."""
    h = failed_once()
    twin = host().stack
    twin.load(h.stack.dump())
    assert encoded(twin.handle(e.TurnArrived(at_s=1.0, turn_id=9, program_id="p"))) == encoded(
        h.stack.handle(e.TurnArrived(at_s=1.0, turn_id=9, program_id="p"))
    )
    assert twin.dump() == h.stack.dump()


def test_a_slot_is_kept_until_the_last_attempt() -> None:
    """Sequential feedback: the next program waits for the verdict that ends this one."""
    h = failed_once(feedback=FeedbackConfig(arm="sequential"))
    assert not [command for command in h.arrive("q") if type(command) is c.RecordDecision]
    h.serve("p")
    h.finish("p")
    assert [command for command in h.judge("p") if matches(command, c.RecordDecision, program_id="q")]


def test_l11_attempts_are_checked() -> None:
    """A model tried twice, or a decision still pending behind the attempt at hand, is noticed."""
    from loadwise.kernel.errors import LawBroken

    for spoil in (
        lambda found: setattr(found, "model", "small"),
        lambda found: found.attempts.extend(found.attempts * 9),
    ):
        h = failed_once()
        spoil(program(h))
        with pytest.raises(LawBroken):
            h.stack.check()


@pytest.mark.parametrize(
    "said",
    [{"attempts_max": 1}, {"attempts_max": 9}, {"cost_max_usd": -1.0}, {"stall_s": float("nan")}, {"false_pass": 0.1}],
)
def test_a_wrong_configuration_is_refused(said: dict[str, Any]) -> None:
    """The message names the key."""
    with pytest.raises(ConfigError, match=r"router\.escalation"):
        EscalationConfig(**said)


def test_end_reason_of_a_withdrawn_offer_is_how_it_ended() -> None:
    """Finish of an offer that has not begun."""
    h = failed_once()
    h.finish("p")
    assert program(h).end_reason is EndReason.FINISH


STEPS = st.sampled_from(["serve", "serve", "finish", "fail", "fail", "again", "pass", "human", "lose", "wait", "wake"])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    steps=st.lists(st.tuples(STEPS, st.sampled_from(["p", "q"])), max_size=40),
    escalation=st.sampled_from(
        [
            EAGER,
            EscalationConfig(attempts_max=3, optimism=9.0, turns_max=2),
            EscalationConfig(attempts_max=8, optimism=9.0, stall_s=1.0, cost_max_usd=5e-4),
        ]
    ),
    budget_s=st.sampled_from([None, 200.0]),
    arm=st.sampled_from(["delayed", "sequential"]),
)
def test_laws_hold_over_any_course_of_attempts(
    steps: list[tuple[str, str]], escalation: EscalationConfig, budget_s: float | None, arm: Any
) -> None:
    """Attempts are bounded, on distinct models, credited once each; money and time hold; a dump continues alike.

    `Host.send` checks every law after every event.
    """
    options: dict[str, Any] = {"budget_s": budget_s, "feedback": FeedbackConfig(arm=arm), "idle_s": 500.0}
    h = host(n_models=3, escalation=escalation, **options)
    for step, name in steps:
        found = h.router.table.by_id.get(name)
        match step:
            case "serve":
                h.arrive(name)
                if h.n_turns in h.running:
                    h.end_attempt(h.n_turns)
            case "finish":
                h.finish(name)
            case "lose":
                h.arrive(name)
                if h.n_turns in h.open:
                    h.abandon(h.n_turns)
            case "wait":
                h.after(70.0)
            case "wake":
                h.after(30.0).wake()
            case _:
                if found is not None:
                    kind = VerdictKind.PASS if step in ("pass", "human") else VerdictKind.FAIL
                    verifier = "human" if step == "human" else "code"
                    said = Verdict(verdict=kind, verifier=verifier, verdict_id="same" if step == "again" else "")
                    h.send(e.VerdictArrived(at_s=h.now_s, program_id=name, verdict=said))
        for program_id, one in h.router.table.by_id.items():
            assert len(one.attempts) < escalation.attempts_max, program_id
            if budget_s is not None and one.is_open:
                assert h.now_s <= one.arrived_at_s + budget_s + 70.0  # what is due is done at the next event
    twin = host(n_models=3, escalation=escalation, **options).stack
    twin.load(h.stack.dump())
    assert twin.dump() == h.stack.dump()
    h.after(5000.0).wake()
    h.after(5000.0).wake()
    assert not h.router.table.n_open and not h.router.credit.pending_by_decision


def test_a_second_attempt_that_falls_silent_ends_when_an_idle_program_does() -> None:
    """Its new place does not put its end off to when a program is parked, where that is later."""
    h = host(idle_s=6.0, park_s=120.0)
    h.serve("p")
    h.finish("p")
    fail(h)
    h.serve("p")
    for _ in range(4):
        h.after(3.0)
        h.wake()
    assert program(h).state is ProgramState.VERIFYING and program(h).end_reason is EndReason.IDLE


def test_no_attempt_comes_back_to_a_model_that_failed_it() -> None:
    """Where the second attempt's backend dies, the program is not read anew where its first attempt has failed."""
    for rebinds in (False, True):
        h = failed_once(divert=DivertConfig(when="held", rebinds=rebinds), hold_max_s=10.0)
        h.serve("p")
        assert program(h).model == "large"
        h.set_health("blarge", "down")
        h.arrive("p")
        assert program(h).model == "large" and not h.running


def test_no_program_is_opened_again_beyond_the_limit() -> None:
    """At `programs_max` open ones a failed program stays closed."""
    h = host(programs_max=1)
    h.serve("p")
    h.finish("p")
    h.arrive("q")
    fail(h)
    assert program(h).state is not ProgramState.ARRIVED and h.router.counts.escalated == 0
