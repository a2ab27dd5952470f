"""What crosses the pipe between examiner and candidate: plain data as frames of JSON."""

from __future__ import annotations

import collections
import decimal
import fractions
import json
import os
import select
import struct
import time
from collections.abc import Callable
from typing import Any

FRAME_MAX_BYTES = 4 << 20
WHY_MAX_CHARACTERS = 300
CONTAINERS: tuple[tuple[Any, str], ...]
CONTAINERS = ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "z"), (collections.deque, "q"))


class Gone(BaseException):
    """The candidate's process ended, went silent or talks nonsense. No test may take it for an exception of the
    code."""


def encode(value: Any, refer: Callable[[Any], Any]) -> Any:
    """A value as JSON: builtins by value, all else by `refer(value)`."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return {"i": format(int.__index__(value), "x")}
    if isinstance(value, float):
        return {"f": float.hex(value)}
    if isinstance(value, complex):
        return {"c": [float.hex(value.real), float.hex(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"b" if isinstance(value, bytes) else "ba": bytes(value).hex()}
    for kind, tag in CONTAINERS:
        if isinstance(value, kind):
            return {tag: [encode(item, refer) for item in kind.__iter__(value)]}
    if isinstance(value, dict):
        return {"d": [[encode(key, refer), encode(item, refer)] for key, item in dict.items(value)]}
    if isinstance(value, range):
        return {"r": [value.start, value.stop, value.step]}
    if isinstance(value, decimal.Decimal):
        return {"D": str(value)}
    if isinstance(value, fractions.Fraction):
        return {"F": [format(value.numerator, "x"), format(value.denominator, "x")]}
    return {"o": refer(value)}


def decode(told: Any, resolve: Callable[[Any], Any]) -> Any:
    """The value that JSON tells of; it holds exact builtins and what `resolve` makes of references."""
    if told is None or isinstance(told, (bool, str)):
        return told
    ((tag, body),) = told.items()
    if tag == "i":
        return int(body, 16)
    if tag == "f":
        return float.fromhex(body)
    if tag == "c":
        return complex(float.fromhex(body[0]), float.fromhex(body[1]))
    if tag in ("b", "ba"):
        return bytes.fromhex(body) if tag == "b" else bytearray.fromhex(body)
    if tag == "d":
        return {decode(key, resolve): decode(item, resolve) for key, item in body}
    if tag == "r":
        return range(*(int(part) for part in body))
    if tag == "D":
        return decimal.Decimal(body)
    if tag == "F":
        return fractions.Fraction(int(body[0], 16), int(body[1], 16))
    if tag == "o":
        return resolve(body)
    (kind,) = (kind for kind, its_tag in CONTAINERS if its_tag == tag)
    return kind([decode(item, resolve) for item in body])


def send(descriptor: int, message: Any) -> None:
    """Write one frame."""
    body = json.dumps(message).encode()
    if len(body) > FRAME_MAX_BYTES:
        raise ValueError(f"a value of {len(body)} bytes is too long; {FRAME_MAX_BYTES} is the limit")
    view = memoryview(struct.pack(">I", len(body)) + body)
    while view:
        view = view[os.write(descriptor, view) :]


def receive(descriptor: int, until_s: float | None = None) -> Any:
    """Read one frame; Gone where it does not come, or is none."""
    return json.loads(read_exactly(descriptor, length_of(read_exactly(descriptor, 4, until_s)), until_s))


def length_of(head: bytes) -> int:
    """The length that a frame's head tells."""
    length: int = struct.unpack(">I", head)[0]
    if length > FRAME_MAX_BYTES:
        raise Gone(f"it answered {length} bytes; {FRAME_MAX_BYTES} is the limit")
    return length


def read_exactly(descriptor: int, count: int, until_s: float | None) -> bytes:
    """Read `count` bytes before the deadline."""
    parts = []
    while count:
        if until_s is not None:
            ready, _, _ = select.select([descriptor], [], [], max(until_s - time.monotonic(), 0.0))
            if not ready:
                raise Gone("it did not answer in time")
        part = os.read(descriptor, min(count, 1 << 16))
        if not part:
            raise Gone("its process ended")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def message_of(error: BaseException) -> str:
    """What an exception says, whatever its own methods do."""
    try:
        return str(error)[:WHY_MAX_CHARACTERS]
    except BaseException:
        return "an exception whose text cannot be read"


def why_of(error: BaseException) -> str:
    """An exception in one line."""
    text = message_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
