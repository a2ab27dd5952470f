"""Answers of our own: JSON bodies, and every error in OpenAI's shape."""

from collections.abc import Mapping
from typing import Any

import msgspec

from loadwise.kernel.errors import Error, Overloaded
from loadwise.wire import heads
from loadwise.wire.exchange import Exchange
from loadwise.wire.heads import JSON_TYPE

_encode = msgspec.json.Encoder().encode


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    """`{"error": {message, type, param, code}}`, its type told by the status."""
    return heads.error_body(message, heads.error_kind(status), code, param)


def whole(value: Any) -> Any:
    """Facts as plain values with every field, defaults too, so that a reader need not know our defaults."""
    if isinstance(value, msgspec.Struct):
        return {field: whole(getattr(value, field)) for field in value.__struct_fields__}
    return value


def retry_after(seconds: float) -> bytes:
    """A Retry-After header block: whole seconds, at least one."""
    return b"retry-after: %d\r\n" % max(1, -int(-seconds // 1))


def respond_json(exchange: Exchange, value: Mapping[str, Any] | msgspec.Struct, status: int = 200) -> None:
    """Answer with a JSON object."""
    exchange.respond(status, JSON_TYPE, _encode(value))


def respond_error(exchange: Exchange, error: Error) -> None:
    """Answer with the error's own status."""
    headers = JSON_TYPE
    if isinstance(error, Overloaded):
        headers += retry_after(error.retry_after_s)
    exchange.respond(error.status, headers, error_body(error.status, error.message, code=error.code, param=error.param))
