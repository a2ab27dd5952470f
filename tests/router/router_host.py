"""A host for routers under test: it answers commands, and keeps its own account of every turn.

The account shares no code with the router: it knows only what a client and an engine would know. `Host.send` compares
the two after every event.
"""

from typing import Any

import msgspec
from moody import CLASS_BY_PATH

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.pool import BackendHealth, BackendSpec, ModelSpec, Price
from loadwise.kernel.stack import Stack
from loadwise.kernel.work import AttemptOutcome, EndReason, Usage, Verdict, VerdictKind
from loadwise.router.config import RouterConfig
from loadwise.router.machine import Router
from loadwise.verify.debias import ErrorRates

SEED = 11
MODELS = {
    "small": ModelSpec(usd_per_million=Price(input=0.1, output=0.4)),
    "large": ModelSpec(usd_per_million=Price(input=1.0, output=4.0)),
}


def backend(name: str, model: str = "small", **capacity: int) -> BackendSpec:
    """A backend with the given capacity, or with the default slots."""
    return BackendSpec(name=name, model=model, **capacity)


def make_stack(
    *backends: BackendSpec,
    models: dict[str, ModelSpec] = MODELS,
    verifiers: dict[str, str] | None = None,
    error_rates: dict[str, ErrorRates] | None = None,
    **router: Any,
) -> Stack:
    """A stack around one router; `router` are fields of its configuration."""
    config = RouterConfig(**router)
    resolve = CLASS_BY_PATH.__getitem__
    machine = Router(models, backends, config, verifiers or {}, SEED, resolve=resolve, error_rates=error_rates)
    return Stack({"router": machine}, dict.fromkeys(machine.heard_events, "router"))


def matches(command: c.Command, kind: type, **fields: Any) -> bool:
    """Whether a command is of a kind and has these fields; what is not named does not matter."""
    return type(command) is kind and all(getattr(command, name) == value for name, value in fields.items())


def find(commands: list[c.Command], kind: type, **fields: Any) -> Any:
    """The one command that matches; more or fewer are an error that shows all."""
    found = [command for command in commands if matches(command, kind, **fields)]
    assert len(found) == 1, f"{len(found)} of {kind.__name__} {fields} in {commands}"
    return found[0]


def kinds(commands: list[c.Command]) -> list[str]:
    """The commands by name, timers left out."""
    return [type(command).__name__ for command in commands if type(command) is not c.SetTimer]


