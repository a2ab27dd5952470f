"""A verdict takes the place of another: the learner ends where it would have been, and one credit is in force (L11)."""

import msgspec
import numpy as np
import pytest
from router_host import Host, backend, find, kinds, make_stack

from loadwise.kernel import commands as c
from loadwise.kernel.work import ProgramState
from loadwise.policy.context import ContextSpec
from loadwise.policy.registry import PolicySpec
from loadwise.router import credit
from loadwise.verify.debias import ErrorRates


def host(**router):
    return Host(make_stack(backend("s", "small"), backend("l", "large"), **router))


def judged(h, program_id="p", verdict="fail", **more):
    """A program served, finished and judged."""
    h.serve(program_id)
    h.finish(program_id)
    return h.judge(program_id, verdict, **more)


def learned(h):
    """Everything the learner knows, as numbers."""
    ridge = h.router.credit.learners[0].ridge
    return np.concatenate([ridge.matrices(name)[i].ravel() for name in sorted(ridge.names) for i in range(3)])


def test_a_persons_verdict_replaces_a_machines():
    """The old credit is named in the new one; what was learned is as if the person had been first."""
    h, straight = host(), host()
    judged(h, verdict="fail", verifier="code")
    corrected = find(h.judge("p", "pass", verifier="human"), c.RecordCredit)
    assert (corrected.success, corrected.reward, corrected.replaced_reward) == (1.0, 1.0, 0.0)
    judged(straight, verdict="pass", verifier="human")
    assert learned(h) == pytest.approx(learned(straight))
    assert h.router.credit.n_landed == 1 and h.router.counts.verdicts_corrected == 1
    assert h.router.table.by_id["p"].verdict.verifier == "human"


@pytest.mark.parametrize("verifier", ["code", "", "judge"])
def test_another_machine_replaces_nothing_unless_it_says_so(verifier):
    """Stale without the word, a correction with it; the same again is stale."""
    h = host()
    judged(h, verdict="fail", verifier="exact")
    assert h.judge("p", "pass", verifier=verifier) == [] and h.router.counts.verdicts_stale == 1
    assert "RecordCredit" in kinds(h.judge("p", "pass", verifier=verifier, is_correction=True))
    assert h.judge("p", "pass", verifier=verifier, is_correction=True) == []
    assert h.router.counts.verdicts_corrected == 1


def test_a_machine_does_not_replace_a_person_by_being_late():
    """It would have to say that it corrects him."""
    h = host()
    judged(h, verdict="pass", verifier="human")
    assert h.judge("p", "fail", verifier="code") == []
    assert h.router.table.by_id["p"].reward == 1.0


def test_a_credit_is_withdrawn_by_an_abstention_and_given_again():
    """Undone exactly, then learned again."""
    h, never = host(), host()
    judged(h)
    withdrawn = find(h.judge("p", "abstain", verifier="human"), c.RecordCredit)
    assert withdrawn.is_withdrawn and withdrawn.replaced_reward == 0.0
    program = h.router.table.by_id["p"]
    assert (program.is_credited, program.reward, h.router.credit.n_landed) == (False, None, 0)
    judged(never, verdict="abstain")
    assert learned(h) == pytest.approx(learned(never))
    again = find(h.judge("p", "pass", is_correction=True), c.RecordCredit)
    assert again.replaced_reward is None and program.is_credited and program.reward == 1.0


def test_a_verdict_that_was_lost_is_credited_by_a_correction():
    """Without that word it comes too late; with it the decision is observed and learned anew."""
    h, straight = host(verdict_max_s=10.0), host()
    h.serve("p")
    h.finish("p")
    h.after(10.0).wake()
    assert find(h.judge("p", "pass", is_correction=True), c.RecordCredit).replaced_reward is None
    program = h.router.table.by_id["p"]
    assert program.state is ProgramState.CLOSED and program.is_credited
    judged(straight, verdict="pass")
    assert learned(h) == pytest.approx(learned(straight))


def test_what_a_budget_has_taught_can_be_corrected():
    """A program that ran out of time was credited 0; somebody knows better."""
    h = host(budget_s=5.0, budget_credit="fail")
    h.serve("p")
    h.after(5.0).wake()
    assert h.router.table.by_id["p"].reward == 0.0
    assert find(h.judge("p", "pass", is_correction=True), c.RecordCredit).replaced_reward == 0.0


