"""The bubblewrap sandbox against code that means harm: each kind is contained, and reported as what it is."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadwise.kernel.errors import ConfigError
from loadwise.runner.bounded import look_at_tree, run_bounded
from loadwise.runner.containment import MIB, Outcome, Trouble, described
from loadwise.runner.sandbox import Bubblewrap
from loadwise.verify.check import Limits, RunInSandbox

pytestmark = pytest.mark.real

LIMITS = Limits(
    wall_s=300.0, cpu_s=60.0, memory_bytes=256 * MIB, processes=16, file_bytes=2 * MIB, output_bytes=100_000
)
LOOPING = msgspec.structs.replace(LIMITS, cpu_s=1.0)
"""For what is to pass the bound of CPU time: on a slow machine everything else may take long."""


@pytest.fixture(scope="module")
def sandbox(can_sandbox: None) -> Bubblewrap:
    made = Bubblewrap(disk_bytes=8 * MIB)
    assert made.trial() is None
    return made


def run(sandbox: Bubblewrap, script: str, **more: object) -> Outcome:
    """One script, and what came of it."""
    given = {"argv": ("python3", "-I", "main.py"), "files": {"main.py": script.encode()}, "limits": LIMITS, **more}
    return sandbox.run(RunInSandbox(**given))  # type: ignore[arg-type]


CONTAINED = {
    "fork bomb": ("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", Trouble.PROCESSES),
    "forks that wait": (
        "import os, time\nfor _ in range(100):\n  if os.fork() == 0: time.sleep(999); os._exit(0)",
        Trouble.PROCESSES,
    ),
    "ten gigabytes": ("x = bytearray(10 * 1024**3)", Trouble.MEMORY),
    "memory of children": (
        "import os, time\nfor _ in range(8):\n  if os.fork() == 0: x = bytearray(100 * 1024**2); time.sleep(999)\n"
        "time.sleep(999)",
        Trouble.MEMORY,
    ),
    "endless loop": ("while True: pass", Trouble.CPU),
    "endless loops of children": (
        "import os\nfor _ in range(6): os.fork()\nwhile True: pass",
        Trouble.CPU,
    ),
    "network": ("import socket\nsocket.create_connection(('192.0.2.1', 80), 2)", Trouble.NETWORK),
    "name service": ("import socket\nsocket.getaddrinfo('example.org', 80)", Trouble.NETWORK),
    "password file": ("print(open('/etc/shadow').read())", Trouble.DENIED),
    "writing to the system": ("open('/usr/lib/python3/x', 'w')", Trouble.DENIED),
    "writing to the root": ("open('/x', 'w')", Trouble.DENIED),
    "writing to devices": ("open('/dev/x', 'w')", Trouble.DENIED),
    "flood": ("while True: print('x' * 1000)", Trouble.OUTPUT),
    "flood of errors": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", Trouble.OUTPUT),
    "a large file": ("f = open('a', 'wb')\nwhile True: f.write(b'x' * 100_000)", Trouble.FILE_SIZE),
    "many files": ("for i in range(99): open(f'{i}', 'wb').write(b'x' * 1_000_000)", Trouble.FILE_SIZE),
    "shared memory": ("open('/dev/shm/x', 'wb').write(b'x' * 3_000_000)", Trouble.FILE_SIZE),
    "files without end": ("i = 0\nwhile True:\n  i += 1\n  open(f'{i}', 'w').close()", Trouble.FILE_SIZE),
    "memory of no process": ("import os\nos.write(os.memfd_create('x'), b'x')", Trouble.EXIT),
    "segments of memory": (
        "import ctypes\nc = ctypes.CDLL(None)\nprint(c.shmget(0, 1 << 20, 0o1600))\nraise SystemExit(1)",
        Trouble.EXIT,
    ),
    "a crash": ("import ctypes\nctypes.string_at(0)", Trouble.SIGNAL),
    "a bad end": ("raise SystemExit(3)", Trouble.EXIT),
}


@pytest.mark.parametrize("name", CONTAINED)
def test_harm_is_contained_and_reported_as_what_it_is(sandbox: Bubblewrap, name: str) -> None:
    """Named trouble, words for it, output within its bound; and the machine goes on."""
    script, wanted = CONTAINED[name]
    outcome = run(sandbox, script, limits=LOOPING if name.startswith("endless loop") else LIMITS)
    if name == "segments of memory":
        assert outcome.stdout == b"-1\n"
    if name == "endless loops of children":  # so many loops may also be too many processes
        assert outcome.trouble in (Trouble.CPU, Trouble.PROCESSES)
    else:
        assert outcome.trouble is wanted, outcome
    assert described(outcome, LIMITS) and outcome.wall_s < LIMITS.wall_s
    assert max(len(outcome.stdout), len(outcome.stderr)) <= LIMITS.output_bytes


def test_waiting_ends_at_the_wall_time(sandbox: Bubblewrap) -> None:
    """A run that uses nothing but time."""
    limits = Limits(wall_s=0.5, cpu_s=2.0)
    assert run(sandbox, "import time\ntime.sleep(999)", limits=limits).trouble is Trouble.WALL


def test_nothing_of_this_machine_is_seen(sandbox: Bubblewrap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No environment, no files beside the system's, no other processes, no rights, no way to more."""
    secret = tmp_path / "secret"
    secret.write_text("do not read")
    monkeypatch.setenv("LOADWISE_SECRET", "do not read")
    script = f"""
import ctypes, os
assert "LOADWISE_SECRET" not in os.environ
for pid in (p for p in os.listdir("/proc") if p.isdigit()):
    try:
        assert b"LOADWISE_SECRET" not in open(f"/proc/{{pid}}/environ", "rb").read()
    except PermissionError:
        pass
assert len([p for p in os.listdir("/proc") if p.isdigit()]) <= 5
for path in ({str(secret)!r}, "/root", "/home", "/etc/passwd", "/var", "/sys"):
    assert not os.path.exists(path), path
assert os.getuid() != 0
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x10000000) == -1  # no user namespace of its own
assert libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == -1
assert sorted(os.listdir("/work")) == ["main.py"]
print("nothing")
"""
    outcome = run(sandbox, script)
    assert outcome.trouble is Trouble.NONE and outcome.stdout == b"nothing\n", outcome


