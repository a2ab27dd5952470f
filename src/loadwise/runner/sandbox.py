"""Where untrusted code runs: a bubblewrap sandbox, or by explicit word of the operator plain resource limits.

Theory of operation. `setpriv` drops to a user that owns nothing (root would be exempt from the limit on processes;
each running sandbox has a user of its own, since that limit is counted per user). `bwrap` gives the command its own
namespaces (no network, own processes, own users) and a root file system of its own, of which only the system's
programs and libraries are shown, read-only; `/work` and `/tmp` are writable, in memory and bounded. A filter of system
calls keeps it from memory that no limit counts (`system_calls`). Inside, a steward
unpacks the files, has `prlimit` bound each process, and hands back the files that were asked for.
`bounded.run_bounded` watches all processes together from outside and kills them as a whole. The environment is empty,
input comes by a pipe.

What this does not do: it shares the kernel. Code that breaks the kernel breaks out; who must run such code puts
Loadwise on a machine of its own, or verifies by `command` or `webhook` somewhere else.
"""

import contextlib
import io
import json
import os
import shutil
import stat
import struct
import sys
import tarfile
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol

import msgspec

from loadwise.kernel.errors import ConfigError
from loadwise.verify.check import DIRECTORY, SCRIPT, Limits, RunInSandbox

from .bounded import run_bounded
from .containment import MIB, Outcome, Trouble
from .system_calls import call_filter

Mode = Literal["bubblewrap", "limits", "none"]
MODES: tuple[Mode, ...] = ("bubblewrap", "limits", "none")

WORK = "/work"
"""Where a run's files lie, and where it starts."""
SCRIPTS = "/loadwise"
SLOTS = 256
"""Sandboxes at once."""
FIRST_UID = 61184
"""Of the users that belong to nobody; slot n runs as this one plus n."""
INPUT_MAX_BYTES = 512 * MIB
FILES_MAX = 100_000
DISK_BYTES = 512 * MIB
"""The private file system; it lives in memory."""
_OWN_PROCESSES = 3
"""bwrap, its reaper inside, the steward."""
_FRAME = struct.Struct(">IQ?")
_TRIAL_LIMITS = Limits(wall_s=10.0, cpu_s=5.0, memory_bytes=256 * MIB)
_TRIAL = (
    "import os, socket\n"
    "assert not os.path.exists('/etc/passwd')\n"
    "try:\n    socket.create_connection(('192.0.2.1', 9), 0.2)\nexcept OSError as error:\n    print(error.errno)\n"
)


class Sandbox(Protocol):
    """Runs one job to its end; blocks its thread, never longer than the job's wall time and a few seconds."""

    @property
    def name(self) -> str:
        """How it contains what it runs."""
        ...

    def run(self, check: RunInSandbox) -> Outcome:
        """Run a program that nobody trusts."""
        ...


class NoSandbox:
    """Refuses everything."""

    name = "none"

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def run(self, check: RunInSandbox) -> Outcome:
        """Nothing runs; says why."""
        return Outcome(trouble=Trouble.REFUSED, detail=self.reason)


def open_sandbox(mode: Mode, shows: Sequence[str] = ()) -> Sandbox:
    """The sandbox of a configuration; where there is none for it, one that refuses and says why.

    Args:
        shows: directories of this machine to show inside, read-only, at their own places.

    `limits` is the operator's explicit word: the caller warns, loudly (`LimitsOnly.WARNING`).

    Raises:
        ConfigError: no such mode.
    """
    if mode not in MODES:
        raise ConfigError(f"sandbox is {mode!r}; it must be one of {', '.join(MODES)}")
    if mode == "none":
        return NoSandbox("untrusted code is not run here (verification.sandbox is none)")
    if mode == "limits":
        return LimitsOnly()
    problem = missing_for_bubblewrap()
    if problem is not None:
        return NoSandbox(problem)
    sandbox = Bubblewrap(shows=shows)
    problem = sandbox.trial()
    return sandbox if problem is None else NoSandbox(problem)


def missing_for_bubblewrap() -> str | None:
    """What the machine lacks, in words; None where all is there."""
    if sys.platform != "linux":
        return f"bubblewrap sandboxes need Linux, not {sys.platform}"
    needed = {"bwrap": "bubblewrap", "prlimit": "util-linux"}
    if os.geteuid() == 0:
        needed["setpriv"] = "util-linux"
    for tool, package in needed.items():
        if _tool(tool) is None:
            return f"{tool} is missing (Debian package {package})"
    if _python() is None:
        return "there is no python3 below /usr that a sandbox could show (Debian package python3)"
    return None


def _tool(name: str) -> str | None:
    return shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")