def test_corrections_survive_a_snapshot():
    """A dump holds what can still be corrected; the loaded router corrects alike."""
    h = host()
    judged(h, verdict="fail")
    other = host()
    other.router.load(h.router.dump())
    assert msgspec.msgpack.encode(other.router.credit.dump()) == msgspec.msgpack.encode(h.router.credit.dump())
    assert other.router.credit.correct(1, 1.0, 0.0) == h.router.credit.correct(1, 1.0, 0.0) == (0.0, 1.0)
    assert other.router.credit.learners[0].dump() == h.router.credit.learners[0].dump()


def test_decisions_of_another_learner_are_corrected_on_paper_only():
    """The record changes; the new learner never heard of the old decision."""
    h = host()
    judged(h, verdict="fail")
    other = host(policy=PolicySpec(name="lints"), context=ContextSpec())
    other.router.load(h.router.dump())
    before = other.router.credit.learners[0].dump()
    assert other.router.credit.correct(1, 1.0, 0.0) == (0.0, 1.0)
    assert other.router.credit.learners[0].dump() == before


def test_what_is_remembered_for_corrections_is_bounded(monkeypatch):
    """The oldest decision is corrected no more: the verdict changes, the credit stays."""
    monkeypatch.setattr(credit, "SETTLED_MAX", 2)
    monkeypatch.setattr("loadwise.router.laws.SETTLED_MAX", 2)
    h = host()
    for name in ("p", "q", "r"):
        judged(h, name)
    assert len(h.router.credit.settled_by_decision) == 2
    assert h.judge("p", "pass", verifier="human") == []
    assert h.router.table.by_id["p"].reward == 0.0 and h.router.table.by_id["p"].verdict.verdict == "pass"


def test_archived_programs_are_forgotten_by_the_learner():
    """Nothing of them can be corrected."""
    h = host(closed_max=1)
    for name in ("p", "q"):
        judged(h, name)
    assert len(h.router.credit.settled_by_decision) == 1


def test_error_rates_apply_to_the_first_and_to_the_correcting_verdict():
    """Unclipped; a person is taken at his word."""
    rates = {"sum": ErrorRates(false_pass_ratio=0.1, false_fail_ratio=0.3)}
    h = host(error_rates=rates, context=ContextSpec(task_types=("sum",)))
    h.arrive("p", task_type="sum")
    h.end_attempt(1)
    h.finish("p")
    assert find(h.judge("p", "pass", verifier="code"), c.RecordCredit).reward == pytest.approx(1.5)
    second = find(h.judge("p", "fail", verifier="code", is_correction=True), c.RecordCredit)
    assert second.reward == pytest.approx(-1 / 6) and second.success == 0.0
    assert find(h.judge("p", "fail", verifier="human"), c.RecordCredit).reward == 0.0


def test_a_program_of_two_models_is_corrected_without_credit():
    """Neither earned it alone."""
    h = host()
    h.serve("p")
    h.serve("p", model="large" if h.router.table.by_id["p"].model == "small" else "small")
    h.finish("p")
    h.judge("p", "fail")
    assert h.judge("p", "pass", verifier="human") == []
    assert not h.router.table.by_id["p"].is_credited


def test_a_call_of_our_own_teaches_nothing_and_asks_no_verifier():
    """EndReason.INTERNAL: undone, closed, remembered."""
    h = Host(make_stack(backend("s", "small"), verifiers={"sum": "code"}))
    h.arrive("judge", task_type=None)
    h.end_attempt(1)
    commands = h.finish("judge", reason="internal")
    assert "Verify" not in kinds(commands) and h.router.credit.n_undone == 1
    assert h.router.table.by_id["judge"].state is ProgramState.CANCELLED


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_policy_whose_evidence_fades_takes_a_correction_too(is_loaded):
    """After verdicts of others, and over a dump: the learner is where the right verdict at once had brought it."""
    spec = PolicySpec(name="drift", options={"alarm": 0.0, "discount": 0.9, "exploration_floor": 0.0})
    means = []
    for first in ("fail", "pass"):
        host = Host(make_stack(backend("a"), backend("b", "large"), policy=spec))
        for n in range(5):
            host.serve(f"p{n}")
            host.finish(f"p{n}")
            host.judge(f"p{n}", first if n == 1 else "pass", verifier="tests")
        if is_loaded:
            other = make_stack(backend("a"), backend("b", "large"), policy=spec)
            other.load(host.stack.dump())
            host.stack, host.router = other, other.machine_by_name["router"]
        if first == "fail":
            credit = find(host.judge("p1", "pass", verifier="human"), c.RecordCredit)
            assert (credit.replaced_reward, credit.reward) == (0.0, 1.0)
        candidates = find(host.arrive("next"), c.RecordDecision).candidates
        means.append([view.mean for view in candidates])
    assert means[0] == pytest.approx(means[1], abs=1e-12)
