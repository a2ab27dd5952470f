"""The replies that a client was given, as messages: what the next request of the same conversation will repeat."""

from typing import Any

import msgspec

from .openai import MESSAGES_MAX_BYTES, UNREADABLE, is_readable, read_leniently, text_of

REPLY_MAX_BYTES = 8 * 1024 * 1024
"""Bytes of one streamed answer that are followed; beyond it the conversation is not recognised again."""
CHOICES_MAX = 128
"""Choices of one answer, and tool calls of one choice, that are followed."""


class _WholeChoice(msgspec.Struct):
    message: msgspec.Raw = msgspec.Raw(b"")


class _WholeAnswer(msgspec.Struct):
    choices: list[_WholeChoice] = []


_decode_whole = msgspec.json.Decoder(_WholeAnswer).decode


def whole_replies(body: bytes) -> list[Any]:
    """The messages of a whole answer, one per choice; empty where it has another shape or is longer than we read."""
    try:
        written = [choice.message for choice in _decode_whole(body).choices]
    except (*UNREADABLE, UnicodeDecodeError):
        return _replies_leniently(body)
    if len(written) > CHOICES_MAX or not is_readable(b"".join(map(bytes, written)), MESSAGES_MAX_BYTES):
        return []
    messages = [read_leniently(raw) for raw in written if bytes(memoryview(raw)[:1]) == b"{"]
    return [message for message in messages if isinstance(message, dict)]


def _replies_leniently(body: bytes) -> list[Any]:
    answer = read_leniently(body) if is_readable(body, MESSAGES_MAX_BYTES) else None
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) > CHOICES_MAX:
        return []
    messages = [choice.get("message") for choice in choices if isinstance(choice, dict)]
    return [message for message in messages if isinstance(message, dict)]


def first_text(replies: list[Any]) -> str | None:
    """The text of the first reply; None where the answer could not be followed."""
    return text_of(replies[0].get("content")) if replies else None


class _Choice:
    """One reply as far as it has come."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.calls: dict[int, dict[str, str]] = {}
        self.function_call: dict[str, str] = {}

    def take(self, delta: dict[str, Any]) -> None:
        """Add one piece."""
        if isinstance(delta.get("content"), str):
            self.texts.append(delta["content"])
        for piece in delta.get("tool_calls") or ():
            index = piece.get("index")
            if index is None:  # some engines send whole calls without a number
                index = len(self.calls)
            if not isinstance(index, int):
                raise ValueError("a tool call has no number")
            if index not in self.calls and len(self.calls) >= CHOICES_MAX:
                raise ValueError("too many tool calls")
            _extend(self.calls.setdefault(index, {}), piece.get("function") or {})
        _extend(self.function_call, delta.get("function_call") or {})

    def message(self) -> dict[str, Any]:
        """The whole reply."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.texts)}
        if self.calls:
            message["tool_calls"] = [{"type": "function", "function": self.calls[at]} for at in sorted(self.calls)]
        if self.function_call:
            message["function_call"] = self.function_call
        return message


def _extend(call: dict[str, str], piece: dict[str, Any]) -> None:
    for name in ("name", "arguments"):
        if piece.get(name) is not None:
            call[name] = call.get(name, "") + piece[name]


class StreamedReplies:
    """Puts the pieces of a streamed answer together, for every choice."""

    def __init__(self) -> None:
        self._held = b""
        self._n_bytes = 0
        self._is_lost = False
        self._choices: dict[int, _Choice] = {}

    def feed(self, data: bytes) -> None:
        """Take bytes of the stream as they come."""
        self._n_bytes += len(data)
        if self._is_lost or self._n_bytes > REPLY_MAX_BYTES:
            self._is_lost, self._held = True, b""
            return
        *lines, self._held = (self._held + data).split(b"\n")
        for line in lines:
            payload = line[5:].strip() if line.startswith(b"data:") else b""
            if payload and payload != b"[DONE]":
                self._take(payload)

    def _take(self, payload: bytes) -> None:
        try:
            for choice in read_leniently(payload).get("choices") or ():
                index = choice.get("index") or 0
                if not isinstance(index, int):
                    raise ValueError("a choice has no number")
                if index not in self._choices and len(self._choices) >= CHOICES_MAX:
                    raise ValueError("too many choices")
                self._choices.setdefault(index, _Choice()).take(choice.get("delta") or {})
        except (ValueError, AttributeError, TypeError):
            self._is_lost = True

    def replies(self) -> list[Any]:
        """One message per choice; empty where the stream could not be followed."""
        if self._is_lost:
            return []
        return [choice.message() for _, choice in sorted(self._choices.items())]