class Host:
    """Drives a stack; every turn that it sends has one fate, or is open."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        machine = stack.machine_by_name["router"]
        assert isinstance(machine, Router)
        self.router = machine
        self.now_s = 0.0
        self.n_turns = 0
        self.fate_by_turn: dict[int, str] = {}
        self.open: set[int] = set()
        self.running: dict[int, c.Dispatch] = {}
        self.n_attempts_by_turn: dict[int, int] = {}
        self.asked: dict[int, c.AskSelector] = {}
        self.credited: dict[int, float] = {}
        """Rewards in force, by decision."""
        self.decided: dict[int, c.RecordDecision] = {}
        self.archived: list[c.ProgramRecord] = []
        self.timer_at_s: float | None = None
        self.model_by_backend: dict[str, str] = {}
        self.is_broken = False

    # --- events ---

    def send(self, event: e.Event) -> list[c.Command]:
        """Hand the event over, take the answer into the account, and compare."""
        self.is_broken = True
        fate = self._foresee(event)
        self.model_by_backend = {name: state.spec.model for name, state in self.router.backends.by_id.items()}
        commands = self.stack.handle(event)
        for command in commands:
            self._take(command)
        for turn_id in fate:
            if turn_id in self.open:  # else something that came due before the event has ended it
                self._seal(turn_id, fate[turn_id])
        self.stack.check()
        assert self.open == set(self.router.turns), (event, commands)
        self.is_broken = False
        return commands

    def after(self, seconds: float) -> "Host":
        """Let time pass."""
        self.now_s += seconds
        return self

    def arrive(self, program_id: str = "p", **fields: Any) -> list[c.Command]:
        """A turn arrives under the next number."""
        self.n_turns += 1
        return self.send(e.TurnArrived(at_s=self.now_s, turn_id=self.n_turns, program_id=program_id, **fields))

    def end_attempt(self, turn_id: int, outcome: str = "completed", **fields: Any) -> list[c.Command]:
        """The running attempt of a turn ends; a completed one has answered with 100 and 10 tokens."""
        fields.setdefault("attempt", self.n_attempts_by_turn[turn_id])
        if outcome == "completed":
            fields.setdefault("usage", Usage(prompt_tokens=100, completion_tokens=10))
            fields.setdefault("first_byte_at_s", self.now_s)
        return self.send(e.AttemptEnded(at_s=self.now_s, turn_id=turn_id, outcome=AttemptOutcome(outcome), **fields))

    def serve(self, program_id: str = "p", **fields: Any) -> list[c.Command]:
        """A turn arrives and completes at once."""
        self.arrive(program_id, **fields)
        return self.end_attempt(self.n_turns)

    def abandon(self, turn_id: int) -> list[c.Command]:
        """The client of a turn leaves."""
        return self.send(e.TurnAbandoned(at_s=self.now_s, turn_id=turn_id))

    def finish(self, program_id: str = "p", reason: EndReason = EndReason.FINISH) -> list[c.Command]:
        """The agent says that its program is over."""
        return self.send(e.ProgramEnded(at_s=self.now_s, program_id=program_id, reason=reason))

    def judge(
        self, program_id: str = "p", verdict: str = "pass", score: float | None = None, **more: Any
    ) -> list[c.Command]:
        """A verdict arrives."""
        said = Verdict(verdict=VerdictKind(verdict), score=score, **more)
        return self.send(e.VerdictArrived(at_s=self.now_s, program_id=program_id, verdict=said))

    def wake(self) -> list[c.Command]:
        """The timer fires, whenever it was meant to."""
        return self.send(e.TimerFired(at_s=self.now_s, timer="router"))

    def set_health(self, backend_id: str, health: str) -> list[c.Command]:
        """A probe speaks."""
        return self.send(e.BackendChanged(at_s=self.now_s, backend_id=backend_id, health=BackendHealth(health)))

    # --- the account ---

    def _foresee(self, event: e.Event) -> dict[int, str]:
        """What the event itself decides about turns."""
        match event:
            case e.TurnArrived():
                assert event.turn_id not in self.fate_by_turn, "the test reuses a closed turn's number"
                self.open.add(event.turn_id)
            case e.AttemptEnded():
                dispatch = self.running.get(event.turn_id)
                if dispatch is not None and dispatch.attempt == event.attempt:
                    del self.running[event.turn_id]
                    if event.outcome in (AttemptOutcome.COMPLETED, AttemptOutcome.CANCELLED):
                        return {event.turn_id: event.outcome.value}
            case e.TurnAbandoned():
                return {event.turn_id: "cancelled"}
            case e.HostRestarted():
                self.running.clear()
                self.asked.clear()
                self.timer_at_s = None
                return dict.fromkeys(sorted(self.open), "cancelled")
            case e.TimerFired(timer="router"):
                self.timer_at_s = None
        return {}

    def _seal(self, turn_id: int, fate: str) -> None:
        assert turn_id in self.open, f"turn {turn_id} ends as {fate} after {self.fate_by_turn.get(turn_id)}"
        self.open.remove(turn_id)
        self.fate_by_turn[turn_id] = fate

    def _take(self, command: c.Command) -> None:
        match command:
            case c.Dispatch():
                assert command.turn_id in self.open and command.turn_id not in self.running, command
                assert command.attempt == self.n_attempts_by_turn.get(command.turn_id, 0) + 1
                assert command.decision_id in self.decided, "dispatched before the decision was written"
                served = self.model_by_backend.get(command.backend_id)  # as before the event, or after it
                if served != command.model:
                    served = self.router.backends.by_id[command.backend_id].spec.model
                assert served == command.model, command
                self.n_attempts_by_turn[command.turn_id] = command.attempt
                self.running[command.turn_id] = command
            case c.CancelAttempt():
                dispatch = self.running.pop(command.turn_id, None)
                is_known = dispatch is None or dispatch.attempt == command.attempt
                assert is_known, command
            case c.EndTurn():
                assert command.turn_id not in self.running, command
                assert 400 <= command.status <= 599, command
                self._seal(command.turn_id, command.outcome.value)
            case c.RecordDecision():
                assert command.decision_id not in self.decided
                self.decided[command.decision_id] = command
            case c.RecordCredit():
                had = self.credited.pop(command.decision_id, None)
                assert had == command.replaced_reward, "law L11: one credit is in force, and a correction names it"
                if not command.is_withdrawn:
                    self.credited[command.decision_id] = command.reward
            case c.AskSelector():
                self.asked[command.decision_id] = command
            case c.Archive():
                self.archived.append(command.program)
            case c.SetTimer():
                assert self.timer_at_s is None or command.fires_at_s < self.timer_at_s, "a timer set for nothing"
                self.timer_at_s = command.fires_at_s

    def assert_at_rest(self) -> None:
        """Nothing runs, waits, is reserved, pends or is due."""
        router = self.router
        assert not self.open and not self.running
        assert len(self.fate_by_turn) == router.counts.arrived
        assert all(state.n_running == 0 for state in router.backends.by_id.values())
        for name, account in router.admission.ledger.account_by_backend.items():
            assert account.reserved == 0 and not account.amount_by_key, name
        assert not router.credit.pending_by_decision
        assert not router.asked and not router.pacing.waiting and not router.pacing.slot_by_program
        assert not router.table.by_id and not router.table.idle and not router.table.closed
        left = [key for key, _ in router.agenda.dump() if key.partition(":")[0] not in ("retry", "quiet", "window")]
        assert not left, left


def encoded(commands: list[c.Command]) -> bytes:
    """Commands as bytes, to compare them to the last bit; a NaN equals itself."""
    return msgspec.msgpack.encode(commands)
