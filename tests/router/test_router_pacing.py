"""The four feedback arms, and the user's selector."""

import math

import pytest
from router_host import Host, backend, find, kinds, make_stack

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.pool import BackendHealth
from loadwise.kernel.work import EndReason
from loadwise.policy.registry import PolicySpec
from loadwise.router.config import FeedbackConfig, SelectorConfig
from loadwise.router.pacing import Pacing


def host(arm="delayed", size=1, **router):
    """A host with room for everybody, so that only the arm holds programs back."""
    return Host(make_stack(backend("a"), backend("b", "large"), feedback=FeedbackConfig(arm=arm, size=size), **router))


def started(commands):
    """Programs routed by these commands, in order."""
    return [command.program_id for command in commands if type(command) is c.RecordDecision]


def test_delayed_starts_everybody_at_once():
    """Verdicts land whenever they come."""
    h = host()
    assert [started(h.arrive(name)) for name in "pqr"] == [["p"], ["q"], ["r"]]
    assert not h.router.pacing.slot_by_program


def test_sequential_starts_the_next_when_the_verdict_has_landed():
    """Not when the program ends."""
    h = host("sequential")
    h.serve("p")
    assert started(h.arrive("q")) == []
    assert started(h.finish("p")) == []
    assert started(h.judge("p")) == ["q"]


def test_batch_sync_starts_exactly_its_size_and_waits_for_all_verdicts():
    """The next batch starts together, in order of arrival."""
    h = host("batch_sync", size=2)
    h.serve("p")
    h.serve("q")
    for name in "rst":
        assert started(h.arrive(name)) == []
    assert started(h.judge("q")) == []
    assert started(h.judge("p")) == ["r", "s"]
    assert list(h.router.pacing.waiting) == ["t"]


def test_batch_that_is_not_full_takes_late_comers():
    """A batch has a size, not a time: it is full with the second, whenever that comes."""
    h = host("batch_sync", size=2)
    h.serve("p")
    h.judge("p")
    assert started(h.arrive("q")) == ["q"]
    assert started(h.arrive("r")) == []


def test_per_slot_learners_see_only_their_own_verdicts():
    """Two slots, two learners; a slot takes its next program after its verdict."""
    h = host("per_slot", size=2)
    h.serve("p")
    h.serve("q")
    assert started(h.arrive("r")) == []
    commands = h.judge("q", "pass")
    assert find(commands, c.RecordDecision, program_id="r").slot == 1
    first, second = h.router.credit.learners
    assert first.ridge.counts("small")[1] == 0 and second.ridge.counts("small")[1] == 1
    h.judge("p", "fail")
    assert (
        first.ridge.counts("small") == (1, 1) and sum(n for n, _ in map(second.ridge.counts, ("small", "large"))) == 2
    )


@pytest.mark.parametrize("arm", ["sequential", "batch_sync", "per_slot"])
@pytest.mark.parametrize("how", ["censored", "failed", "abandoned", "timed out", "cancelled", "abstained"])
def test_program_that_will_never_be_judged_makes_way(arm, how):
    """Every way out resolves it: nobody waits for a verdict that cannot come."""
    h = host(arm, verdict_max_s=5.0, budget_s=20.0 if how == "timed out" else None)
    h.arrive("p")
    if how not in ("failed", "abandoned"):
        h.end_attempt(1)
    h.arrive("q", budget_s=1000.0)
    commands = {
        "censored": lambda: [h.finish("p"), h.after(5.0).wake()][1],
        "failed": lambda: h.end_attempt(1, "status", status=400),
        "abandoned": lambda: h.abandon(1),
        "timed out": lambda: h.after(20.0).wake(),
        "cancelled": lambda: h.finish("p", EndReason.CANCELLED),
        "abstained": lambda: h.judge("p", "abstain"),
    }[how]()
    assert started(commands) == ["q"]


def test_pinned_programs_pass_the_gate():
    """There is nothing to decide."""
    h = host("sequential")
    h.serve("p")
    assert started(h.arrive("q", model="small")) == ["q"]


def test_waiting_at_the_gate_is_bounded():
    """hold_max_s holds there as well, and who gave up is not started."""
    h = host("sequential", hold_max_s=10.0)
    h.serve("p")
    h.arrive("q")
    h.after(5.0).arrive("r")
    find(h.after(5.0).wake(), c.EndTurn, turn_id=2, code="held_too_long")
    assert started(h.judge("p")) == ["r"]
    assert h.router.table.by_id["r"].wait_s == 5.0


def test_programs_waiting_at_the_gate_are_refused_when_every_backend_is_gone():
    """All of them, each once."""
    h = host("sequential")
    h.serve("p")
    for name in "qr":
        h.arrive(name)
    for name in "ab":
        h.set_health(name, BackendHealth.DOWN)
    assert kinds(h.judge("p")) == ["RecordCredit", "EndTurn", "EndTurn"]