def test_a_service_of_this_machine_is_not_reached(sandbox: Bubblewrap) -> None:
    """Not even on loopback: the sandbox has an own one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        outcome = run(sandbox, f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)")
        assert outcome.trouble is not Trouble.NONE and outcome.status != 0


def test_what_is_left_running_dies_with_the_run(sandbox: Bubblewrap) -> None:
    """Also where it has made a session of its own and holds the pipes."""
    before = set(look_at_tree(os.getpid()).pids)
    script = "import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(999)\nprint('done')"
    outcome = run(sandbox, script)
    assert outcome.trouble is Trouble.NONE and outcome.stdout == b"done\n"
    assert set(look_at_tree(os.getpid()).pids) <= before


def test_input_outputs_and_copies(sandbox: Bubblewrap, tmp_path: Path) -> None:
    """A tree is copied, files are laid over it, input comes by a pipe, and what was asked for comes back."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("original")
    (tmp_path / "b.txt").write_text("hidden")
    (tmp_path / "out").symlink_to("/etc")
    script = """
import os, sys
open("sub/a.txt", "a").write(" and more")
open("result", "wb").write(sys.stdin.buffer.read() + open("b.txt", "rb").read())
os.symlink("/proc/self/status", "link")
os.mkfifo("pipe")
open("long", "wb").write(b"x" * 200_000)
assert not os.path.exists("out/passwd")
"""
    outcome = run(
        sandbox,
        script,
        copy_in=str(tmp_path),
        files={"main.py": script.encode(), "b.txt": b"shown"},
        stdin=b"in ",
        outputs=("sub/a.txt", "result", "link", "pipe", "absent", "long"),
    )
    assert outcome.trouble is Trouble.NONE, outcome
    assert outcome.outputs["sub/a.txt"] == b"original and more" and outcome.outputs["result"] == b"in shown"
    assert set(outcome.outputs) == {"sub/a.txt", "result", "long"}
    assert outcome.is_cut and len(outcome.outputs["long"]) == LIMITS.output_bytes
    assert (tmp_path / "sub" / "a.txt").read_text() == "original" and (tmp_path / "b.txt").read_text() == "hidden"


def test_sandboxes_run_beside_each_other(sandbox: Bubblewrap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a user of its own, so that one's processes do not use up another's limit."""
    all_are_here = threading.Barrier(3)

    def bounded(*args: Any, **options: Any) -> tuple[Outcome, bytes]:
        all_are_here.wait(LIMITS.wall_s)
        return run_bounded(*args, **options)

    monkeypatch.setattr("loadwise.runner.sandbox.run_bounded", bounded)
    forks = "import os, time\nfor _ in range(8):\n  if os.fork() == 0: time.sleep(0.3); os._exit(0)\n"
    script = forks + "print(os.getuid())\nfor _ in range(8): os.wait()"
    outcomes: list[Outcome] = []
    threads = [threading.Thread(target=lambda: outcomes.append(run(sandbox, script))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [outcome.trouble for outcome in outcomes] == [Trouble.NONE] * 3, outcomes
    if os.geteuid() == 0:
        assert len({outcome.stdout for outcome in outcomes}) == 3


@pytest.mark.usefixtures("can_sandbox")
def test_a_shown_tree_is_there_and_cannot_be_changed() -> None:
    """An environment that tests need; only what the operator names."""
    tree = Path("/opt") if Path("/opt").is_dir() else Path("/srv")
    made = Bubblewrap(shows=[str(tree)])
    outcome = run(made, f"import os\nprint(os.path.isdir({str(tree)!r}))\nopen({str(tree / 'x')!r}, 'w')")
    assert outcome.stdout == b"True\n" and outcome.trouble is Trouble.DENIED


def test_a_command_that_is_not_there_is_a_bad_end_not_a_pass(sandbox: Bubblewrap) -> None:
    """prlimit says so; it never looks like success."""
    outcome = sandbox.run(RunInSandbox(argv=("no-such-program",), limits=LIMITS))
    assert outcome.trouble not in (Trouble.NONE,) and outcome.status != 0


@pytest.mark.parametrize(
    "check",
    [
        RunInSandbox(argv=()),
        RunInSandbox(argv=("python3",), files={"../x": b""}),
        RunInSandbox(argv=("python3",), files={"/etc/x": b""}),
        RunInSandbox(argv=("python3",), outputs=("../../etc/passwd",)),
        RunInSandbox(argv=("python3",), script="no_such"),
        RunInSandbox(argv=("python3",), script="../bounded"),
        RunInSandbox(argv=("python3", "a\0b")),
        RunInSandbox(argv=("python3",), environment={"A=B": "c"}),
        RunInSandbox(argv=("python3",), copy_in="/no/such/place"),
    ],
)
def test_what_cannot_be_run_is_refused(sandbox: Bubblewrap, check: RunInSandbox) -> None:
    """Before anything is started."""
    outcome = sandbox.run(check)
    assert outcome.trouble is Trouble.REFUSED and outcome.detail


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the Debian package that has them."""
    monkeypatch.setattr("loadwise.runner.sandbox.shutil.which", lambda name, path=None: None)
    with pytest.raises(ConfigError, match="bubblewrap"):
        Bubblewrap()
