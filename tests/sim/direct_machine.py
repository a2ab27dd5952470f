"""The simplest machine that keeps its promises: it sends every turn on at once and tries again elsewhere."""

from collections.abc import Callable

from loadwise.kernel.commands import CancelAttempt, Command, Dispatch, EndTurn, Verify
from loadwise.kernel.errors import LawBroken
from loadwise.kernel.events import AttemptEnded, Event, ProgramEnded, TurnAbandoned, TurnArrived
from loadwise.kernel.ids import BackendId, DecisionId, ModelId, TurnId
from loadwise.kernel.pool import BackendSpec
from loadwise.kernel.work import AttemptOutcome, EndReason, TurnOutcome

Choose = Callable[[TurnArrived], int]


class DirectMachine:
    """Turn i goes to the backend that `choose` names, a retry to the next one."""

    def __init__(
        self,
        backends: tuple[BackendSpec, ...],
        choose: Choose | None = None,
        *,
        n_tries: int = 1,
        verifies: bool = True,
    ) -> None:
        self.backends = backends
        self.events: list[Event] = []
        self._choose = choose or (lambda event: event.turn_id % len(backends))
        self._n_tries = n_tries
        self._verifies = verifies
        self._open: dict[TurnId, tuple[TurnArrived, int, int]] = {}

    def handle(self, event: Event) -> list[Command]:
        self.events.append(event)
        if isinstance(event, TurnArrived):
            return [self._send(event, self._choose(event), 1)]
        if isinstance(event, AttemptEnded) and event.turn_id in self._open:
            turn, i, n = self._open.pop(event.turn_id)
            if event.outcome is AttemptOutcome.COMPLETED:
                return []
            if n < self._n_tries and event.first_byte_at_s is None:
                return [self._send(turn, i + 1, n + 1)]
            return [
                EndTurn(turn_id=event.turn_id, outcome=TurnOutcome.FAILED, status=502, code="x", message=event.detail)
            ]
        if isinstance(event, TurnAbandoned):
            _, _, n = self._open.pop(event.turn_id)
            return [CancelAttempt(turn_id=event.turn_id, attempt=n)]
        if isinstance(event, ProgramEnded) and event.reason is EndReason.FINISH and self._verifies:
            return [Verify(program_id=event.program_id, verifier="exact")]
        return []

    def of(self, kind: type) -> list[Event]:
        return [event for event in self.events if type(event) is kind]

    def check(self) -> None:
        times = [event.at_s for event in self.events]
        if times != sorted(times):
            raise LawBroken("L3", "time fell")

    def dump(self) -> bytes:
        return b""

    def load(self, state: bytes) -> None:
        return None

    def _send(self, turn: TurnArrived, i: int, n: int) -> Dispatch:
        backend = self.backends[i % len(self.backends)]
        self._open[turn.turn_id] = (turn, i, n)
        return Dispatch(
            turn_id=turn.turn_id,
            attempt=n,
            program_id=turn.program_id,
            backend_id=BackendId(backend.name),
            model=ModelId(backend.model),
            decision_id=DecisionId(0),
        )
