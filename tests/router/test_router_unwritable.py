"""Events that no journal could hold: refused or counted, and never a part of the state."""

import msgspec
import pytest
from router_host import Host, backend, find, make_stack

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.errors import LawBroken
from loadwise.kernel.pool import BackendHealth, BackendSpec
from loadwise.kernel.work import AttemptOutcome, EndReason, Usage, Verdict, VerdictKind

HALF, HUGE = "\ud800", 1 << 64


def opened():
    """A stack with one open program of one open turn, now at 1 s."""
    h = Host(make_stack(backend("a", slots=4)))
    h.arrive("p")
    return h


def turn(**more):
    """A first turn of a new program."""
    return e.TurnArrived(**{"at_s": 1.0, "turn_id": 77, "program_id": "q", **more})


@pytest.mark.parametrize(
    "more",
    [
        {"program_id": HALF},
        {"model": HALF},
        {"task_type": HALF},
        {"domain": "x" + HALF},
        {"tenant": HALF},
        {"priority": HUGE},
        {"program_id": "p", "priority": -HUGE},
        {"prompt_tokens": HUGE},
        {"max_output_tokens": HUGE},
        {"budget_s": HUGE},
    ],
)
def test_a_turn_that_cannot_be_written_is_refused_with_400(more):
    """The client is told, the turn is counted as every other, and nothing of it stays."""
    h = opened()
    before = h.router.counts.rejected
    refused = find(h.stack.handle(turn(**more)), c.EndTurn, turn_id=77, status=400)
    msgspec.msgpack.encode(refused)
    assert h.router.counts.rejected == before + 1
    h.stack.check()
    assert h.stack.dump()
    assert 77 not in h.router.turns


@pytest.mark.parametrize(
    "event",
    [
        turn(turn_id=HUGE),
        turn(turn_id=1, tenant=HALF),
        e.TurnAbandoned(at_s=1.0, turn_id=HUGE),
        e.ProgramEnded(at_s=1.0, program_id="p", reason=EndReason.FINISH, artefacts={"x": HALF}),
        e.VerdictArrived(at_s=1.0, program_id="p", verdict=Verdict(verdict=VerdictKind.PASS, verifier=HALF)),
        e.SignalsObserved(at_s=1.0, backend_id="a", values={HALF: 1.0}, observed_at_s=1.0),
        e.BackendAdded(at_s=1.0, backend=BackendSpec(name=HALF, model="small")),
        e.BackendChanged(at_s=1.0, backend_id="a", health=BackendHealth.DOWN, detail=HALF),
        e.TimerFired(at_s=1.0, timer=HALF),
        e.HostRestarted(at_s=1.0, detail=HALF),
        e.ModelForgotten(at_s=1.0, model="small", detail=HALF),
    ],
)
def test_any_other_event_that_cannot_be_written_is_counted(event):
    """It changes nothing but the count, so that what is dumped is what a journal can replay to."""
    h = opened()
    before = h.router.counts.malformed
    assert [command for command in h.stack.handle(event) if type(command) is not c.SetTimer] == []
    assert h.router.counts.malformed == before + 1
    assert list(h.router.turns) == [1]
    h.stack.check()
    assert h.stack.dump()


@pytest.mark.parametrize("outcome", [AttemptOutcome.COMPLETED, AttemptOutcome.IDLE_TIMEOUT])
def test_an_attempt_that_ended_has_ended_whatever_is_said_of_it(outcome):
    """The turn does not stay open, nothing stays reserved for it, and what cannot be written is not kept."""
    h = opened()
    usage = Usage(prompt_tokens=HUGE, completion_tokens=HUGE)
    ended = e.AttemptEnded(
        at_s=1.0, turn_id=1, attempt=1, outcome=outcome, usage=usage, first_byte_at_s=0.5, detail=HALF
    )
    h.stack.handle(ended)
    assert not h.router.turns and h.router.backends.by_id["a"].n_running == 0
    assert h.router.counts.malformed >= 1
    h.stack.check()
    assert h.stack.dump()


def test_no_instant_is_beyond_what_a_dump_can_hold():
    """An instant is a number of seconds, also where a host counts in integers."""
    h = opened()
    with pytest.raises(LawBroken, match="L3"):
        h.stack.handle(e.TimerFired(at_s=1 << 64, timer="t"))
    assert h.stack.dump()
