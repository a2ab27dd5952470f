"""`loadwise lab fidelity`: one table, one JSON object, honest about what was missed."""

import json
import math

import pytest

from loadwise.cli.main import main
from loadwise.lab import fidelity as command
from loadwise.sim.fidelity import Row

ROWS = [
    Row(key="law.a", published=1.0, ours=1.001, low=0.99, high=1.01, basis="law"),
    Row(key="paper.b", published=6.8, ours=9.0, low=5.0, high=8.0, basis="fit", samples=(8.0, 10.0)),
    Row(key="paper.c", published=None, ours=math.inf, low=5.0, high=8.0, basis="prediction", samples=(math.inf, 1.0)),
]


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Three rows instead of a minute of simulation; the seeds that were asked for."""
    asked: list[int] = []

    def fake(seeds: range) -> list[Row]:
        asked.extend(seeds)
        return ROWS

    monkeypatch.setattr(command, "fidelity", fake)
    return asked


def test_the_object_has_values_intervals_and_checks(rows: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    """Keys as every experiment has them; a missed band is reported and is no failure of the command."""
    assert main(["lab", "fidelity", "--seeds", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    found = json.loads(line)
    assert rows == [0, 1] == found["seeds"]
    assert found["name"] == "lab.fidelity"
    assert found["values"] == {"law.a": 1.001, "paper.b": 9.0}
    assert list(found["ci95"]) == ["paper.b"]
    assert found["peers"]["published"] == {"law.a": 1.0, "paper.b": 6.8}
    assert [(check["key"], check["holds"]) for check in found["checks"]] == [
        ("law.a", True),
        ("paper.b", False),
        ("paper.c", False),
    ]
    assert found["config"]["basis"]["paper.b"] == "fit"
    assert "missed paper.b" in err


def test_the_table_says_paper_ours_and_band(capsys: pytest.CaptureFixture[str]) -> None:
    """One line a figure, with its basis and whether it holds."""
    assert main(["lab", "fidelity", "--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(ROWS)
    assert lines[2].split() == ["paper.b", "6.8", "9", "5", "..", "8", "fit", "MISSED"]


@pytest.mark.parametrize("n", [0, -1, 101])
def test_seeds_out_of_range_are_refused(n: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing runs; the limit is named."""
    assert main(["lab", "fidelity", "--seeds", str(n)]) == 2
    assert "1..100" in capsys.readouterr().err
