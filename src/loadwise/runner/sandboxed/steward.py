"""Runs inside a sandbox, beside the code that nobody trusts: unpacks its files, runs it, hands back what it left.

Given a JSON object as its one argument: `tar` (descriptor of the files, or null), `out` (descriptor to write to, or
null), `outputs` (relative paths), `output_bytes` (of each), `command`. It imports nothing of ours: any Python runs it.
"""

import contextlib
import json
import os
import signal
import stat
import struct
import subprocess
import sys
import tarfile


def unpack(descriptor: int) -> None:
    """Lay the files into the working directory."""
    with os.fdopen(descriptor, "rb") as file, tarfile.open(fileobj=file) as archive:
        if hasattr(tarfile, "fully_trusted_filter"):
            archive.extraction_filter = tarfile.fully_trusted_filter
        archive.extractall(".")


def hide() -> None:
    """Keep the other processes of the sandbox from reading this one's memory and descriptors."""
    with contextlib.suppress(Exception):
        import ctypes

        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


def hand_back(descriptor: int, names: list[str], limit_bytes: int) -> None:
    """Write each regular file that is there as its number, its length, whether it is cut, and its bytes."""
    with os.fdopen(descriptor, "wb") as out:
        for number, name in enumerate(names):
            try:
                opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:
                continue
            with os.fdopen(opened, "rb") as file:
                if not stat.S_ISREG(os.fstat(opened).st_mode):
                    continue
                content = file.read(limit_bytes + 1)
            is_cut = len(content) > limit_bytes
            content = content[:limit_bytes]
            out.write(struct.pack(">IQ?", number, len(content), is_cut))
            out.write(content)


def main() -> int:
    """Run what the argument says; the status is that of the command, 128 + n where signal n has killed it."""
    said = json.loads(sys.argv[1])
    hide()
    if said["tar"] is not None:
        unpack(said["tar"])
    process = subprocess.Popen(said["command"], close_fds=True)
    os.close(0)
    status = process.wait()
    with contextlib.suppress(OSError):
        os.kill(-1, signal.SIGKILL)  # whatever it left running must not write while its files are read
    if said["out"] is not None:
        hand_back(said["out"], said["outputs"], said["output_bytes"])
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
