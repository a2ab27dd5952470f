"""OpenAI's dialect: reads only what we need of a request, forwards the rest byte for byte.

A body is split once into its top-level fields, each kept as the bytes that the client wrote: a number, a nested object
or a field we have never heard of reaches the engine exactly as it was. Of a field that is written twice the last one
counts. Only `model` is replaced by the engine's own name for it, `program_id` (ours) is taken out, and
`stream_options.include_usage` is set where the client did not ask for usage in a stream, because credit and
reservations need it; the extra chunk is then kept from the client.
"""

import json
import re
from typing import Any, NoReturn

import msgspec

from loadwise.kernel.errors import CallerError
from loadwise.kernel.events import AUTO

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode

MESSAGES_MAX = 4096
MESSAGES_MAX_BYTES = 1024 * 1024
COMMAS_MAX = 131_072
BRACKETS_MAX = 65_536
"""A conversation beyond any of these is not read by us, only handed on: reading takes time from everybody else's turns,
and grows with the number of values more than with their length."""
LENGTH_MAX_BYTES = 8 * 1024 * 1024
"""The longest conversation in which the last question is looked for."""
LARGE_BYTES = 1024 * 1024
COLONS_MAX = 262_144
"""In a body that is large, beside its messages or its prompt: as many fields as it may have."""
BYTES_PER_TOKEN = 4
"""For estimates before the engine has counted."""
TOKENS_MAX = 2**40
"""Counts beyond it are nonsense that an engine or a client has sent."""
UNREADABLE = (msgspec.DecodeError, RecursionError)
"""What the decoder raises on bytes from outside: not JSON, another shape, or nested deeper than it follows."""


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Metadata(msgspec.Struct):
    task_type: str | None = None
    domain: str | None = None
    program_id: str | None = None
    session_id: str | None = None
    reference: Any = None
    """What would be right, for the program's verifier; engines see it as metadata, never as part of the prompt."""

    def references(self) -> dict[str, str]:
        """References by name, as a verifier takes them."""
        return {"reference": self.reference} if isinstance(self.reference, str) else {}


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
_TRUE = msgspec.Raw(b"true")


