"""What waits to be judged, on disk: after a crash it is judged all the same.

A journal holds no prompts and no answers, so what a verifier needs is kept beside it until there is a verdict, one
file a program, readable by this user only. The files are bounded together; what finds no room is judged from memory
and does not survive a restart. A file is on disk before its program's finish is acknowledged, and gone once the
verdict is.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from loadwise.kernel.errors import JournalError
from loadwise.kernel.fact import Fact
from loadwise.verify.case import Case

SUFFIX = ".case"


class Job(Fact, frozen=True, kw_only=True):
    """One ended program to be judged."""

    program_id: str
    task_type: str
    """Names the verifier."""
    case: Case
    lack: str = ""
    """Why there is no case to judge: what it needs was not kept."""
    is_spooled: bool = False
    """The case lies in the spool and not here: ten thousand of them would fill memory."""


def encode_job(job: Job) -> bytes:
    """As bytes; texts may hold halves of surrogate pairs, which JSON escapes."""
    said = {"program_id": job.program_id, "task_type": job.task_type, "lack": job.lack, "case": job.case.to_builtins()}
    return json.dumps(said).encode("ascii")


def decode_job(data: bytes) -> Job:
    """The job again.

    Raises:
        ValueError: it is none.
    """
    try:
        said: dict[str, Any] = json.loads(data)
        return Job(
            program_id=said["program_id"], task_type=said["task_type"], lack=said["lack"], case=Case(**said["case"])
        )
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a spooled case: {error}") from error


class Spool:
    """A directory of cases. Its methods block; use it from one thread at a time.

    Raises:
        JournalError: the directory cannot be made.
    """

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise JournalError(f"spool {str(path)!r} cannot be made: {error}") from error
        self._n_bytes_by_name = {file.name: file.stat().st_size for file in path.glob(f"*{SUFFIX}")}
        for torn in path.glob("*.tmp"):
            torn.unlink(missing_ok=True)

    @property
    def n_bytes(self) -> int:
        """On disk now."""
        return sum(self._n_bytes_by_name.values())

    def put(self, job: Job) -> str | None:
        """Write a job down, durably; says why where it is not."""
        data, name = encode_job(job), _name(job.program_id)
        if self.n_bytes - self._n_bytes_by_name.get(name, 0) + len(data) > self._max_bytes:
            return f"the spool holds {self.n_bytes} bytes; {self._max_bytes} is the limit"
        held = self._path / f"{name}.tmp"
        try:
            fd = os.open(held, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(fd)
            os.replace(held, self._path / name)
            self._sync()
        except OSError as error:
            with contextlib.suppress(OSError):
                held.unlink(missing_ok=True)
            return f"the spool cannot be written: {error}"
        self._n_bytes_by_name[name] = len(data)
        return None

    def remove(self, program_id: str) -> None:
        """The program is judged, or gone."""
        name = _name(program_id)
        self._n_bytes_by_name.pop(name, None)
        with contextlib.suppress(OSError):
            (self._path / name).unlink(missing_ok=True)

    def __contains__(self, program_id: str) -> bool:
        return _name(program_id) in self._n_bytes_by_name

    def get(self, program_id: str) -> Job | None:
        """What was written of a program; None where there is nothing readable. May be called on any thread."""
        try:
            return decode_job((self._path / _name(program_id)).read_bytes())
        except (OSError, ValueError):
            return None

    def keep_only(self, program_ids: Iterable[str]) -> int:
        """Remove what belongs to no other program; returns how many there were."""
        others = self._n_bytes_by_name.keys() - {_name(program_id) for program_id in program_ids}
        for name in others:
            del self._n_bytes_by_name[name]
            with contextlib.suppress(OSError):
                (self._path / name).unlink(missing_ok=True)
        return len(others)

    def _sync(self) -> None:
        fd = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _name(program_id: str) -> str:
    return hashlib.sha256(program_id.encode("utf-8", "surrogatepass")).hexdigest()[:40] + SUFFIX
