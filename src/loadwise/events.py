"""Events by the name under which hosts import them; `loadwise.kernel.events` defines them."""

from loadwise.kernel.events import (
    AUTO,
    AttemptEnded,
    BackendAdded,
    BackendChanged,
    BackendRemoved,
    Event,
    HostRestarted,
    ModelForgotten,
    ProgramEnded,
    SelectorAnswered,
    SignalsObserved,
    TimerFired,
    TurnAbandoned,
    TurnArrived,
    VerdictArrived,
)

__all__ = [
    "AUTO",
    "AttemptEnded",
    "BackendAdded",
    "BackendChanged",
    "BackendRemoved",
    "Event",
    "HostRestarted",
    "ModelForgotten",
    "ProgramEnded",
    "SelectorAnswered",
    "SignalsObserved",
    "TimerFired",
    "TurnAbandoned",
    "TurnArrived",
    "VerdictArrived",
]
