"""The digest sees every difference that matters, and none that does not."""

import typing
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from journal_fakes import header, life, make_machine

from loadwise.journal.entry import decode_entry, digest_commands, encode_entry, make_entry
from loadwise.kernel import commands as c
from loadwise.kernel.pool import Signal
from loadwise.kernel.work import EndReason, ProgramState, TurnOutcome, Verdict, VerdictKind

RECORD = c.ProgramRecord(
    program_id="p",
    state=ProgramState.CLOSED,
    model="large",
    backend_id="a",
    decision_id=1,
    verifier="exact",
    task_type="patch",
    domain="d",
    tenant="t",
    arrived_at_s=1.0,
    ended_at_s=2.0,
    end_reason=EndReason.FINISH,
    n_turns=1,
    n_failed_turns=1,
    wait_s=3.0,
    prompt_tokens=1,
    completion_tokens=1,
    cached_tokens=1,
    cost_usd=4.0,
    verdict=Verdict(verdict=VerdictKind.PASS),
    reward=5.0,
    is_credited=True,
)
VIEW = c.CandidateView(candidate="large", score=1.0, signals={"q": Signal(value=1.0, observed_at_s=1.0)})
COMMANDS: tuple[c.Command, ...] = (
    c.Dispatch(
        turn_id=1, attempt=1, program_id="p", backend_id="a", model="large", decision_id=1, wait_s=1.0, priority=1
    ),
    c.CancelAttempt(turn_id=1, attempt=1),
    c.EndTurn(turn_id=1, outcome=TurnOutcome.FAILED, status=502, code="x", message="y", retry_after_s=1.0),
    c.SetTimer(timer="router", fires_at_s=1.0),
    c.AskSelector(
        decision_id=1, program_id="p", candidates=("a",), context=(1.0,), task_type="t", domain="d", timeout_s=1.0
    ),
    c.Verify(program_id="p", verifier="exact", task_type="t"),
    c.RecordDecision(
        decision_id=1,
        program_id="p",
        policy="linucb",
        learner_version="1",
        context_version="1",
        context=(1.0,),
        candidates=(VIEW,),
        chosen="large",
        unaffordable=("dear",),
    ),
    c.RecordPropensities(decision_id=1, propensities=(0.5, 0.5)),
    c.RecordCredit(decision_id=1, program_id="p", model="large", success=1.0, cost_usd=1.0, reward=1.0),
    c.Archive(program=RECORD),
)
LOOSE = {c.RecordDecision: {"context"}, c.RecordPropensities: {"propensities"}}
LOOSE[c.RecordCredit] = {"success", "cost_usd", "reward", "replaced_reward"}


def test_every_command_is_covered() -> None:
    """A command added to the vocabulary must be added here."""
    assert {type(command) for command in COMMANDS} == set(typing.get_args(c.Command))


def changed(value: Any) -> Any:
    """Another value of the same kind."""
    match value:
        case bool():
            return not value
        case TurnOutcome():
            return TurnOutcome.EVICTED
        case str():
            return value + "x"
        case int() | float():
            return value + 1
        case tuple():
            return tuple(changed(item) for item in value)
        case c.CandidateView():
            return msgspec.structs.replace(value, candidate="other")
        case c.ProgramRecord():
            return msgspec.structs.replace(value, cost_usd=value.cost_usd + 1e-12)
    return "something"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_the_digest_sees_every_exact_field(command: c.Command) -> None:
    """Any field that another run must repeat exactly changes the digest; a float that may differ does not."""
    before = digest_commands([command])
    loose = LOOSE.get(type(command), set())
    for name in command.__struct_fields__:
        other = msgspec.structs.replace(command, **{name: changed(getattr(command, name))})
        assert (digest_commands([other]) == before) == (name in loose), name


def as_integers(value: Any) -> Any:
    """The value with every whole float written as an integer, as a careless machine would."""
    if isinstance(value, float):
        return int(value)
    if isinstance(value, tuple):
        return tuple(as_integers(item) for item in value)
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(value, **{n: as_integers(getattr(value, n)) for n in value.__struct_fields__})
    return value


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_the_digest_does_not_see_how_a_number_is_written(command: c.Command) -> None:
    """An instant of 60 and one of 60.0 are the same, and a numpy scalar is the number that it is."""
    assert digest_commands([as_integers(command)]) == digest_commands([command])
    for name in command.__struct_fields__:
        value = getattr(command, name)
        if type(value) in (int, float):
            other = msgspec.structs.replace(command, **{name: np.asarray(value)[()]})
            assert digest_commands([other]) == digest_commands([command])


@given(st.permutations(range(len(COMMANDS))))
def test_the_digest_sees_order(order: list[int]) -> None:
    """Commands are carried out in order, so their order counts, records among them too."""
    permuted = [COMMANDS[i] for i in order]
    assert (digest_commands(permuted) == digest_commands(COMMANDS)) == (order == list(range(len(COMMANDS))))


def test_the_digest_is_the_same_everywhere() -> None:
    """The number is part of the format: another would break every journal that was written."""
    assert digest_commands([]) == 0
    assert digest_commands(COMMANDS[:4]) == 15783883363017904664


def test_entries_survive_their_encoding() -> None:
    """An entry decodes to itself, with decisions, propensities and credits in full."""
    machine = make_machine(header())
    for sequence, event in enumerate(life(4), 1):
        entry = make_entry(sequence, event, machine.handle(event))
        assert decode_entry(encode_entry(entry)) == entry
    entry = make_entry(1, life(1)[0], COMMANDS)
    assert (entry.decisions, entry.propensities, entry.credits) == (COMMANDS[6:7], COMMANDS[7:8], COMMANDS[8:9])
    assert decode_entry(encode_entry(entry)) == entry
