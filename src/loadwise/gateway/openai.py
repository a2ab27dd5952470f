"""OpenAI's dialect: reads only what we need of a request, forwards the rest byte for byte, reads usage from answers.

A body is split once into its top-level fields, each kept as the bytes that the client wrote: a number, a nested object
or a field we have never heard of reaches the engine exactly as it was. Only `model` is replaced by the engine's own
name for it, `program_id` (ours) is taken out, and `stream_options.include_usage` is set where the client did not ask
for usage in a stream, because credit and reservations need it; the extra chunk is then kept from the client.
"""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from loadwise.kernel.errors import CallerError
from loadwise.kernel.events import AUTO
from loadwise.kernel.work import Usage

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode

BYTES_PER_TOKEN = 4
"""For estimates before the engine has counted."""


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Metadata(msgspec.Struct):
    task_type: str | None = None
    domain: str | None = None
    program_id: str | None = None
    session_id: str | None = None


_TYPE_BY_FIELD: dict[str, Any] = {
    "model": str,
    "stream": bool | None,
    "stream_options": _StreamOptions | None,
    "program_id": str | None,
    "metadata": _Metadata | None,
    "max_tokens": int | None,
    "max_completion_tokens": int | None,
}
_DECODER_BY_FIELD = {name: msgspec.json.Decoder(kind) for name, kind in _TYPE_BY_FIELD.items()}
_NO_METADATA = _Metadata()
_INCLUDE_USAGE = msgspec.Raw(b'{"include_usage":true}')


class ModelRequest:
    """One request for a model call, split into its fields."""

    __slots__ = ("_encoded_for", "_fields", "adds_usage", "is_stream", "max_output_tokens", "metadata", "model")

    def __init__(self, body: bytes, *, prompt_field: str) -> None:
        """Split a body.

        Args:
            prompt_field: `messages` (chat) or `prompt` (completions); it must be there.

        Raises:
            CallerError: not a JSON object, or a field we need has the wrong type.
        """
        try:
            fields = _decode_fields(body)
        except msgspec.DecodeError as error:
            raise CallerError(f"the body is not a JSON object: {error}", code="invalid_json") from error
        self._fields = fields
        self._encoded_for: tuple[str, bytes] | None = None
        self.model: str = self._read("model", AUTO)
        """As the client named it; `auto` where it named none."""
        self.is_stream: bool = bool(self._read("stream", False))
        metadata = self._read("metadata", None)
        self.metadata: _Metadata = _NO_METADATA if metadata is None else metadata
        self.max_output_tokens: int | None = self._read("max_completion_tokens", None)
        if self.max_output_tokens is None:
            self.max_output_tokens = self._read("max_tokens", None)
        self.adds_usage = self.is_stream and self._asks_no_usage()
        """Whether we ask for usage in the client's stead and must keep it from the client."""
        self._require_prompt(prompt_field)

    def _read(self, name: str, default: Any) -> Any:
        raw = self._fields.get(name)
        if raw is None:
            return default
        try:
            return _DECODER_BY_FIELD[name].decode(raw)
        except msgspec.DecodeError as error:
            raise CallerError(f"{name} is not valid: {error}", code="invalid_type", param=name) from error

    def _asks_no_usage(self) -> bool:
        options = self._read("stream_options", None)
        return options is None or not options.include_usage

    def _require_prompt(self, name: str) -> None:
        raw = self._fields.get(name)
        if raw is None:
            raise CallerError(f"{name} is missing", code="missing_field", param=name)
        first = bytes(raw)[:1]
        if name == "messages" and first != b"[":
            raise CallerError("messages must be a list", code="invalid_type", param="messages")
        if name == "messages" and bytes(raw)[1:].lstrip()[:1] == b"]":
            raise CallerError("messages is empty; it needs at least one message", code="invalid_value", param=name)
        if name == "prompt" and first not in (b'"', b"["):
            raise CallerError("prompt must be a string or a list", code="invalid_type", param="prompt")

    @property
    def program_id(self) -> str | None:
        """The program's name in the body, by whatever field."""
        named: str | None = self._read("program_id", None)
        return named or self.metadata.program_id or self.metadata.session_id

    @property
    def prompt_tokens(self) -> int:
        """An estimate from the prompt's length."""
        raw = self._fields.get("messages", self._fields.get("prompt"))
        return 0 if raw is None else len(memoryview(raw)) // BYTES_PER_TOKEN

    def messages(self) -> list[Any]:
        """The conversation as plain values; empty for a completion."""
        raw = self._fields.get("messages")
        try:
            return [] if raw is None else _decode_any(raw)
        except msgspec.DecodeError as error:
            raise CallerError(f"messages is not valid: {error}", code="invalid_json", param="messages") from error

    def prompt_text(self) -> str:
        """What the program was asked first: the text of the last user message, or the prompt."""
        for message in reversed(self.messages()):
            if isinstance(message, dict) and message.get("role") == "user":
                return text_of(message.get("content"))
        raw = self._fields.get("prompt")
        prompt = None if raw is None else _decode_any(raw)
        return prompt if isinstance(prompt, str) else ""

    def encode(self, served_model: str) -> bytes:
        """The body for an engine that knows the model as `served_model`."""
        if self._encoded_for is not None and self._encoded_for[0] == served_model:
            return self._encoded_for[1]
        fields = self._fields
        fields["model"] = msgspec.Raw(_encode(served_model))
        fields.pop("program_id", None)
        if self.adds_usage:
            fields["stream_options"] = self._usage_options()
        encoded = _encode(fields)
        self._encoded_for = (served_model, encoded)
        return encoded

    def _usage_options(self) -> msgspec.Raw:
        raw = self._fields.get("stream_options")
        said = None if raw is None else _decode_any(raw)
        if not said:
            return _INCLUDE_USAGE
        return msgspec.Raw(_encode({**said, "include_usage": True}))


