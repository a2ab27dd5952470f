"""Frames: how bytes lie in a file, so that every torn or altered byte is noticed.

A file is an eight-byte magic and then frames. A frame is a marker, the payload's length, its CRC-32 and the payload.
The marker cannot occur in UTF-8, so no text that a client sends can look like a frame; it is what a reader looks for
to tell a torn tail (no whole frame follows) from a damaged middle (one does).
"""

import struct
import zlib
from typing import BinaryIO

MAGIC_BYTES = 8
SEGMENT_MAGIC = b"\x89LWJ\r\n\x1a\n"
SNAPSHOT_MAGIC = b"\x89LWS\r\n\x1a\n"
"""As in PNG: a high bit and both line endings betray a transfer that took the file for text."""

MARKER = b"\xfeLW\xff"
HEAD = struct.Struct("<4sII")
FRAME_MAX_BYTES = 16 << 20
"""Longest payload of an entry. An event holds no prompt, so a longer one is a mistake or a damaged length."""


def frame(payload: bytes) -> bytes:
    """The payload with its head."""
    return HEAD.pack(MARKER, len(payload), zlib.crc32(payload)) + payload


def take_frame(data: bytes | memoryview, offset: int, max_bytes: int = FRAME_MAX_BYTES) -> memoryview | None:
    """The payload of the whole and undamaged frame at `offset`, or None where there is none."""
    end = offset + HEAD.size
    if end > len(data):
        return None
    marker, n_bytes, crc = HEAD.unpack_from(data, offset)
    if marker != MARKER or n_bytes > max_bytes or end + n_bytes > len(data):
        return None
    payload = memoryview(data)[end : end + n_bytes]
    return payload if zlib.crc32(payload) == crc else None


def read_frame(file: BinaryIO, n_left_bytes: int) -> bytes | None:
    """The payload of the whole and undamaged frame at the file's position, or None where there is none.

    Args:
        n_left_bytes: how much of the file may be read.
    """
    if n_left_bytes < HEAD.size:
        return None
    marker, n_bytes, crc = HEAD.unpack(file.read(HEAD.size))
    if marker != MARKER or n_bytes > FRAME_MAX_BYTES or n_bytes > n_left_bytes - HEAD.size:
        return None
    payload = file.read(n_bytes)
    return payload if zlib.crc32(payload) == crc else None


def find_frame(data: bytes, offset: int) -> int | None:
    """Where the next whole and undamaged frame begins at or after `offset`, or None."""
    at = data.find(MARKER, offset)
    while at >= 0:
        if take_frame(data, at) is not None:
            return at
        at = data.find(MARKER, at + 1)
    return None
