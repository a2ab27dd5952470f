"""`loadwise doctor`: a table for people, an object for programs, a status for scripts."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import pytest
from cli_runs import POOL, refused, run

from loadwise.cli import doctor


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """A pool whose backends are not there."""
    path = tmp_path / "pool.yaml"
    path.write_text(POOL + f"gateway: {{port: 0, journal: {tmp_path / 'j'}}}\n")
    return path


def test_what_is_broken_has_status_one(pool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In words and in JSON."""
    ran = run(capsys, "doctor", pool, "--timeout-s", "60")
    assert ran.status == 1
    assert "something is broken" in ran.out
    assert "cannot be reached at http://127.0.0.1:1/v1" in ran.out
    assert "256 slots assumed" in ran.out
    heading = ran.out.splitlines()[0].split()
    assert heading[0] == "backend" and "signals" not in heading  # they have lines of their own
    assert sum(line.startswith("signals  ") for line in ran.out.splitlines()) == 2
    said = run(capsys, "doctor", pool, "--timeout-s", "60", "--json").json
    assert said["broken"] is True
    assert [backend["name"] for backend in said["backends"]] == ["a", "b.1"]
    assert {"level", "subject", "text"} == set(said["findings"][0])


def test_on_a_terminal_it_draws_a_table(
    pool: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same content, drawn."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    assert doctor.run(doctor_arguments(pool)) == 1
    assert "backend" in terminal.getvalue()
    assert "something is broken" in terminal.getvalue()


def doctor_arguments(pool: Path) -> argparse.Namespace:
    """Parsed as `main` does it."""
    from loadwise.cli.main import Parser

    parser = Parser()
    doctor.add_arguments(parser)
    return parser.parse_args([str(pool), "--timeout-s", "60"])


def test_a_wrong_file_or_flag_has_status_two(pool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The gateway's section is checked too."""
    assert "unknown key 'prot'" in refused(run(capsys, "doctor", pool, "--set", "gateway.prot=1"))
    assert "--timeout-s" in refused(run(capsys, "doctor", pool, "--timeout-s", "0"))
    assert "nope.yaml" in refused(run(capsys, "doctor", pool.with_name("nope.yaml")))
