"""What a problem of the demo is: facts only."""

from __future__ import annotations

from typing import Literal, TypeAlias

from loadwise.kernel.fact import Fact

Family: TypeAlias = Literal["arithmetic", "dates", "strings", "units"]
FAMILIES: tuple[Family, ...] = ("arithmetic", "dates", "strings", "units")
LEVELS = 5
"""Difficulties run from 1 (easiest) to LEVELS."""

Kind: TypeAlias = Literal["number", "date", "text"]
"""How an answer is compared: as a number, as an ISO date, or as text without regard to case and space."""


class Problem(Fact, frozen=True, kw_only=True):
    """A statement with its answer, as a generator makes it: not yet placed in a stream."""

    statement: str
    answer: str
    kind: Kind
    tolerance: float = 0.0
    """Largest accepted |difference| of a number, in the answer's own unit."""
    units: tuple[str, ...] = ()
    """Words that may follow a number; the first is the one the prompt asks for. Any other word fails."""
    steps: tuple[str, ...] = ()
    """Calculator expressions that lead to the answer, the last of which yields it; empty where none helps."""


class Task(Fact, frozen=True, kw_only=True):
    """One problem of a stream."""

    task_id: str
    """Unique in its stream; names family, difficulty and place."""
    family: Family
    difficulty: int
    """1..LEVELS."""
    prompt: str
    """The whole first user message; unique in its stream."""
    answer: str
    kind: Kind
    tolerance: float = 0.0
    units: tuple[str, ...] = ()
    uses_tool: bool = False
    """Whether the agent offers the calculator; then `steps` is not empty."""
    steps: tuple[str, ...] = ()