def _python() -> str | None:
    return next((path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if os.access(path, os.X_OK)), None)


def _argv(check: RunInSandbox, python: str, script: str, directory: str) -> list[str]:
    argv = [word.replace(SCRIPT, script).replace(DIRECTORY, directory) for word in check.argv]
    return [python, *argv[1:]] if argv[0] == "python3" else argv


def script_source(name: str) -> bytes | None:
    """One of our own scripts for inside, as Python runs it; None where there is none of that name.

    A script of several modules is a directory, and is packed as one archive: any Python runs such a file too.
    """
    if not name.isidentifier():
        return None
    scripts = resources.files("loadwise.runner").joinpath("sandboxed")
    package = scripts.joinpath(name)
    try:
        return _archived(name, package) if package.is_dir() else scripts.joinpath(f"{name}.py").read_bytes()
    except OSError:
        return None


def _archived(name: str, package: Traversable) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr("__main__.py", f"import {name}.__main__\n")
        for module in package.iterdir():
            if module.name.endswith(".py"):
                archive.writestr(f"{name}/{module.name}", module.read_bytes())
    return held.getvalue()


def refusal(check: RunInSandbox) -> str | None:
    """Why something cannot be run at all; None where it can."""
    if not check.argv:
        return "there is no command"
    if check.script and script_source(check.script) is None:
        return f"there is no script {check.script!r}"
    n_bytes = len(check.stdin) + sum(map(len, check.files.values()))
    if n_bytes > INPUT_MAX_BYTES or len(check.files) > FILES_MAX:
        return f"{len(check.files)} files of {n_bytes} bytes; {FILES_MAX} of {INPUT_MAX_BYTES} is the limit"
    for name in (*check.files, *check.outputs):
        if not is_inside(name):
            return f"the file {name[:100]!r} is not a relative path without '..'"
    words = [*check.argv, *check.environment, *check.environment.values()]
    if any("\0" in word for word in words) or any("=" in name or not name for name in check.environment):
        return "command or environment holds what no command line can"
    if check.copy_in is not None and not os.path.isdir(check.copy_in):
        return f"copy_in is {check.copy_in!r}, which is no directory here"
    return None


def is_inside(name: str) -> bool:
    """Whether a path, read as text, stays in the directory that it is relative to.

    >>> is_inside("a/b.py"), is_inside("../a"), is_inside("/etc/passwd"), is_inside(".")
    (True, False, False, False)
    """
    path = PurePosixPath(name)
    is_plain = 0 < len(name) <= 1024 and "\0" not in name and bool(path.parts)
    return is_plain and not path.is_absolute() and ".." not in path.parts