def text_of(content: Any) -> str:
    """The text of a message's content: a string, or the text parts of a list, joined."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "\n".join(part for part in parts if isinstance(part, str))
    return ""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


class _Chunk(msgspec.Struct):
    usage: _Usage | None = None
    choices: list[msgspec.Raw] | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_USAGE_OBJECT = re.compile(rb'"usage"\s*:\s*\{')


def read_usage(body: bytes) -> Usage | None:
    """Usage of a whole answer, or None where the engine sent none.

    Raises:
        msgspec.DecodeError: the body is not a JSON object.
    """
    return _usage(_decode_answer(body).usage)


def _usage(said: _Usage | None) -> Usage | None:
    if said is None or said.prompt_tokens is None:
        return None
    details = said.prompt_tokens_details
    cached_tokens = 0 if details is None or details.cached_tokens is None else details.cached_tokens
    return Usage(
        prompt_tokens=max(said.prompt_tokens, 0),
        completion_tokens=max(said.completion_tokens or 0, 0),
        cached_tokens=min(max(cached_tokens, 0), max(said.prompt_tokens, 0)),
    )


EVENT_MAX_BYTES = 4 * 1024 * 1024
"""One event of a stream that has not ended; beyond it the bytes go through unread."""


class EventStream:
    """Follows a stream of server-sent events as it passes: whole events out, usage and the end noticed.

    Whole events only are let through, so that what the client has received before a break is always well formed.
    """

    __slots__ = ("_held", "drops_usage", "is_done", "n_bytes", "usage")

    def __init__(self, *, drops_usage: bool) -> None:
        self._held = b""
        self.drops_usage = drops_usage
        self.usage: Usage | None = None
        self.is_done = False
        """`[DONE]` has passed."""
        self.n_bytes = 0

    def feed(self, piece: bytes) -> bytes:
        """Take what the engine sent; return what may go to the client now."""
        data = self._held + piece if self._held else piece
        cut = _last_event_end(data)
        if cut == len(data):
            self._held = b""
        elif cut == 0 and len(data) > EVENT_MAX_BYTES:
            self._held, cut = b"", len(data)
        else:
            self._held = data[cut:]
            data = data[:cut]
        if not data:
            return data
        self.n_bytes += len(data)
        if b'"usage"' in data and _USAGE_OBJECT.search(data):
            data = self._take_usage(data)
        if b"[DONE]" in data[-64:] or b"data: [DONE]" in data:
            self.is_done = True
        return data

    def _take_usage(self, data: bytes) -> bytes:
        """Read usage from the events that carry it; drop an event that carries nothing else if we asked for it."""
        kept: list[bytes] = []
        done = 0
        for start, end in _events_with_usage(data):
            if self._reads_usage(data[start:end]) and self.drops_usage:
                kept.append(data[done:start])
                done = end
        return data if done == 0 else b"".join((*kept, data[done:]))

    def _reads_usage(self, event: bytes) -> bool:
        """Whether the event carries usage and nothing else; remembers the usage."""
        if not _USAGE_OBJECT.search(event):
            return False
        _, _, payload = event.partition(b"data:")
        try:
            chunk = _decode_chunk(payload.strip())
        except msgspec.DecodeError:
            return False
        usage = _usage(chunk.usage)
        if usage is None:
            return False
        self.usage = usage
        return not chunk.choices


def _last_event_end(data: bytes) -> int:
    """Where the last whole event ends, 0 where none does."""
    if data.endswith(b"\n\n"):
        return len(data)
    plain = data.rfind(b"\n\n")
    carriage = data.rfind(b"\r\n\r\n")
    return max(plain + 2 if plain >= 0 else 0, carriage + 4 if carriage >= 0 else 0)


def _events_with_usage(data: bytes) -> Iterator[tuple[int, int]]:
    """Where events that mention a usage object begin and end, each with its blank line."""
    end = 0
    for match in _USAGE_OBJECT.finditer(data):
        if match.start() < end:
            continue
        start = _last_event_end(data[end : match.start()]) + end
        plain = data.find(b"\n\n", match.end())
        carriage = data.find(b"\r\n\r\n", match.end())
        ends = [at for at in (plain + 2 if plain >= 0 else 0, carriage + 4 if carriage >= 0 else 0) if at]
        end = min(ends, default=len(data))
        yield start, end
