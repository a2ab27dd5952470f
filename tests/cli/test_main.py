"""The command line: quick to load, one line for every expected failure, results and talk apart."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from cli_runs import refused, run

import loadwise
from loadwise.cli.main import SUMMARY_BY_COMMAND, main
from loadwise.kernel.errors import JournalError


@pytest.mark.parametrize("argv", [["--help"], *([name, "--help"] for name in SUMMARY_BY_COMMAND)])
def test_help_of_everything(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Every command explains itself on stdout."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 0
    assert "usage: loadwise" in capsys.readouterr().out


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is hidden."""
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    for name, summary in SUMMARY_BY_COMMAND.items():
        assert f"  {name} " in out
        assert summary in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The package's version on stdout."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"loadwise {loadwise.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "which command? demo, serve"),
        (["srve"], "'srve' is unknown; known: demo, serve"),
        (["--nope"], "--nope"),
        (["serve"], "POOL.yaml"),
        (["serve", "x.yaml", "--prot", "1"], "--prot"),
        (["serve", "x.yaml", "--port", "http"], "http"),
        (["simulate"], "SCENARIO.yaml"),
        (["journal"], "VERB"),
        (["journal", "eat", "x"], "'eat'"),
        (["why"], "PROGRAM"),
        (["emulate"], "not both"),
        (["demo", "--n", "0"], "--n is 0"),
        (["demo", "--gguf", "big"], "NAME=PATH"),
        (["demo", "--gguf", "big=/no/such/file"], "/no/such/file"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_two(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names what is wrong; nothing is on stdout and there is no traceback."""
    assert said in refused(run(capsys, *argv))


def test_faults_of_the_world_are_one_line_and_status_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is nobody's typing error has another status."""

    def broken(*args: object) -> int:
        raise JournalError("the disk\n is full")

    monkeypatch.setattr("loadwise.cli.presets.run", broken)
    assert run(capsys, "presets") == (1, "", "loadwise: the disk is full\n")


@pytest.mark.parametrize(("raised", "status"), [(KeyboardInterrupt(), 130), (PermissionError("no"), 2)])
def test_interrupts_and_refusals_of_the_system(
    raised: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No traceback for either."""

    def broken(*args: object) -> int:
        raise raised

    monkeypatch.setattr("loadwise.cli.presets.run", broken)
    assert run(capsys, "presets").status == status


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """What we did not expect keeps its traceback."""

    def broken(*args: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr("loadwise.cli.presets.run", broken)
    with pytest.raises(ZeroDivisionError):
        main(["presets"])


def test_a_reader_that_leaves_is_no_failure() -> None:
    """`loadwise journal cat J | head -1` ends quietly."""
    program = (
        "import sys\n"
        "from loadwise.cli import main, presets\n"
        "def much(arguments):\n"
        "    for _ in range(100000): print('x' * 100)\n"
        "    return 0\n"
        "presets.run = much\n"
        "sys.exit(main.main(['presets']))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=300) == 0


@pytest.mark.parametrize("argv", ["--help", "serve --help", "demo --help", "presets"])
def test_commands_load_only_what_they_use(argv: str) -> None:
    """Help and small commands load no web library, no numeric kernels, no terminal library."""
    program = (
        "import json, sys\n"
        "from loadwise.cli.main import main\n"
        f"try: main({argv.split()!r})\n"
        "except SystemExit: pass\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    loaded = set(json.loads(found.stdout.splitlines()[-1]))
    assert not loaded & {"uvloop", "httptools", "openai", "rich", "numba", "onnxruntime", "torch", "prometheus_client"}
    if "help" in argv:
        assert "numpy" not in loaded


def test_the_module_runs() -> None:
    """`python -m loadwise` is the command."""
    argv = [sys.executable, "-m", "loadwise", "srve"]
    found = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert found.returncode == 2
    assert found.stderr.count("\n") == 1
