"""Every kind of check is carried out, within its limits, and what went wrong is told as what it is."""

import asyncio
import json

import pytest

from loadwise.runner import compute
from loadwise.runner.carry import Carrier
from loadwise.runner.containers import CommandLineEngine, NoContainers, find_engine
from loadwise.runner.workers import Worker, Workers
from loadwise.verify.check import (
    AskModel,
    AwaitReport,
    CallWebhook,
    Compute,
    Finding,
    FindingStatus,
    Message,
    RunCommand,
    RunContainer,
    RunInSandbox,
    RunSmallPython,
)

_S = FindingStatus


@pytest.fixture(scope="module")
def carrier():
    made = Carrier(hidden=frozenset({"LOADWISE_TEST_KEY"}))
    yield made
    made.close()


def carry(carrier, check):
    return asyncio.run(carrier.carry(check))


@pytest.mark.parametrize(
    "check",
    [
        AwaitReport(),
        AskModel(messages=(Message(role="user", content="?"),)),
        CallWebhook(url="http://127.0.0.1:9/"),
        RunInSandbox(argv=("python3",)),
        RunContainer(image="i", argv=("true",)),
        RunCommand(argv=()),
    ],
)
def test_what_cannot_be_carried_out_here_is_refused(carrier, check, monkeypatch):
    """With a reason; a refusal is not tried again."""
    finding = carry(carrier, check)
    assert finding.status is _S.REFUSED and finding.reason


def test_a_users_command_gets_input_and_environment_but_no_keys(carrier, monkeypatch):
    """No shell; its exit code and its last words."""
    monkeypatch.setenv("LOADWISE_TEST_KEY", "secret")
    monkeypatch.setenv("LOADWISE_TEST_OTHER", "shown")
    finding = carry(carrier, RunCommand(argv=("sh", "-c", "env; cat; exit 3"), stdin=b"the case"))
    assert finding.status is _S.OK and finding.exit_code == 3 and not finding.killed
    assert finding.stdout.endswith(b"the case") and b"shown" in finding.stdout and b"secret" not in finding.stdout


def test_a_users_command_that_hangs_or_is_absent_is_our_trouble(carrier):
    """Time out and error, so that it is tried again and then abstained on."""
    assert carry(carrier, RunCommand(argv=("sleep", "99"), wall_s=0.2)).status is _S.TIMEOUT
    assert carry(carrier, RunCommand(argv=("/no/such",))).status is _S.ERROR
    assert carry(carrier, RunCommand(argv=("yes",), output_bytes=1000)).killed == "output"


@pytest.mark.parametrize(
    ("source", "status", "field", "value"),
    [
        ("1 + 1", _S.OK, "value", 2),
        ("def f(a):\n  return [a, {'b': (1, 2)}]\nf('x')", _S.OK, "value", ["x", {"b": (1, 2)}]),
        ("print('hi')", _S.OK, "stdout", b"hi\n"),
        ("assert 1 == 2", _S.OK, "exit_code", 1),
        ("while True: pass", _S.OK, "killed", "wall"),
        ("'a' * 10**9", _S.OK, "killed", "memory"),
        ("import socket", _S.REFUSED, "value", None),
        ("open('/etc/passwd').read()", _S.REFUSED, "value", None),
        ("yield 1", _S.REFUSED, "value", None),
        ("(", _S.REFUSED, "value", None),
        ("class A: pass\nA()", _S.REFUSED, "value", None),
        ("1 / 0", _S.REFUSED, "value", None),
    ],
)
def test_small_python_has_the_first_word_and_not_the_last(carrier, source, status, field, value):
    """What it does not know, or may not do, is left to the sandbox."""
    pytest.importorskip("pydantic_monty")
    wall_s = 0.5 if value == "wall" else 60.0
    finding = carry(carrier, RunSmallPython(source=source, wall_s=wall_s, memory_bytes=32 << 20))
    assert (finding.status, getattr(finding, field)) == (status, value), finding


def test_small_python_is_refused_once_it_is_closed():
    """No process is started again."""
    made = Carrier()
    made._small_python.close()
    assert made._small_python.run(RunSmallPython(source="1")).status is _S.REFUSED
    made.close()


def odd(**arguments):
    """A computation for the tests, by what it is told to do."""
    import os
    import time

    match arguments["do"]:
        case "echo":
            return arguments["value"]
        case "hang":
            time.sleep(99)
        case "die":
            os._exit(1)
        case "raise":
            raise ValueError("no")
        case "memory":
            return len(bytearray(1 << 34))
        case "print":
            print("between frames")
            return 1
        case "set":
            return {1, 2}
        case "long":
            return "x" * 10_000_000


_PATCHED = """
import sys
sys.path[:0] = {path!r}
from loadwise.verify import computations
from loadwise.runner import compute
import test_carry
computations.COMPUTATIONS = {{"odd": test_carry.odd}}
compute.main()
"""