class ModelRequest:
    """One request for a model call, split into its fields."""

    __slots__ = (
        "_encoded_for",
        "_fields",
        "_messages",
        "adds_usage",
        "is_stream",
        "is_unread",
        "max_output_tokens",
        "metadata",
        "model",
    )

    def __init__(self, body: bytes, *, prompt_field: str) -> None:
        """Split a body.

        Args:
            prompt_field: `messages` (chat) or `prompt` (completions); it must be there.

        Raises:
            CallerError: not a JSON object, or a field we need has the wrong type.
        """
        if len(body) > LARGE_BYTES:
            _require_few_fields(body)
        self._fields = fields = _split(body)
        self._encoded_for: tuple[tuple[str, int | None], bytes] | None = None
        self._messages: list[Any] | None = None
        self.is_unread = False
        """Whether `messages` was asked for a conversation that it could not or would not read."""
        self.model: str = self._read("model", AUTO)
        """As the client named it; `auto` where it named none."""
        self.is_stream: bool = bool(self._read("stream", False))
        metadata = self._read("metadata", None)
        self.metadata: _Metadata = _NO_METADATA if metadata is None else metadata
        self.max_output_tokens = self._limit()
        self.adds_usage = self.is_stream and self._asks_no_usage()
        """Whether we ask for usage in the client's stead and must keep it from the client."""
        if self.adds_usage:
            fields["stream_options"] = _with_usage(fields.get("stream_options"))
        self._require_prompt(prompt_field)

    def _read(self, name: str, default: Any) -> Any:
        raw = self._fields.get(name)
        if raw is None:
            return default
        try:
            return _DECODER_BY_FIELD[name].decode(raw)
        except UNREADABLE as error:
            raise CallerError(f"{name} is not valid: {error}", code="invalid_type", param=name) from error

    def _limit(self) -> int | None:
        """How many tokens the client allows; negative numbers mean no limit to some engines."""
        limit: int | None = self._read("max_completion_tokens", None)
        if limit is None:
            limit = self._read("max_tokens", None)
        return None if limit is None or limit < 0 else min(limit, TOKENS_MAX)

    def _asks_no_usage(self) -> bool:
        options = self._read("stream_options", None)
        return options is None or not options.include_usage

    def _require_prompt(self, name: str) -> None:
        raw = self._fields.get(name)
        if raw is None:
            raise CallerError(f"{name} is missing", code="missing_field", param=name)
        begin = bytes(memoryview(raw)[:64])  # a view: a conversation may have megabytes
        if name == "messages" and begin[:1] != b"[":
            raise CallerError("messages must be a list", code="invalid_type", param="messages")
        if name == "messages" and begin[1:].lstrip()[:1] == b"]":
            raise CallerError("messages is empty; it needs at least one message", code="invalid_value", param=name)
        if name == "prompt" and begin[:1] not in (b'"', b"["):
            raise CallerError("prompt must be a string or a list", code="invalid_type", param="prompt")

    @property
    def program_id(self) -> str | None:
        """The program's name in the body, by whatever field; `program_id` is ours, so there an empty one counts."""
        named: str | None = self._read("program_id", None)
        return named if named is not None else self.metadata.program_id or self.metadata.session_id or None

    @property
    def prompt_tokens(self) -> int:
        """An estimate from the prompt's length."""
        raw = self._fields.get("messages", self._fields.get("prompt"))
        return 0 if raw is None else len(memoryview(raw)) // BYTES_PER_TOKEN

    @property
    def n_answers(self) -> int:
        """How many answers are asked for at once; one where that cannot be told, for the engine refuses such a call."""
        fields = self._fields
        n = self._count("n") if "n" in fields else 1
        if "best_of" in fields:
            n = max(n, self._count("best_of"))
        return n if "messages" in fields else n * self._n_prompts()

    def _count(self, name: str) -> int:
        said = read_leniently(self._fields[name])
        return min(max(said, 1), TOKENS_MAX) if isinstance(said, int) else 1

    def _n_prompts(self) -> int:
        """A list of texts, or of lists of tokens, is so many prompts; a list of tokens is one."""
        raw = self._fields.get("prompt")
        if raw is None:
            return 1
        begin = bytes(memoryview(raw)[:64])  # a view: there may be a great many tokens
        if begin[:1] != b"[" or begin[1:].lstrip()[:1] not in (b'"', b"["):
            return 1
        try:
            return len(_decode_items(raw))
        except UNREADABLE:
            return 1

    def messages(self) -> list[Any]:
        """The conversation as plain values, read once; empty for a completion, where it holds what we cannot read, and
        where it is longer than we read (`is_unread`)."""
        known = self._messages
        if known is None:
            known = self._messages = self._read_messages(MESSAGES_MAX_BYTES)
            self.is_unread = not known and "messages" in self._fields
        return known

    def _read_messages(self, limit_bytes: int) -> list[Any]:
        raw = self._fields.get("messages")
        if raw is None or not is_readable(raw, limit_bytes):
            return []
        messages = read_leniently(raw)
        return messages if isinstance(messages, list) and len(messages) <= MESSAGES_MAX else []

    def forget_messages(self) -> None:
        """Let go of the plain values: a turn may be open for long."""
        self._messages = None

    def prompt_text(self) -> str:
        """What the program was asked first: the text of the last user message, or the prompt."""
        # A long text is as good as any; what costs is a great many values.
        messages = self.messages()
        if self.is_unread and len(memoryview(self._fields["messages"])) > MESSAGES_MAX_BYTES:
            messages = self._read_messages(LENGTH_MAX_BYTES)
        for message in reversed(messages):
            if isinstance(message, dict) and message.get("role") == "user":
                return text_of(message.get("content"))
        raw = self._fields.get("prompt")
        prompt = read_leniently(raw) if raw is not None and bytes(memoryview(raw)[:1]) == b'"' else None
        return prompt if isinstance(prompt, str) else ""

    def encode(self, served_model: str, priority: int | None = None) -> bytes:
        """The body for an engine that knows the model as `served_model`.

        Args:
            priority: in the engine's own sense; None where it takes none, or nobody has asked for any.
        """
        wanted = (served_model, priority)
        if self._encoded_for is not None and self._encoded_for[0] == wanted:
            return self._encoded_for[1]
        fields = dict(self._fields)
        fields["model"] = msgspec.Raw(_encode(served_model))
        fields.pop("program_id", None)
        if priority is not None:
            fields["priority"] = msgspec.Raw(_encode(priority))
        encoded = _encode(fields)
        self._encoded_for = (wanted, encoded)
        return encoded


