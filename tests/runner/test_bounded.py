"""A command under bounds: what passes one is killed as a whole, and its end has a name."""

import os
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadwise.runner.bounded import STOP, look_at_tree, run_bounded
from loadwise.runner.containment import MIB, Outcome, Trouble, described, hinted_trouble
from loadwise.runner.sandbox import LimitsOnly, NoSandbox, is_inside, open_sandbox, packed, script_source
from loadwise.verify.check import Limits, RunInSandbox

LIMITS = Limits(wall_s=120.0, cpu_s=30.0, memory_bytes=512 * MIB, output_bytes=10_000)
"""None of them is reached by what a test does not mean to bound, on however slow a machine."""
LONG_S = 3600
"""Sleeps that something ends."""


def run(script: str, **more: object) -> Outcome:
    """A Python script."""
    limits = more.pop("limits", LIMITS)
    return run_bounded([sys.executable, "-I", "-c", script], limits, **more)[0]  # type: ignore[arg-type]


def test_an_ordinary_end_is_no_trouble():
    """Its output, its status, an empty environment."""
    outcome = run("import os, sys; print(dict(os.environ).keys() - {'LC_CTYPE'}, sys.stdin.read())", stdin=b"in")
    assert (outcome.trouble, outcome.status, outcome.stdout) == (Trouble.NONE, 0, b"set() in\n")


@pytest.mark.parametrize(
    ("script", "wanted"),
    [
        ("raise SystemExit(3)", Trouble.EXIT),
        ("import os; os.kill(os.getpid(), 9)", Trouble.SIGNAL),
        ("print('x' * 20_000)", Trouble.OUTPUT),
        ("raise MemoryError", Trouble.MEMORY),
    ],
)
def test_a_bad_end_has_a_name(script, wanted):
    """Each with words for a human."""
    outcome = run(script)
    assert outcome.trouble is wanted and described(outcome, LIMITS)
    assert len(outcome.stdout) <= LIMITS.output_bytes


def test_time_that_passes_without_work_is_wall_time():
    """Children are killed with it."""
    before = set(look_at_tree(os.getpid()).pids)
    child = f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep({LONG_S})'])"
    outcome = run(f"import subprocess, sys, time; {child}; time.sleep({LONG_S})", limits=Limits(wall_s=0.3))
    assert outcome.trouble is Trouble.WALL and outcome.status is None
    assert set(look_at_tree(os.getpid()).pids) <= before


def test_memory_of_a_tree_counts_together():
    """No process alone passes the bound."""
    script = (
        "import os, time\nfor _ in range(4):\n  if os.fork() == 0:\n    x = bytearray(40 << 20)\n    break\n"
        f"time.sleep({LONG_S})"
    )
    assert run(script, limits=Limits(wall_s=LIMITS.wall_s, memory_bytes=100 * MIB)).trouble is Trouble.MEMORY


def test_input_that_nobody_reads_blocks_nobody():
    """More than a pipe holds, to a command that ends at once."""
    assert run("pass", stdin=b"x" * 1_000_000).trouble is Trouble.NONE


def test_pipes_held_open_by_an_orphan_do_not_hold_us():
    """The command has ended; what it left behind is killed with its session."""
    script = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep({LONG_S})'])"
    assert run(script).trouble is Trouble.NONE


def test_a_command_that_is_not_there_is_our_trouble():
    """Never the program's fault."""
    outcome, _ = run_bounded(["/no/such/program"], LIMITS)
    assert outcome.trouble is Trouble.SANDBOX and "/no/such/program" in outcome.detail


def test_stopping_kills_what_runs():
    """However much of its time is left."""
    stop = threading.Event()
    stop.set()
    token = STOP.set(stop)
    try:
        assert run(f"import time; time.sleep({LONG_S})").trouble is Trouble.STOPPED
    finally:
        STOP.reset(token)


@given(st.binary(max_size=200))
def test_what_a_run_says_of_itself_never_makes_it_good(text):
    """The hint chooses among names of failures."""
    assert hinted_trouble(text) not in (Trouble.NONE, Trouble.SANDBOX, Trouble.REFUSED)


@given(st.lists(st.sampled_from(["a", "..", ".", "", "b.py", "\0"]), max_size=5).map("/".join))
def test_paths_of_files_stay_inside(path):
    """As a path resolves, so the test says."""
    if is_inside(path):
        inside = os.path.normpath(os.path.join("/anywhere", path))
        assert inside.startswith("/anywhere/") and "\0" not in path


def test_without_a_sandbox_everything_is_refused():
    """And the reason is told."""
    outcome = open_sandbox("none").run(RunInSandbox(argv=("python3",)))
    assert outcome.trouble is Trouble.REFUSED and "verification.sandbox is none" in outcome.detail
    assert NoSandbox("why").run(RunInSandbox(argv=("python3",))).detail == "why"


def test_plain_limits_run_in_a_directory_of_their_own(tmp_path):
    """By explicit word: files, copies, outputs, script; no link leads out of the directory, in or back."""
    (tmp_path / "a.txt").write_text("copied")
    (tmp_path / "out").symlink_to("/etc")
    code = (
        b"import os, sys\nopen('back', 'w').write(open('a.txt').read() + sys.argv[1])\nos.symlink('/etc/passwd', 'p')"
    )
    check = RunInSandbox(
        argv=("python3", "main.py", "{directory}"),
        files={"main.py": code, "out/x": b"never written"},
        copy_in=str(tmp_path),
        outputs=("back", "p", "out/passwd", "absent"),
        limits=LIMITS,
    )
    outcome = LimitsOnly().run(check)
    assert outcome.trouble is Trouble.NONE, outcome
    assert set(outcome.outputs) == {"back"} and outcome.outputs["back"].startswith(b"copied/")
    assert not os.path.exists("/etc/x") and "ONLY" in LimitsOnly.WARNING
    assert not os.path.exists(outcome.outputs["back"].removeprefix(b"copied").decode())


def test_plain_limits_bound_a_process_too():
    """Memory and file size, by the kernel."""
    limits = Limits(wall_s=LIMITS.wall_s, memory_bytes=200 * MIB, file_bytes=1000)
    for code, wanted in (
        ("x = bytearray(10 << 30)", Trouble.MEMORY),
        ("open('f', 'w').write('x' * 9999)", Trouble.FILE_SIZE),
    ):
        check = RunInSandbox(argv=("python3", "m.py"), files={"m.py": code.encode()}, limits=limits)
        assert LimitsOnly().run(check).trouble is wanted


def test_our_scripts_are_found_by_name_only():
    """No path leads out of their folder."""
    assert script_source("steward") and script_source("../bounded") is None and script_source("absent") is None


def test_a_tree_that_is_too_large_is_not_packed(tmp_path, monkeypatch):
    """Before it fills memory."""
    monkeypatch.setattr("loadwise.runner.sandbox.INPUT_MAX_BYTES", 1000)
    (tmp_path / "big").write_bytes(b"x" * 2000)
    with pytest.raises(ValueError, match="more than"):
        packed(RunInSandbox(argv=("a",), copy_in=str(tmp_path)))