def test_gate_takes_over_the_state_of_another_arm():
    """After a restart under another arm nobody waits for ever, and no slot is counted that is not there."""
    slots = Pacing(FeedbackConfig(arm="per_slot", size=3))
    for name in "abcd":
        slots.enter(name)
    fewer, delayed = Pacing(FeedbackConfig(arm="per_slot", size=2)), Pacing(FeedbackConfig())
    fewer.load(slots.dump())
    assert fewer.slot_by_program == {"a": 0, "b": 1} and not fewer.next_may_start
    delayed.load(slots.dump())
    assert not delayed.slot_by_program and delayed.next() == ("d", 0) and delayed.next() is None


# --- the user's selector ---


def selecting(**router):
    """A host that asks a selector."""
    return host(selector=SelectorConfig(url="http://selector", timeout_s=2.0), **router)


def answer(h, model=None, propensity=None):
    """The selector answers what it was asked last."""
    decision_id = max(h.asked)
    return h.send(e.SelectorAnswered(at_s=h.now_s, decision_id=decision_id, model=model, propensity=propensity))


def test_selector_is_asked_and_its_word_taken():
    """With its own propensity, under the decision that it was asked for."""
    h = selecting()
    asked = find(h.arrive("p", domain="retail"), c.AskSelector, program_id="p", candidates=("small", "large"))
    assert asked.timeout_s == 2.0 and asked.domain == "retail"
    commands = answer(h.after(1.0), "large", 0.25)
    decision = find(commands, c.RecordDecision, reason="selector", chosen="large", decision_id=asked.decision_id)
    assert [view.propensity for view in decision.candidates] == [0.75, 0.25]
    find(commands, c.Dispatch, wait_s=1.0)


@pytest.mark.parametrize("propensity", [math.nan, 0.0, -1.0, 1.5, math.inf])
def test_impossible_propensity_of_a_selector_is_left_out(propensity):
    """Its propensity is unknown, and the error is counted."""
    h = selecting()
    h.arrive("p")
    decision = find(answer(h, "large", propensity), c.RecordDecision)
    assert [view.propensity for view in decision.candidates] == [None, None]
    assert h.router.counts.malformed == 1


def test_choice_of_a_selector_that_tells_no_propensity_is_not_called_certain():
    """What-if must not weigh it as if it could not have been otherwise; of one candidate there is no other."""
    h = selecting()
    h.arrive("p")
    assert [view.propensity for view in find(answer(h, "large"), c.RecordDecision).candidates] == [None, None]
    h.end_attempt(1)
    assert not [command for command in h.finish("p") if type(command) is c.RecordPropensities]
    h.set_health("b", BackendHealth.DOWN)
    h.arrive("q")
    assert [view.propensity for view in find(answer(h, "small"), c.RecordDecision).candidates] == [1.0]


def test_costly_propensities_of_a_forgotten_program_are_recorded():
    """Its decision was made, and what-if counts decisions."""
    h = Host(make_stack(backend("a"), backend("b", "large"), policy=PolicySpec(name="lints")))
    h.arrive("p")
    find(h.abandon(1), c.RecordPropensities, decision_id=1)
    h.arrive("q")
    commands = h.end_attempt(2, "status", status=500)
    assert kinds(commands) == ["RecordPropensities", "RecordDecision", "Dispatch"]


@pytest.mark.parametrize("said", [None, "gpt-17"])
def test_policy_decides_where_the_selector_does_not(said):
    """It failed, or named nothing that can run."""
    h = selecting()
    h.arrive("p")
    find(answer(h, said), c.RecordDecision, reason="selector_fallback", chosen="small")


def test_selector_that_takes_too_long_is_not_waited_for():
    """The policy decides on time, and the late answer is stale."""
    h = selecting()
    h.arrive("p")
    asked = dict(h.asked)
    find(h.after(2.0).wake(), c.RecordDecision, reason="selector_fallback", decision_id=1)
    h.asked = asked
    assert answer(h, "large") == [] and h.router.counts.stale == 1


def test_answer_for_a_client_that_left_is_stale():
    """Neither does it bind a new program of the same name."""
    h = selecting()
    h.arrive("p")
    h.abandon(1)
    assert not h.router.asked
    h.arrive("p")
    stale = e.SelectorAnswered(at_s=0.0, decision_id=1, model="large")
    assert h.send(stale) == [] and h.router.counts.stale == 1
    find(answer(h, "large"), c.RecordDecision, decision_id=2)


def test_selector_names_a_model_whose_backends_went_down_meanwhile():
    """Then the policy decides among those that are left; with none left the client hears it."""
    h = selecting()
    h.arrive("p")
    h.set_health("b", BackendHealth.DOWN)
    find(answer(h, "large"), c.RecordDecision, reason="selector_fallback", chosen="small")
    h.arrive("q")
    h.set_health("a", BackendHealth.DOWN)
    find(answer(h, "small"), c.EndTurn, code="no_backend_available")


def test_selector_of_a_slot_feeds_that_slots_learner():
    """The arm and the selector go together."""
    h = Host(
        make_stack(
            backend("a"),
            feedback=FeedbackConfig(arm="per_slot", size=2),
            selector=SelectorConfig(url="http://selector"),
        )
    )
    h.arrive("p")
    h.arrive("q")
    assert find(answer(h, "small"), c.RecordDecision).slot == 1
