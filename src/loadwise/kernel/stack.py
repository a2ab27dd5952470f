"""Machines wired by one table; itself a machine, and the only thing a host drives."""

from collections.abc import Mapping, Sequence

import msgspec

from .commands import Command, RecordDecision
from .errors import LawBroken
from .events import Event
from .machine import Follower, Machine

INSTANTS_S = 2.0**63
"""Instants are below it: later ones, in whole seconds, fit into no dump."""


class Stack:
    """Hands each event to the machine that listens for it.

    Args:
        machine_by_name: the machines, in the order in which they are dumped.
        listener_by_event: which machine hears an event type; one listener each.
    """

    def __init__(self, machine_by_name: Mapping[str, Machine], listener_by_event: Mapping[type, str]) -> None:
        self.machine_by_name = dict(machine_by_name)
        self._handle_by_event = {
            event_type: self.machine_by_name[name].handle for event_type, name in listener_by_event.items()
        }
        self.now_s = float("-inf")
        self.n_events = 0

    def handle(self, event: Event) -> list[Command]:
        """Take one event; the host then carries out the commands in order.

        Raises:
            LawBroken: L3, the event is earlier than the one before it, or its instant is not a number or beyond
                `INSTANTS_S`.
        """
        if not self.now_s <= event.at_s < INSTANTS_S:
            raise LawBroken("L3", f"{type(event).__name__} at {event.at_s!r} s follows an event at {self.now_s!r} s")
        self.now_s = event.at_s
        self.n_events += 1
        return self._handle_by_event[type(event)](event)

    def follow(self, decisions: Sequence[RecordDecision]) -> None:
        """Let every machine decide in the next event as it was recorded."""
        for machine in self.machine_by_name.values():
            if isinstance(machine, Follower):
                machine.follow(decisions)

    def check(self) -> None:
        """Check every machine's laws."""
        for machine in self.machine_by_name.values():
            machine.check()

    def dump(self) -> bytes:
        """The state of all machines; see `load`."""
        states = {name: machine.dump() for name, machine in self.machine_by_name.items()}
        return msgspec.msgpack.encode((self.now_s, self.n_events, states))

    def load(self, state: bytes) -> None:
        """Continue from a dumped state of a stack built from the same configuration and seed."""
        self.now_s, self.n_events, states = msgspec.msgpack.decode(state, type=tuple[float, int, dict[str, bytes]])
        for name, machine in self.machine_by_name.items():
            machine.load(states[name])
