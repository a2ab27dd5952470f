"""Commands by the name under which hosts import them; `loadwise.kernel.commands` defines them."""

from loadwise.kernel.commands import (
    Archive,
    AskSelector,
    CancelAttempt,
    Command,
    Dispatch,
    EndTurn,
    RecordCredit,
    RecordDecision,
    RecordPropensities,
    SetTimer,
    Verify,
)

__all__ = [
    "Archive",
    "AskSelector",
    "CancelAttempt",
    "Command",
    "Dispatch",
    "EndTurn",
    "RecordCredit",
    "RecordDecision",
    "RecordPropensities",
    "SetTimer",
    "Verify",
]
