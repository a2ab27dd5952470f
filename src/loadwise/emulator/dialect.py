"""The engine's side of the OpenAI dialect, shaped as vLLM shapes it: strict requests in, answers and chunks out."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from loadwise.kernel.errors import CallerError, UnknownModel

from .conversation import BLOCK_TOKENS, BYTES_PER_TOKEN, message_parts, prompt_parts, text_tokens
from .script import MAX_OUTPUT_TOKENS, Reply

_decode = msgspec.json.decode
_encode = msgspec.json.encode


class CallRequest(msgspec.Struct, frozen=True):
    """One model call, checked."""

    body: dict[str, Any]
    is_chat: bool
    parts: list[str]
    """What the engine reads, in order."""
    is_stream: bool
    wants_usage: bool
    max_tokens: int | None
    stops: tuple[str, ...]
    min_tokens: int = 0
    """The answer is at least so long; `ignore_eos` with `max_tokens` makes it exactly that."""
    priority: int = 0
    """Lower is served first, by engines that schedule by priority."""


class Said(msgspec.Struct, frozen=True):
    """A reply cut to what was asked for."""

    reply: Reply
    n_tokens: int
    finish_reason: str


def parse_call(data: bytes, *, is_chat: bool, models: tuple[str, ...], block_tokens: int = BLOCK_TOKENS) -> CallRequest:
    """Read a request body.

    Args:
        block_tokens: In blocks of so many tokens a completion's prompt is compared with others.

    Raises:
        CallerError: it is no JSON object, or a field we use has a wrong type or value; the message names the field.
        UnknownModel: the engine serves other models.
    """
    try:
        body = _decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CallerError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise CallerError(f"the body is {type(body).__name__}, not an object")
    model = body.get("model")
    if model is not None and model not in models:
        raise UnknownModel(f"The model `{model}` does not exist. Valid aliases: {', '.join(models)}.", param="model")
    n = body.get("n")
    if n is not None and (n != 1 or isinstance(n, bool)):
        raise CallerError(f"n is {n!r}; the emulator gives one choice, so n must be 1", param="n")
    is_stream = _flag(body, "stream")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise CallerError(f"stream_options is {options!r}; it must be an object", param="stream_options")
    if options and not is_stream:
        raise CallerError("stream_options is only allowed when stream is true", param="stream_options")
    max_tokens = _limit(body)
    return CallRequest(
        body=body,
        is_chat=is_chat,
        parts=_chat_parts(body) if is_chat else _completion_parts(body, block_tokens),
        is_stream=is_stream,
        wants_usage=_flag(options or {}, "include_usage"),
        max_tokens=max_tokens,
        stops=_stops(body),
        min_tokens=_min_tokens(body, max_tokens),
        priority=_integer(body, "priority", least=-(2**31)),
    )


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise CallerError(f"{name} is {value!r}; it must be true or false", param=name)
    return bool(value)


def _chat_parts(body: Mapping[str, Any]) -> list[str]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise CallerError("messages must be a list of at least one message", param="messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise CallerError(f"messages[{i}] must be an object with a role", param="messages")
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise CallerError(f"messages[{i}].content must be a string or a list of parts", param="messages")
        if not isinstance(message.get("tool_calls") or [], list):
            raise CallerError(f"messages[{i}].tool_calls must be a list", param="messages")
    return message_parts(messages, body.get("tools"))


def _completion_parts(body: Mapping[str, Any], block_tokens: int) -> list[str]:
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise CallerError("prompt must be a string; the emulator takes one prompt, not tokens or lists", param="prompt")
    return prompt_parts(prompt, block_tokens)


def _limit(body: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise CallerError(f"{name} is {value!r}; it must be an integer of at least 1", param=name)
            return value
    return None


def _integer(body: Mapping[str, Any], name: str, least: int) -> int:
    value = body.get(name)
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
        raise CallerError(f"{name} is {value!r}; it must be an integer from {least} on", param=name)
    return value


def _min_tokens(body: Mapping[str, Any], max_tokens: int | None) -> int:
    least = _integer(body, "min_tokens", least=0)
    if least > (MAX_OUTPUT_TOKENS if max_tokens is None else max_tokens):
        raise CallerError(f"min_tokens is {least}, more than max_tokens = {max_tokens}", param="min_tokens")
    if _flag(body, "ignore_eos") and max_tokens is not None and max_tokens <= MAX_OUTPUT_TOKENS:
        return max_tokens
    return least


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise CallerError("stop must be a string or a list of strings", param="stop")
    return tuple(one for one in stops if one)


def cut(reply: Reply, call: CallRequest) -> Said:
    """Honour `stop` and `max_tokens`: what is really said, how many tokens it takes, and why it ends."""
    n_tokens = reply.output_tokens
    if n_tokens is None:
        n_tokens = text_tokens(reply.text) + sum(text_tokens(c.name + c.arguments) for c in reply.tool_calls)
    n_tokens = max(n_tokens, 1)
    finish_reason = "tool_calls" if reply.tool_calls else "stop"
    if n_tokens < call.min_tokens or (call.min_tokens and call.min_tokens == call.max_tokens):
        # Four characters a token, so that streams show every token and prompts that repeat it cost the same.
        n_tokens, finish_reason = call.min_tokens, "stop"
        reply = Reply(text=_of_length(reply.text, BYTES_PER_TOKEN * n_tokens))
        if n_tokens == call.max_tokens:
            return Said(reply, n_tokens, "length")
    ends = [i for i in (reply.text.find(stop) for stop in call.stops) if i >= 0]
    if ends:
        n_tokens = max(math.ceil(n_tokens * min(ends) / len(reply.text)), 1)
        reply = Reply(text=reply.text[: min(ends)])
        finish_reason = "stop"
    if call.max_tokens is not None and n_tokens > call.max_tokens:
        end = len(reply.text) * call.max_tokens // n_tokens
        return Said(Reply(text=reply.text[:end]), call.max_tokens, "length")
    return Said(reply, n_tokens, finish_reason)


def _of_length(text: str, n: int) -> str:
    """A text said over and over until it has `n` characters of ASCII."""
    text = text.encode("ascii", "replace").decode() + " "
    return (text * (n // len(text) + 1))[:n]


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """The `usage` object."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class Voice:
    """Says one reply: whole, or in pieces that follow the tokens."""

    def __init__(self, call: CallRequest, said: Said, answer_id: str, model: str, created: int) -> None:
        self._call = call
        self._said = said
        self._id = ("chatcmpl-" if call.is_chat else "cmpl-") + answer_id
        self._model = model
        self._created = created
        self._n_said = 0

    def whole(self, usage_object: dict[str, Any] | None) -> bytes:
        """The body of an answer that is not streamed."""
        text = self._said.reply.text
        choice: dict[str, Any] = {"index": 0}
        if self._call.is_chat:
            calls = self._tool_calls()
            message: dict[str, Any] = {"role": "assistant", "content": None if calls and not text else text}
            if calls:
                message["tool_calls"] = calls
            choice["message"] = message
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": self._said.finish_reason, "stop_reason": None}
        kind = "chat.completion" if self._call.is_chat else "text_completion"
        answer = self._envelope(kind) | {"choices": [choice]}
        if usage_object is not None:
            answer["usage"] = usage_object
        return _encode(answer)

    def opening(self) -> bytes:
        """The first chunk of a chat stream; nothing for a completion."""
        if not self._call.is_chat:
            return b""
        return self._chunk({"role": "assistant", "content": ""})

    def pieces(self, n_tokens: int) -> bytes:
        """The chunks of the next `n_tokens` tokens; may be empty."""
        text, total = self._said.reply.text, self._said.n_tokens
        begin = len(text) * self._n_said // total
        self._n_said = min(self._n_said + n_tokens, total)
        piece = text[begin : len(text) * self._n_said // total]
        return self._chunk({"content": piece}) if piece else b""

    def closing(self, usage_object: dict[str, Any] | None) -> bytes:
        """The last chunks: tool calls in two pieces each, the reason, and usage where it was asked for."""
        chunks = []
        for i, call in enumerate(self._tool_calls()):
            arguments = call["function"]["arguments"]
            begun = {"index": i, **call, "function": {"name": call["function"]["name"], "arguments": ""}}
            chunks.append(self._chunk({"tool_calls": [begun]}))
            chunks.append(self._chunk({"tool_calls": [{"index": i, "function": {"arguments": arguments}}]}))
        chunks.append(self._chunk({}, self._said.finish_reason))
        if usage_object is not None:
            kind = "chat.completion.chunk" if self._call.is_chat else "text_completion"
            chunks.append(_event(self._envelope(kind) | {"choices": [], "usage": usage_object}))
        return b"".join(chunks)

    def _tool_calls(self) -> list[dict[str, Any]]:
        return [
            {
                "id": call.call_id or f"call-{self._id}-{i}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(self._said.reply.tool_calls)
        ]

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice: dict[str, Any] = {"index": 0}
        if self._call.is_chat:
            choice["delta"] = delta
            kind = "chat.completion.chunk"
        else:
            choice["text"] = delta.get("content", "")
            kind = "text_completion"
        choice |= {"logprobs": None, "finish_reason": finish_reason}
        return _event(self._envelope(kind) | {"choices": [choice]})


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + _encode(chunk) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def error_answer(error: CallerError | Exception, status: int, param: str | None = None) -> bytes:
    """vLLM's error body: `code` repeats the status."""
    kind = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "InternalServerError")
    return _encode({"error": {"message": str(error), "type": kind, "param": param, "code": status}})
