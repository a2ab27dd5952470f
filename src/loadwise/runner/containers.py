"""Tests in a container, through a container engine's command line. Written to docker's and podman's documented
interface and tried against a fake engine only: unproven until it has run with a real one.
"""

import io
import os
import secrets
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Protocol

import msgspec

from loadwise.verify.check import Finding, FindingStatus, Limits, RunContainer

from .bounded import run_bounded
from .containment import KILLED_BY, Outcome, Trouble, described

ENGINES = ("podman", "docker")
STOPPED_CONTAINER = "container:"
_SETUP = Limits(wall_s=300.0, cpu_s=300.0, memory_bytes=8 << 30, processes=256, output_bytes=256 << 20)


class ContainerEngine(Protocol):
    """What carries out `RunContainer`; blocks its thread."""

    def run(self, check: RunContainer) -> Finding:
        """Run to the end or to a limit; never raises."""
        ...


class NoContainers:
    """There is no engine here."""

    def run(self, check: RunContainer) -> Finding:
        """Refuse."""
        reason = f"there is no container engine on this machine ({' or '.join(ENGINES)})"
        return Finding(status=FindingStatus.REFUSED, reason=reason)


def find_engine(command: str | None = None) -> ContainerEngine:
    """The engine that a configuration names, or the first that is installed."""
    for name in (command,) if command else ENGINES:
        path = shutil.which(name) if name else None
        if path is not None:
            return CommandLineEngine(path)
    return NoContainers()


class CommandLineEngine:
    """docker or podman by their command line.

    Args:
        path: of the program.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def run(self, check: RunContainer) -> Finding:
        """Create a container without network, copy the files in, run, copy the outputs out, remove it."""
        name = f"loadwise-{secrets.token_hex(8)}"
        image = check.image
        try:
            if image.startswith(STOPPED_CONTAINER):
                image = f"{name}-image"
                problem = self._problem("commit", check.image.removeprefix(STOPPED_CONTAINER), image)
                if problem is not None:
                    return problem
            problem = self._problem("create", *self._options(name, check.limits), image, *check.argv)
            if problem is None and check.files:
                problem = self._problem("cp", "-", f"{name}:/", stdin=_archive(check.files))
            if problem is not None:
                return problem
            outcome = self._call(check.limits, "start", "--attach", name)
            return _finding(
                outcome, check, {path: found for path in check.outputs if (found := self._read(name, path, check))}
            )
        finally:
            self._call(_SETUP, "rm", "--force", "--volumes", name)
            if image != check.image:
                self._call(_SETUP, "rmi", "--force", image)

    def _options(self, name: str, limits: Limits) -> list[str]:
        return [
            f"--name={name}",
            "--network=none",
            "--cap-drop=ALL",
            "--security-opt=no-new-privileges",
            f"--memory={limits.memory_bytes}",
            f"--memory-swap={limits.memory_bytes}",
            f"--pids-limit={limits.processes}",
            f"--ulimit=fsize={limits.file_bytes}",
            f"--ulimit=cpu={max(1, int(limits.cpu_s))}",
        ]

    def _call(self, limits: Limits, *words: str, stdin: bytes = b"") -> Outcome:
        # The client's own memory and processes are not the container's.
        own = msgspec.structs.replace(_SETUP, wall_s=limits.wall_s, output_bytes=limits.output_bytes)
        return run_bounded([self._path, *words], own, stdin=stdin, environment=os.environ)[0]

    def _problem(self, *words: str, stdin: bytes = b"") -> Finding | None:
        outcome = self._call(_SETUP, *words, stdin=stdin)
        if outcome.trouble is Trouble.NONE:
            return None
        said = outcome.stderr[-300:].decode("utf-8", "replace").strip() or described(outcome, _SETUP)
        return Finding(status=FindingStatus.ERROR, reason=f"{words[0]}: {said}", took_s=outcome.wall_s)

    def _read(self, name: str, path: str, check: RunContainer) -> bytes | None:
        limits = msgspec.structs.replace(_SETUP, output_bytes=check.limits.output_bytes + 64 * 1024)
        outcome = self._call(limits, "cp", f"{name}:{path}", "-")
        if outcome.trouble is not Trouble.NONE:
            return None
        try:
            with tarfile.open(fileobj=io.BytesIO(outcome.stdout)) as archive:
                member = archive.next()
                file = archive.extractfile(member) if member is not None and member.isreg() else None
                return None if file is None else file.read(check.limits.output_bytes)
        except (tarfile.TarError, EOFError):
            return None


def _archive(files: dict[str, bytes]) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        for path, content in files.items():
            member = tarfile.TarInfo(str(PurePosixPath(path).relative_to("/")))
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
    return held.getvalue()


def _finding(outcome: Outcome, check: RunContainer, outputs: dict[str, bytes]) -> Finding:
    killed = KILLED_BY.get(outcome.trouble, "")
    if outcome.trouble is Trouble.SIGNAL and outcome.status == -9:
        killed = "memory"  # SIGKILL: the engine's limit, for nobody else kills it
    return Finding(
        exit_code=outcome.status,
        killed=killed,
        reason=described(outcome, check.limits) if killed else "",
        stdout=outcome.stdout,
        stderr=outcome.stderr,
        is_truncated=outcome.is_cut,
        outputs=outputs,
        took_s=outcome.wall_s,
    )


__all__: Sequence[str] = ("CommandLineEngine", "ContainerEngine", "NoContainers", "find_engine")