@pytest.fixture
def workers(monkeypatch):
    """Workers whose only computation is `odd`."""
    import subprocess
    import sys
    from pathlib import Path

    script = _PATCHED.format(path=[str(Path(__file__).parent), str(Path(compute.__file__).parents[2])])
    start = subprocess.Popen

    def popen(argv, **options):
        return start([sys.executable, "-c", script], **options)

    monkeypatch.setattr("loadwise.runner.workers.subprocess.Popen", popen)
    made = Workers()
    yield made
    made.close()


def test_computations_run_elsewhere_and_their_troubles_stay_there(workers):
    """A value, an exception, memory, a death, a hang: each is one finding, and the next call works."""

    def call(do, **more):
        arguments = {"do": do, **more.pop("arguments", {})}
        return workers.run(Compute(function="odd", arguments=arguments, **{"wall_s": 120.0, **more}))

    assert call("echo", arguments={"value": [1, {"a": "\ud800"}]}).value == [1, {"a": "\ud800"}]
    assert call("print").value == 1
    assert call("raise").status is _S.ERROR and "ValueError: no" in call("raise").reason
    assert call("memory", memory_bytes=1 << 30).killed == "memory"
    assert call("die").status is _S.ERROR
    assert call("echo", arguments={"value": 1}).value == 1
    assert call("hang", wall_s=0.2).status is _S.TIMEOUT
    assert call("set").status is _S.ERROR
    assert call("long").status is _S.ERROR
    assert workers.run(Compute(function="absent")).status is _S.REFUSED
    assert workers.run(Compute(function="odd", arguments={"value": {1}})).status is _S.REFUSED


def test_a_worker_is_replaced_after_some_hundred_calls(workers, monkeypatch):
    """What a library leaks stays bounded."""
    monkeypatch.setattr("loadwise.runner.workers.CALLS_PER_WORKER", 2)
    monkeypatch.setattr("loadwise.runner.workers.START_S", 30.0)
    started = []
    init = Worker.__init__
    monkeypatch.setattr(Worker, "__init__", lambda self: (started.append(self), init(self))[1])
    for n in range(5):
        assert workers.run(Compute(function="odd", arguments={"do": "echo", "value": n}, wall_s=120.0)).value == n
    assert len(started) == 3


FAKE_ENGINE = r"""#!/bin/sh
echo "$@" >> {log}
case "$1" in
  create) test "$2" != "" ;;
  cp) if [ "$2" = "-" ]; then cat > {log}.in; else [ -e {log}.out ] && cat {log}.out; fi ;;
  start) echo "3 passed"; exit {status} ;;
  commit) test "$2" != "gone" ;;
  rm|rmi) true ;;
esac
"""


def engine(tmp_path, status=0):
    """A container engine that writes down what it is told."""
    path = tmp_path / "podman"
    path.write_text(FAKE_ENGINE.format(log=tmp_path / "log", status=status))
    path.chmod(0o755)
    return CommandLineEngine(str(path))


def test_container_tests_run_without_network_under_limits_and_are_removed(tmp_path):
    """Against a fake engine: unproven with a real one."""
    import io
    import tarfile

    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        member = tarfile.TarInfo("result.json")
        member.size = 2
        archive.addfile(member, io.BytesIO(b"{}"))
    (tmp_path / "log.out").write_bytes(held.getvalue())
    check = RunContainer(image="img", argv=("pytest",), files={"/t/a.py": b"x"}, outputs=("/out/result.json",))
    finding = engine(tmp_path).run(check)
    assert finding.status is _S.OK and finding.exit_code == 0 and b"3 passed" in finding.stdout
    assert finding.outputs == {"/out/result.json": b"{}"}
    log = (tmp_path / "log").read_text()
    assert "--network=none" in log and "--pids-limit=512" in log and "img pytest" in log
    assert log.splitlines()[-1].startswith("rm --force")
    assert b"t/a.py" in (tmp_path / "log.in").read_bytes()


def test_container_tests_that_fail_are_a_finding_and_an_engine_that_fails_is_an_error(tmp_path):
    """The exit code is the tests'; a container that cannot be had is ours; a stopped one is committed first."""
    assert engine(tmp_path, status=1).run(RunContainer(image="img", argv=("t",))).exit_code == 1
    assert engine(tmp_path, status=137).run(RunContainer(image="img", argv=("t",))).killed == "memory"
    finding = engine(tmp_path).run(RunContainer(image="container:gone", argv=("t",)))
    assert finding.status is _S.ERROR and "commit" in finding.reason
    assert engine(tmp_path).run(RunContainer(image="container:agent-7", argv=("t",))).status is _S.OK
    assert "rmi --force" in (tmp_path / "log").read_text()
    assert isinstance(find_engine("/no/such/engine"), NoContainers)


def test_frames_hold_any_text():
    """Half a surrogate pair crosses as an escape."""
    sent = compute.frame({"a": "\ud800x"})
    assert json.loads(sent[compute.LENGTH.size :]) == {"a": "\ud800x"}
    assert isinstance(Finding(value=1), Finding)
