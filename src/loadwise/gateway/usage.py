"""What an engine says it used, read from its answers; nonsense counts as silence, for then the estimate stands."""

from typing import Any

import msgspec

from loadwise.kernel.work import Usage
from loadwise.router.backends import CONTEXT_MAX_TOKENS

from .openai import UNREADABLE, read_leniently


class _Answer(msgspec.Struct):
    usage: Any = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


def read_usage(body: bytes) -> Usage | None:
    """Usage of a whole answer, or None where the engine sent none that can be read.

    Raises:
        ValueError: the body is not a JSON object.
    """
    try:
        return usage_of(_decode_answer(body).usage)
    except UNREADABLE as error:
        answer = read_leniently(body)
        if not isinstance(answer, dict):
            raise ValueError(str(error)) from error
        return usage_of(answer.get("usage"))


def usage_of(said: Any) -> Usage | None:
    """Usage as an engine said it, or None without a count of the prompt, or with one that cannot be."""
    if not isinstance(said, dict):
        return None
    prompt_tokens = _count(said.get("prompt_tokens"))
    completion_tokens = _count(said.get("completion_tokens", 0))
    if prompt_tokens is None or (completion_tokens is None and said["completion_tokens"] is not None):
        return None
    details = said.get("prompt_tokens_details")
    cached_tokens = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens or 0,
        cached_tokens=min(cached_tokens or 0, prompt_tokens),
    )


def _count(value: Any) -> int | None:
    """A number of tokens, or None where it is none, or more than any engine can have counted."""
    if type(value) is int and 0 <= value <= CONTEXT_MAX_TOKENS:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not value <= CONTEXT_MAX_TOKENS:
        return None
    n_tokens = int(max(value, 0))
    return n_tokens if n_tokens == max(value, 0) else None