class Bubblewrap:
    """The real one.

    Raises:
        ConfigError: something that it needs is missing.
    """

    name = "bubblewrap"

    def __init__(self, *, disk_bytes: int = DISK_BYTES, shows: Sequence[str] = ()) -> None:
        problem = missing_for_bubblewrap()
        if problem is not None:
            raise ConfigError(problem)
        self._lock = threading.Lock()
        self._free = list(range(SLOTS))
        self._disk_bytes = disk_bytes
        self._shows = tuple(shows)
        python = _python()
        assert python is not None
        self._python = python

    def trial(self) -> str | None:
        """Run something harmless; says what is wrong where that does not go well (user namespaces may be off)."""
        outcome = self.run(RunInSandbox(argv=("python3", "-I", "-S", "-c", _TRIAL), limits=_TRIAL_LIMITS))
        if outcome.trouble is Trouble.NONE and outcome.stdout:
            return None
        said = outcome.stderr[-300:].decode("utf-8", "replace").strip() or outcome.detail or outcome.trouble.value
        return f"bubblewrap does not work on this machine (are user namespaces allowed?): {said}"

    def run(self, check: RunInSandbox) -> Outcome:
        """Run a program in a sandbox of its own."""
        problem = refusal(check)
        if problem is not None:
            return Outcome(trouble=Trouble.REFUSED, detail=problem)
        try:
            archive = packed(check)
        except (OSError, ValueError) as error:
            return Outcome(trouble=Trouble.REFUSED, detail=f"copy_in cannot be copied: {error}")
        with self._slot() as slot:
            return self._run(check, slot, archive)

    def _run(self, check: RunInSandbox, slot: int, archive: bytes | None) -> Outcome:
        inherited: list[int] = []
        texts = {"steward": script_source("steward") or b""}
        if check.script:
            texts[check.script] = script_source(check.script) or b""
        shown: list[str] = []
        for name, source in texts.items():
            fd = _memory_file(source)
            inherited.append(fd)
            shown += ["--ro-bind-data", str(fd), f"{SCRIPTS}/{name}.py"]
        calls = call_filter()
        if calls is not None:
            inherited.append(_memory_file(calls))
            shown += ["--seccomp", str(inherited[-1])]
        tar_fd = None if archive is None else _memory_file(archive)
        read_fd, write_fd = os.pipe() if check.outputs else (None, None)
        inherited += [fd for fd in (tar_fd, write_fd) if fd is not None]
        try:
            outcome, frames = run_bounded(
                [*self._command(check, slot, shown), self._steward(check, tar_fd, write_fd)],
                check.limits,
                stdin=check.stdin,
                pass_fds=inherited,
                extra_fd=read_fd,
                extra_bytes=len(check.outputs) * (check.limits.output_bytes + _FRAME.size),
                n_own=_OWN_PROCESSES,
                places=(WORK, "/tmp"),
            )
        finally:
            if read_fd is not None:
                os.close(read_fd)
        outputs, is_cut = _unframed(frames, check.outputs)
        return msgspec.structs.replace(_own_failure(outcome), outputs=outputs, is_cut=outcome.is_cut or is_cut)

    @contextlib.contextmanager
    def _slot(self) -> Iterator[int]:
        with self._lock:
            if not self._free:
                raise RuntimeError(f"more than {SLOTS} sandboxes at once")
            slot = self._free.pop()
        try:
            yield slot
        finally:
            with self._lock:
                self._free.append(slot)

    def _command(self, check: RunInSandbox, slot: int, shown: list[str]) -> list[str]:
        command: list[str] = []
        if os.geteuid() == 0:
            uid = FIRST_UID + slot
            command += [str(_tool("setpriv")), f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
            command += ["--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]
        command += [str(_tool("bwrap")), "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
        command += ["--unshare-user", "--disable-userns", "--cap-drop", "ALL", "--hostname", "sandbox"]
        command += _system(self._python)
        for tree in self._shows:
            command += ["--ro-bind", tree, tree]
        command += ["--proc", "/proc", "--dev", "/dev", *shown]
        for place in (WORK, "/tmp"):
            command += ["--size", str(self._disk_bytes), "--tmpfs", place]
        command += ["--size", str(MIB), "--tmpfs", "/dev/shm"]
        # Last, for all that is mounted above must still be made in it.
        command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK]
        own = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": WORK, "LANG": "C.UTF-8"}
        for name, value in {**own, **check.environment}.items():
            command += ["--setenv", name, value]
        return [*command, "--", self._python, "-I", "-S", f"{SCRIPTS}/steward.py"]

    def _steward(self, check: RunInSandbox, tar_fd: int | None, out_fd: int | None) -> str:
        argv = _argv(check, self._python, f"{SCRIPTS}/{check.script}.py", WORK)
        said = {
            "tar": tar_fd,
            "out": out_fd,
            "outputs": check.outputs,
            "output_bytes": check.limits.output_bytes,
            "command": [*_prlimit(check.limits), *argv],
        }
        return json.dumps(said)


def _system(python: str) -> list[str]:
    """Programs and libraries, and nothing else of this machine."""
    trees = ["/usr/bin", "/usr/lib", "/usr/lib64", "/usr/lib32", "/usr/libexec", "/usr/share/git-core"]
    trees += ["/etc/alternatives"]
    if python.startswith("/usr/local"):
        trees += ["/usr/local/bin", "/usr/local/lib"]
    shown: list[str] = []
    for tree in trees:
        shown += ["--ro-bind-try", tree, tree]
    for link in ("bin", "lib", "lib64"):
        shown += ["--symlink", f"usr/{link}", f"/{link}"]
    return shown


def _prlimit(limits: Limits) -> list[str]:
    cpu_s = max(1, int(limits.cpu_s + 0.999))
    return [
        str(_tool("prlimit")),
        f"--cpu={cpu_s}:{cpu_s + 1}",
        f"--as={limits.memory_bytes}",
        f"--fsize={limits.file_bytes}",
        f"--nproc={limits.processes + _OWN_PROCESSES}",
        "--nofile=256",
        "--core=0",
        "--memlock=65536",
        "--",
    ]


def packed(check: RunInSandbox) -> bytes | None:
    """The files of a run as a tar archive: `copy_in` first, `files` over it; None where there are none.

    Links are packed as links, so what they lead to is looked for inside; devices and pipes are left out.

    Raises:
        ValueError: it is more than a run may be given.
    """
    if not check.files and check.copy_in is None:
        return None
    held = io.BytesIO()
    n_files = 0

    def own(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        nonlocal n_files
        n_files += 1
        if held.tell() + member.size > INPUT_MAX_BYTES or n_files > FILES_MAX:
            raise ValueError(f"it holds more than {FILES_MAX} files or {INPUT_MAX_BYTES} bytes")
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            return None
        member.mode = (member.mode & 0o777) | (stat.S_IRWXU if member.isdir() else stat.S_IRUSR | stat.S_IWUSR)
        return member

    with tarfile.open(fileobj=held, mode="w", format=tarfile.GNU_FORMAT) as archive:
        if check.copy_in is not None:
            archive.add(check.copy_in, arcname=".", filter=own)
        for name, content in check.files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
    return held.getvalue()


def _memory_file(content: bytes) -> int:
    """The content as an open descriptor: no copy on disk, none for others to read."""
    fd = os.memfd_create("loadwise")
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _unframed(frames: bytes, names: tuple[str, ...]) -> tuple[dict[str, bytes], bool]:
    """The files that the steward has handed back, and whether one was cut; what makes no sense ends the reading."""
    outputs: dict[str, bytes] = {}
    at, is_cut = 0, False
    while at + _FRAME.size <= len(frames):
        number, n_bytes, cut = _FRAME.unpack_from(frames, at)
        at += _FRAME.size
        if number >= len(names) or at + n_bytes > len(frames):
            break
        outputs[names[number]] = frames[at : at + n_bytes]
        at += n_bytes
        is_cut = is_cut or cut
    return outputs, is_cut


_OWN_TOOLS = (b"bwrap: ", b"setpriv: ", b"prlimit: ")


def _own_failure(outcome: Outcome) -> Outcome:
    """Tell a sandbox that did not start from a command that exited badly.

    The tools' own complaints come before anything the command could print: they are all that there is then.
    """
    if outcome.trouble in (Trouble.NONE, Trouble.WALL) or outcome.stdout:
        return outcome
    if outcome.stderr.count(b"\n") <= 2 and outcome.stderr.startswith(_OWN_TOOLS):
        detail = outcome.stderr.partition(b"\n")[0][:300].decode("utf-8", "replace")
        return Outcome(trouble=Trouble.SANDBOX, detail=detail, wall_s=outcome.wall_s)
    return outcome


class LimitsOnly:
    """Resource limits and nothing else: the code sees this machine's files and network. Only on explicit word."""

    name = "limits"
    WARNING = (
        "verification.sandbox is limits: code that models wrote runs here under resource limits ONLY; "
        "it can read this user's files and use the network"
    )

    def run(self, check: RunInSandbox) -> Outcome:
        """Run a program in a directory of its own, under limits."""
        problem = refusal(check)
        if problem is None and _tool("prlimit") is None:
            problem = "prlimit is missing (Debian package util-linux)"
        if problem is not None:
            return Outcome(trouble=Trouble.REFUSED, detail=problem)
        with (
            tempfile.TemporaryDirectory(prefix="loadwise-", ignore_cleanup_errors=True) as directory,
            tempfile.TemporaryDirectory(prefix="loadwise-", ignore_cleanup_errors=True) as aside,
        ):
            script = Path(aside, f"{check.script}.py")
            if check.script:
                script.write_bytes(script_source(check.script) or b"")
            _lay_out(check, Path(directory))
            argv = [*_prlimit(check.limits), *_argv(check, _python() or sys.executable, str(script), directory)]
            argv = [word for word in argv if not word.startswith("--nproc=")]  # would count all of this user's
            own = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": directory, "LANG": "C.UTF-8"}
            environment = {**own, **check.environment}
            outcome, _ = run_bounded(
                argv, check.limits, stdin=check.stdin, environment=environment, directory=directory
            )
            outputs, is_cut = _left(Path(directory), check)
            return msgspec.structs.replace(outcome, outputs=outputs, is_cut=outcome.is_cut or is_cut)


def _lay_out(check: RunInSandbox, directory: Path) -> None:
    if check.copy_in is not None:
        shutil.copytree(check.copy_in, directory, symlinks=True, dirs_exist_ok=True)
    for name, content in check.files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.parent.resolve().is_relative_to(directory.resolve()):
            continue  # a link of copy_in leads out
        path.unlink(missing_ok=True)
        path.write_bytes(content)


def _left(directory: Path, check: RunInSandbox) -> tuple[dict[str, bytes], bool]:
    """Files to read back; none through a link that leads elsewhere."""
    outputs: dict[str, bytes] = {}
    is_cut = False
    for name in check.outputs:
        path = directory / name
        try:
            if not path.resolve().is_relative_to(directory.resolve()):
                continue
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (OSError, RuntimeError):
            continue
        with os.fdopen(fd, "rb") as file:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                content = file.read(check.limits.output_bytes + 1)
                is_cut = is_cut or len(content) > check.limits.output_bytes
                outputs[name] = content[: check.limits.output_bytes]
    return outputs, is_cut
