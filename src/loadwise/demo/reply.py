"""The seam between an emulated engine and whoever writes its lines.

An emulated engine calls a `Script` with the parsed body of a chat completion request and sends what comes
back: the text, or tool calls, as the assistant's message, and `output_tokens` as the completion tokens it
must spend time on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from loadwise.kernel.fact import Fact


class ToolCall(Fact, frozen=True, kw_only=True):
    """One call of a tool by the model."""

    call_id: str
    """Unique within the conversation."""
    name: str
    arguments: str
    """JSON text, as on the wire."""


class Reply(Fact, frozen=True, kw_only=True):
    """What a model says in one turn."""

    text: str
    """Empty when the turn consists of tool calls only."""
    tool_calls: tuple[ToolCall, ...] = ()
    output_tokens: int
    """Completion tokens of this turn, at least 1; may exceed the text's own length (reasoning not shown)."""


Script: TypeAlias = Callable[[Mapping[str, Any]], Reply]
"""Pure: the same request body gives the same reply, on any thread and in any order. Never raises."""
