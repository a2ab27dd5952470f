"""Tokens of messages, and which conversation a request goes on with.

The emulator has no tokenizer; it counts by a stated rule: a message costs ceil(UTF-8 bytes / 4) tokens of its normal
form, at least one; the tools of a request cost the same for their JSON text. Text is spread evenly over its tokens.

A real engine finds cached prefixes by content. Here a request belongs to the conversation whose last context (messages
and the engine's reply) is the longest that the request's messages begin with; the engine then knows that many tokens of
its prompt. Messages are compared by role, trimmed text and tool calls, since clients rewrite what they send back.
Prefixes shared by conversations, such as a common system prompt, are not found.
"""

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from .script import Reply

BYTES_PER_TOKEN = 4
BLOCK_CHARACTERS = 64
"""A completion's prompt has no messages; it is compared in blocks of so many characters."""

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


def prompt_parts(prompt: str) -> list[str]:
    """What the engine reads of a completion request, in blocks."""
    return [prompt[i : i + BLOCK_CHARACTERS] for i in range(0, len(prompt), BLOCK_CHARACTERS)] or [""]


class Place(msgspec.Struct, frozen=True):
    """Where a request stands among the conversations."""

    key: str
    """The conversation's name in the engine."""
    prompt_tokens: int
    prefix_tokens: int
    """Leading tokens of the prompt that the conversation has seen before."""


class Conversations:
    """Remembers the ends of at most `limit` contexts, forgetting the one used least recently."""

    def __init__(self, limit: int = 20_000) -> None:
        self._limit = limit
        self._end_by_hash: dict[bytes, str] = {}
        self._n = 0

    def find(self, parts: Sequence[str]) -> Place:
        """Find the conversation that a request goes on with, or open a new one."""
        tokens, digests, total = [], [], 0
        chain = hashlib.blake2b(digest_size=16)
        for part in parts:
            chain = _extended(chain, part)
            total += max(text_tokens(part), 1)
            digests.append(chain.digest())
            tokens.append(total)
        for digest, n in zip(reversed(digests), reversed(tokens), strict=True):
            key = self._end_by_hash.pop(digest, None)
            if key is not None:
                self._end_by_hash[digest] = key
                return Place(key, total, n)
        self._n += 1
        return Place(f"c{self._n}", total, 0)

    def remember(self, key: str, parts: Sequence[str]) -> None:
        """The conversation's context now ends with these parts."""
        chain = hashlib.blake2b(digest_size=16)
        for part in parts:
            chain = _extended(chain, part)
        self._end_by_hash.pop(chain.digest(), None)
        self._end_by_hash[chain.digest()] = key
        if len(self._end_by_hash) > self._limit:
            del self._end_by_hash[next(iter(self._end_by_hash))]


def _extended(chain: "hashlib.blake2b", part: str) -> "hashlib.blake2b":
    data = part.encode("utf-8", "surrogatepass")
    chain.update(len(data).to_bytes(8, "big"))
    chain.update(data)
    return chain