def is_readable(raw: msgspec.Raw | bytes, limit_bytes: int) -> bool:
    """Whether a value is small enough to be read within some ten milliseconds, told without reading it."""
    n_bytes = len(memoryview(raw))
    if n_bytes <= BRACKETS_MAX:
        return True
    if n_bytes > limit_bytes:
        return False
    written = bytes(raw)
    return written.count(b",") <= COMMAS_MAX and written.count(b"{") + written.count(b"[") <= BRACKETS_MAX


class _Prompts(msgspec.Struct):
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")


_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_prompts = msgspec.json.Decoder(_Prompts).decode


def _require_few_fields(body: bytes) -> None:
    """Refuse a body of a great many fields before they are told apart.

    Raises:
        CallerError: there are too many.
    """
    try:
        prompts = _decode_prompts(body)
    except (*UNREADABLE, UnicodeDecodeError):
        return  # `_split` says what is wrong with it
    beside = body.count(b":") - bytes(prompts.messages).count(b":") - bytes(prompts.prompt).count(b":")
    if beside > COLONS_MAX:
        raise CallerError(f"the body has about {beside} fields beside its prompt; {COLONS_MAX} is the limit")


def _split(body: bytes) -> dict[str, msgspec.Raw]:
    """The fields of a JSON object, each as it was written.

    Raises:
        CallerError: it is not one.
    """
    try:
        if not body.isascii():
            body.decode()
        return _decode_fields(body)
    except UnicodeDecodeError as error:
        raise CallerError(f"the body is not UTF-8: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise CallerError("the body is nested too deeply", code="invalid_json") from error
    except msgspec.DecodeError as error:
        if b"\\u" in body and is_readable(body, len(body)):
            try:
                return _split_leniently(body.decode())
            except (ValueError, RecursionError):
                pass
        raise CallerError(f"the body is not a JSON object: {error}", code="invalid_json") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_lenient = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=str, parse_float=str)
_SPACE = re.compile(r"[ \t\n\r]*")


def _split_leniently(text: str) -> dict[str, msgspec.Raw]:
    """The same for a body with half a surrogate pair in a string, which clients that cut texts send: JSON allows it.

    Raises:
        ValueError: not a JSON object.
    """
    fields: dict[str, msgspec.Raw] = {}
    at = _after_space(text, 0)
    separator = text[at : at + 1]
    if separator != "{":
        raise ValueError("not an object")
    at = _after_space(text, at + 1)
    while text[at : at + 1] != "}" or separator == ",":
        if text[at : at + 1] != '"':
            raise ValueError("not a name")
        name, at = _lenient.raw_decode(text, at)
        name.encode()  # half a pair in a name is refused
        at = _after_space(text, at)
        if text[at : at + 1] != ":":
            raise ValueError("no value")
        start = _after_space(text, at + 1)
        _, at = _lenient.raw_decode(text, start)
        fields[name] = msgspec.Raw(text[start:at].encode())
        at = _after_space(text, at)
        separator = text[at : at + 1]
        if separator != ",":
            break
        at = _after_space(text, at + 1)
    if text[at : at + 1] != "}" or _after_space(text, at + 1) != len(text):
        raise ValueError("no end")
    return fields


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def read_leniently(raw: msgspec.Raw | bytes | None) -> Any:
    """A value for our own use; None where it holds a number or a text that Python cannot."""
    if raw is None:
        return None
    try:
        return _decode_any(raw)
    except UNREADABLE:
        pass
    try:
        return json.loads(bytes(raw), parse_int=_integer)
    except (ValueError, RecursionError):
        return None


def _integer(digits: str) -> int | str:
    return int(digits) if len(digits) < 1000 else digits  # Python refuses to convert very long ones


_decode_options = msgspec.json.Decoder(dict[str, msgspec.Raw] | None).decode


def _with_usage(raw: msgspec.Raw | None) -> msgspec.Raw:
    """The client's stream options, each as it was written, and ours."""
    said = None if raw is None else _decode_options(raw)
    return msgspec.Raw(_encode({**(said or {}), "include_usage": _TRUE}))


TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


def text_of(content: Any) -> str:
    """The text of a message's content: a string, or the text parts of a list, joined."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join([text for part in content if (text := part_text(part)) is not None])
    return ""


def part_text(part: Any) -> str | None:
    """The text of a part of a message's content, or None where it is not a text."""
    if isinstance(part, dict):
        kind = part.get("type", "text")
        part = part.get("text") if isinstance(kind, str) and kind in TEXT_PARTS else None
    return part if isinstance(part, str) else None
