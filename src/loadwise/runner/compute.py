"""A worker process: calls pure functions by name, one after another, as frames of JSON say; see `workers`.

It runs as `python -m loadwise.runner.compute`. A frame is its length in four bytes, high byte first, and a JSON object.
"""

import contextlib
import json
import os
import resource
import struct
import sys
from typing import Any, BinaryIO

LENGTH = struct.Struct(">I")
FRAME_MAX_BYTES = 256 * 1024 * 1024


def read_frame(source: BinaryIO) -> Any:
    """The next frame; None where the source has ended."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (n_bytes,) = LENGTH.unpack(head)
    if n_bytes > FRAME_MAX_BYTES:
        raise ValueError(f"a frame of {n_bytes} bytes; {FRAME_MAX_BYTES} is the limit")
    return json.loads(source.read(n_bytes))


def frame(value: Any) -> bytes:
    """A value as a frame; halves of surrogate pairs pass as escapes."""
    body = json.dumps(value).encode("ascii")
    return LENGTH.pack(len(body)) + body


def bound_memory(n_bytes: int) -> None:
    """Limit this process's address space, as far as it may be."""
    with contextlib.suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(
            resource.RLIMIT_AS, (n_bytes if hard == resource.RLIM_INFINITY else min(n_bytes, hard), hard)
        )


def answer(said: Any) -> dict[str, Any]:
    """Call what is asked for."""
    from loadwise.verify.computations import COMPUTATIONS

    function = COMPUTATIONS.get(said["function"])
    if function is None:
        return {"problem": "refused", "text": f"there is no computation {said['function']!r}"}
    bound_memory(int(said["memory_bytes"]))
    try:
        return {"value": function(**said["arguments"])}
    except MemoryError:
        return {"problem": "memory", "text": "MemoryError"}
    except RecursionError:
        return {"problem": "error", "text": "RecursionError"}
    except Exception as error:
        return {"problem": "error", "text": f"{type(error).__name__}: {error}"[:300]}


def main() -> None:
    """Serve until the input ends."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not come between frames
    source = sys.stdin.buffer
    while (said := read_frame(source)) is not None:
        try:
            reply = frame(answer(said))
        except (TypeError, ValueError, MemoryError) as error:
            reply = frame({"problem": "error", "text": f"its value is no JSON: {error}"[:300]})
        out.write(reply)
        out.flush()


if __name__ == "__main__":
    main()
