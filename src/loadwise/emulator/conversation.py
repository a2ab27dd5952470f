"""Tokens of messages, and which conversation a request goes on with.

The emulator has no tokenizer; it counts by a stated rule: a message costs ceil(UTF-8 bytes / 4) tokens of its normal
form, at least one; the tools of a request cost the same for their JSON text. Text is spread evenly over its tokens.

A real engine finds cached prefixes by content. Here the beginnings of all prompts and answers are remembered, message
by message (a completion's prompt: block by block), each with the origin of its tokens (`EngineRequest.line`). A request
has the origins of the longest beginning that is known, be it its own conversation, one it forked from, or a system
prompt, and new ones from there. Messages are compared by role, trimmed text and tool calls, since clients rewrite what
they send back. Engines that know conversations only are told which one it goes on with: the one whose prompt or context
(with the engine's reply) is the longest that the request begins with.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from .script import Reply

BYTES_PER_TOKEN = 4
BLOCK_TOKENS = 16
"""A completion's prompt has no messages; it is compared in blocks, the engine's own where that has any."""

_encode = msgspec.json.Encoder(order="deterministic").encode


def text_tokens(text: str) -> int:
    """Tokens of a text by the emulator's rule.

    >>> text_tokens(""), text_tokens("abcd"), text_tokens("abcde")
    (0, 1, 2)
    """
    return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)


def normal_message(message: Mapping[str, Any]) -> str:
    """What counts of a message, as one string."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        texts = [part if isinstance(part, str) else str(raw) for part, raw in zip(parts, content, strict=True)]
        content = "".join(texts)
    text = content.strip() if isinstance(content, str) else ""
    calls = [_normal_call(call) for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    return "\x1f".join([str(message.get("role")), text, *calls])


def normal_reply(reply: Reply) -> str:
    """The assistant message that a client will send back for this reply."""
    calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in reply.tool_calls]
    return normal_message({"role": "assistant", "content": reply.text, "tool_calls": calls})


def _normal_call(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return ""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            arguments = _encode(msgspec.json.decode(arguments)).decode()
    return f"{function.get('name')}({arguments})"


def message_parts(messages: Sequence[Mapping[str, Any]], tools: Any) -> list[str]:
    """What the engine reads of a chat request: tools first, then message by message."""
    parts = [normal_message(message) for message in messages]
    return [_encode(tools).decode(), *parts] if tools else parts


def prompt_parts(prompt: str, block_tokens: int = BLOCK_TOKENS) -> list[str]:
    """What the engine reads of a completion request, in blocks."""
    n = block_tokens * BYTES_PER_TOKEN
    return [prompt[i : i + n] for i in range(0, len(prompt), n)] or [""]


Line = tuple[tuple[int, int], ...]
"""Runs (first token, origin)."""


class Place(msgspec.Struct, frozen=True):
    """Where a request stands among the conversations."""

    key: str
    """The conversation's name in the engine."""
    prompt_tokens: int
    prefix_tokens: int
    """Leading tokens of the prompt that the conversation has seen before."""
    line: Line
    """Where the prompt's tokens come from."""


class _Known(msgspec.Struct, frozen=True):
    """A beginning of some prompt or context."""

    key: str
    line: Line
    n_tokens: int
    """How many tokens of `line` it covers."""
    is_end: bool
    """A whole prompt or context ended here."""
    is_tip: bool = False
    """Nothing follows yet, so that whoever goes on may keep the last origin: lines stay short."""


class Conversations:
    """Remembers at most `limit` beginnings, forgetting the one used least recently."""

    def __init__(self, limit: int = 200_000) -> None:
        self._limit = limit
        self._known: dict[bytes, _Known] = {}
        self._n = 0
        self._n_origins = 0

    def find(self, parts: Sequence[str]) -> Place:
        """Find what a request goes on with, and remember its prompt: it can be shared while it is still answered."""
        marks = list(_marks(parts))
        total = marks[-1][1]
        i, known = self._longest(marks)
        line = self._line_after(known)
        if known is not None and known.is_tip and i + 1 < len(marks):
            line = known.line
        key, prefix_tokens = self._conversation(marks)
        # The shortest beginnings last: they are shared by most, so they are forgotten last.
        for j in range(len(marks) - 1, -1, -1):
            digest, n_tokens = marks[j]
            before = self._known.pop(digest, None)
            is_end = j + 1 == len(marks) or (before is not None and before.is_end)
            owner = before.key if before is not None and before.is_end else key
            self._known[digest] = _Known(owner, line, n_tokens, is_end)
        self._forget()
        return Place(key, total, prefix_tokens, line)

    def remember_reply(self, place: Place, parts: Sequence[str], n_said: int) -> None:
        """A request was answered.

        Args:
            parts: Its prompt and its answer, as a client will send them back.
            n_said: Tokens of the answer that the client can send back: none of one that is partly hidden.
        """
        marks = list(_marks(parts))
        known_tokens = place.prompt_tokens + n_said
        for j, (digest, n_tokens) in enumerate(marks):
            if n_tokens <= place.prompt_tokens and j + 1 < len(marks):
                continue
            is_last = j + 1 == len(marks)
            self._known.pop(digest, None)
            n_here = min(n_tokens, known_tokens)
            self._known[digest] = _Known(place.key, place.line, n_here, is_last, is_tip=is_last and n_said > 0)
        self._forget()

    def _longest(self, marks: Sequence[tuple[bytes, int]]) -> tuple[int, _Known | None]:
        for i in range(len(marks) - 1, -1, -1):
            known = self._known.get(marks[i][0])
            if known is not None:
                return i, known
        return -1, None

    def _conversation(self, marks: Sequence[tuple[bytes, int]]) -> tuple[str, int]:
        for digest, n_tokens in reversed(marks):
            known = self._known.get(digest)
            if known is not None and known.is_end:
                return known.key, n_tokens
        self._n += 1
        return f"c{self._n}", 0

    def _line_after(self, known: _Known | None) -> Line:
        self._n_origins += 1
        if known is None:
            return ((0, self._n_origins),)
        return (*(run for run in known.line if run[0] < known.n_tokens), (known.n_tokens, self._n_origins))

    def _forget(self) -> None:
        while len(self._known) > self._limit:
            del self._known[next(iter(self._known))]


def _marks(parts: Iterable[str]) -> Iterable[tuple[bytes, int]]:
    """Of each beginning of a context: its digest and its tokens."""
    total, chain = 0, hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        chain.update(len(data).to_bytes(8, "big"))
        chain.update(data)
        total += max(-(-len(data) // BYTES_PER_TOKEN), 1)
        yield chain.digest(), total
