"""Answers of our own: JSON bodies, and every error in OpenAI's shape."""

from collections.abc import Mapping
from typing import Any

import msgspec

from loadwise.kernel.errors import Error, Overloaded
from loadwise.wire.exchange import Exchange
from loadwise.wire.heads import JSON_TYPE

_encode = msgspec.json.Encoder().encode

_TYPE_BY_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    """`{"error": {message, type, param, code}}`, as OpenAI's clients expect it."""
    kind = _TYPE_BY_STATUS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return _encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


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
