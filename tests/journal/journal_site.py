"""A real stack whose events are journaled, and the events of its programs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadwise.journal.entry import make_header
from loadwise.journal.store import JournalWriter
from loadwise.journal.story import render_story, story
from loadwise.kernel.events import AttemptEnded, Event, TurnArrived
from loadwise.kernel.stack import Stack
from loadwise.kernel.work import AttemptOutcome
from loadwise.settings import open_stack, parse_config

COMPLETED = AttemptOutcome.COMPLETED


class Site:
    """A stack whose events are journaled."""

    def __init__(self, path: Path, backends: Sequence[str] = ("b-small", "b-large"), **router: Any) -> None:
        config = parse_config(
            {
                "models": {name: {"usd_per_million": {"input": 1.0}} for name in ("small", "large")},
                "backends": [
                    {"name": name, "model": name.split("-")[1], "engine": "emulator", "slots": 1} for name in backends
                ],
                "router": {"policy": {"name": "fixed", "candidate": "small"}, "divert": {"when": "never"}, **router},
            }
        )
        self.path = path
        self.stack: Stack = open_stack(config, 0)
        self._header = make_header(msgspec.to_builtins(config), seed=0, host="sim")

    def live(self, events: Sequence[Event]) -> None:
        """Write all that happens."""
        with JournalWriter(self.path, self._header) as writer:
            for event in events:
                writer.append(event, self.stack.handle(event))

    def record(self, program_id: str) -> Any:
        """As HTTP shows it."""
        return self.stack.machine_by_name["router"].table.by_id[program_id].record()  # type: ignore[attr-defined]

    def text(self, program_id: str) -> str:
        """Its story."""
        return render_story(story(self.path, program_id))


def arrival(at_s: float, turn_id: int, program_id: str, **fields: Any) -> TurnArrived:
    return TurnArrived(at_s=at_s, turn_id=turn_id, program_id=program_id, prompt_tokens=100, **fields)


def end(at_s: float, turn_id: int, outcome: AttemptOutcome = COMPLETED, attempt: int = 1) -> AttemptEnded:
    return AttemptEnded(at_s=at_s, turn_id=turn_id, attempt=attempt, outcome=outcome)
