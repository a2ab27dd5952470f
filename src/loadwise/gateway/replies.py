"""The replies that a client was given, as messages: what the next request of the same conversation will repeat."""

from typing import Any

import msgspec

_decode = msgspec.json.Decoder().decode

REPLY_MAX_BYTES = 8 * 1024 * 1024
"""Text of one streamed reply that is followed; beyond it the conversation is not recognised again."""


def whole_replies(body: bytes) -> list[Any]:
    """The messages of a whole answer, one per choice; empty where it has another shape."""
    try:
        choices = _decode(body).get("choices")
        return [c["message"] for c in choices if isinstance(c, dict) and isinstance(c.get("message"), dict)]
    except (msgspec.DecodeError, AttributeError, TypeError):
        return []


class StreamedReplies:
    """Puts the pieces of a streamed answer together, for every choice."""

    def __init__(self) -> None:
        self._held = b""
        self._n_bytes = 0
        self._is_lost = False
        self._text_by_choice: dict[int, list[str]] = {}
        self._calls_by_choice: dict[int, dict[int, dict[str, str]]] = {}

    def feed(self, data: bytes) -> None:
        """Take bytes of the stream as they come."""
        self._n_bytes += len(data)
        if self._is_lost or self._n_bytes > REPLY_MAX_BYTES:
            self._is_lost, self._held = True, b""
            return
        *lines, self._held = (self._held + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and b"[DONE]" not in line:
                self._take(line[5:])

    def _take(self, payload: bytes) -> None:
        try:
            for choice in _decode(payload).get("choices") or ():
                self._take_delta(choice.get("index") or 0, choice.get("delta") or {})
        except (msgspec.DecodeError, AttributeError, TypeError, KeyError):
            self._is_lost = True

    def _take_delta(self, index: int, delta: dict[str, Any]) -> None:
        texts = self._text_by_choice.setdefault(index, [])
        if isinstance(delta.get("content"), str):
            texts.append(delta["content"])
        calls = self._calls_by_choice.setdefault(index, {})
        for piece in delta.get("tool_calls") or ():
            call = calls.setdefault(piece.get("index") or 0, {"name": "", "arguments": ""})
            function = piece.get("function") or {}
            call["name"] += function.get("name") or ""
            call["arguments"] += function.get("arguments") or ""

    def replies(self) -> list[Any]:
        """One message per choice; empty where the stream could not be followed."""
        if self._is_lost:
            return []
        return [self._message(index) for index in sorted(self._text_by_choice)]

    def _message(self, index: int) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._text_by_choice[index])}
        calls = self._calls_by_choice[index]
        if calls:
            message["tool_calls"] = [{"type": "function", "function": calls[at]} for at in sorted(calls)]
        return message
