"""Which turns of a program are held, and what they wait for, as far as its entries tell.

No event says that a turn is held: it is what is left where a turn arrived, or an attempt failed, and the commands
neither sent it out nor ended it.
"""

from collections.abc import Iterator

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.fact import Fact
from loadwise.kernel.work import AttemptOutcome

from .concern import Concern


class HeldTurn(Fact, frozen=True, kw_only=True):
    """A turn that waits, and for what."""

    turn_id: int
    waits_for: str
    since_s: float
    """The instant from which on it has waited, for this or for something else before."""


class Held:
    """Follows the open turns of one program."""

    def __init__(self) -> None:
        self._pinned: dict[int, str] = {}
        """Open turns, and the model that each asked for."""
        self._attempt_by_turn: dict[int, int] = {}
        """Those that run."""
        self._since_s: dict[int, float] = {}
        """Those that wait, and since when."""
        self._served_wait_s: dict[int, float] = {}
        """How long turns waited that were sent out, by the router's word, over all their attempts."""
        self._left_wait_s = 0.0
        """How long turns waited that left without being sent out."""
        self._told: dict[int, str] = {}
        self._model: str | None = None
        self._is_asked = False
        self._is_kept = False
        """Whether it stays the same program when no turn of it is open."""

    def after(self, concern: Concern) -> Iterator[HeldTurn]:
        """The turns that wait since this entry, or that wait for something else since."""
        self.hear(concern)
        for held in self.waiting:
            if self._told.get(held.turn_id) != held.waits_for:
                self._told[held.turn_id] = held.waits_for
                yield held

    def hear(self, concern: Concern) -> None:
        """Take one entry."""
        event = concern.entry.event
        if concern.is_own:
            self._hear_event(event)
        for command in concern.commands:
            self._hear_command(command, event.at_s)
        if not self._pinned and not self._is_kept:
            self._model, self._is_asked = None, False  # it never got an answer and is forgotten; the next is a new one
        for turn_id in self._pinned:
            if turn_id not in self._attempt_by_turn:
                self._since_s.setdefault(turn_id, event.at_s)

    @property
    def waiting(self) -> tuple[HeldTurn, ...]:
        """The turns that wait after what was heard."""
        return tuple(
            HeldTurn(turn_id=turn_id, waits_for=self._waits_for(self._pinned[turn_id]), since_s=since_s)
            for turn_id, since_s in self._since_s.items()
        )

    @property
    def wait_s(self) -> float:
        """How long turns have waited, without those that wait still."""
        return self._left_wait_s + sum(self._served_wait_s.values())

    def _waits_for(self, pinned: str) -> str:
        if self._model is not None:
            return f"no backend of {self._model if pinned == e.AUTO else pinned} had room"
        return "the selector was asked for a model" if self._is_asked else "its program may not start yet"

    def _hear_event(self, event: e.Event) -> None:
        match event:
            case e.TurnArrived():
                self._pinned.setdefault(event.turn_id, event.model)
            case e.AttemptEnded():
                self._end_attempt(event)
            case e.TurnAbandoned():
                self._close(event.turn_id, event.at_s)
            case e.HostRestarted():
                self._is_kept |= self._model is not None
                for turn_id in list(self._pinned):
                    self._close(turn_id, event.at_s)

    def _end_attempt(self, event: e.AttemptEnded) -> None:
        if self._attempt_by_turn.get(event.turn_id) != event.attempt:
            return  # of an attempt that was taken back
        del self._attempt_by_turn[event.turn_id]
        self._told.pop(event.turn_id, None)
        if event.outcome in (AttemptOutcome.COMPLETED, AttemptOutcome.CANCELLED):
            self._is_kept |= event.outcome is AttemptOutcome.COMPLETED
            self._close(event.turn_id, event.at_s)

    def _hear_command(self, command: c.Command, at_s: float) -> None:
        match command:
            case c.RecordDecision():
                self._model = command.chosen
            case c.AskSelector():
                self._is_asked = True
            case c.Dispatch():
                self._model = self._model or command.model  # its decision may lie before the journal's begin
                self._attempt_by_turn[command.turn_id] = command.attempt
                self._served_wait_s[command.turn_id] = command.wait_s
                self._since_s.pop(command.turn_id, None)
                self._told.pop(command.turn_id, None)
            case c.EndTurn():
                self._close(command.turn_id, at_s)

    def _close(self, turn_id: int, at_s: float) -> None:
        self._left_wait_s += at_s - self._since_s.pop(turn_id, at_s)
        for turns in (self._pinned, self._attempt_by_turn, self._told):
            turns.pop(turn_id, None)
