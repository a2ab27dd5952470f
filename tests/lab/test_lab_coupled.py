"""Constructed joint outcomes keep the margins that they are made of."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lab_folder import row, write

from loadwise.kernel.errors import ConfigError
from loadwise.lab.coupled import (
    COUPLINGS,
    Coupling,
    Margin,
    join,
    read_coupled_stream,
    read_margins,
    shared_domains,
    write_outcomes,
)
from loadwise.lab.stream import AgentChoice, Stream, read_stream

COUNTS = {"strong": [1, 2, 0, 3, 14], "weak": [8, 2, 3, 4, 3]}


def margins() -> dict[str, list[Margin]]:
    return {
        model: [Margin("airline", np.repeat(np.arange(5), counts)[::-1], 0.1 + place)]
        for place, (model, counts) in enumerate(COUNTS.items())
    }


def stream(folder: Path, coupling: Coupling, seed: int = 0) -> Stream:
    write_outcomes(join(margins(), "tau2", coupling, seed), folder / "outcomes" / "made.parquet")
    return read_stream(folder, ["tau2"], ["strong", "weak"], AgentChoice.parse(None))


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_every_coupling_keeps_each_models_counts(tmp_path: Path, coupling: Coupling) -> None:
    """How often each model solves how many of four trials is as published."""
    made = stream(tmp_path, coupling)
    assert made.n_trials.tolist() == [[4, 4]] * 20
    for k, counts in enumerate(COUNTS.values()):
        assert np.bincount((4 * made.success[:, k]).round().astype(int), minlength=5).tolist() == counts
    assert set(made.agents.values()) == {f"constructed-{coupling}"}


def test_couplings_bound_what_can_be_gained(tmp_path: Path) -> None:
    """The best model of each task reaches most where models fail on different tasks, least where on the same."""
    reached = {kind: stream(tmp_path / kind, kind).success.max(axis=1).mean() for kind in COUPLINGS}
    assert reached["comonotone"] == pytest.approx(stream(tmp_path, "comonotone").success[:, 0].mean())
    assert reached["comonotone"] < reached["independent"] < reached["countermonotone"]


def test_chance_comes_from_the_seed() -> None:
    """Equal seeds deal equally."""
    first, second, other = (join(margins(), "tau2", "independent", seed) for seed in (0, 0, 1))
    assert first == second != other


def write_margin(path: Path, **values: object) -> Path:
    row = {"submission": "s", "domain": "airline", "rounding_error": 0.1, "cost_usd": 0.5}
    row |= {f"tasks_{k}of4": float(count) for k, count in enumerate(COUNTS["weak"])}
    pq.write_table(pa.Table.from_pylist([{**row, **values}]), path)
    return path


def test_margins_are_read_by_domain(tmp_path: Path) -> None:
    """Counts become trials solved, most first."""
    (margin,) = read_margins(write_margin(tmp_path / "m.parquet"), "s", ["airline"])
    assert margin.n_solved.tolist() == [4] * 3 + [3] * 4 + [2] * 3 + [1] * 2 + [0] * 8
    assert margin.cost_usd == 0.5


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rounding_error": 0.3}, "rounding_error is 0.3"),
        ({"rounding_error": None}, "rounding_error is None"),
        ({"cost_usd": None}, "cost_usd is None"),
        ({"cost_usd": 0.0}, "cost_usd is 0.0"),
        ({"domain": "retail"}, "no submission 's' in domain 'airline'"),
    ],
)
def test_margins_that_cannot_be_used_are_refused(tmp_path: Path, values: dict[str, object], said: str) -> None:
    """Coarse counts, no cost, another domain."""
    with pytest.raises(ConfigError, match=said):
        read_margins(write_margin(tmp_path / "m.parquet", **values), "s", ["airline"])


def test_models_of_different_domains_are_not_joined() -> None:
    """Nor is an unknown coupling accepted."""
    short = {"strong": margins()["strong"], "weak": [Margin("airline", np.array([4, 0]), 0.1)]}
    with pytest.raises(ConfigError, match="other domains or numbers"):
        join(short, "tau2", "independent", 0)
    with pytest.raises(ConfigError, match="known: independent"):
        join(margins(), "tau2", "loose", 0)  # type: ignore[arg-type]


def leaderboard(folder: Path) -> Path:
    """Two submissions; only `airline` is published finely by both."""
    rows = []
    for name, domain, error in [
        ("s", "airline", 0.1),
        ("w", "airline", 0.0),
        ("s", "retail", 0.0),
        ("w", "retail", 0.5),
    ]:
        counts = COUNTS["strong" if name == "s" else "weak"]
        row = {"submission": name, "domain": domain, "rounding_error": error, "cost_usd": 0.5 if name == "s" else 0.1}
        rows.append(row | {f"tasks_{k}of4": float(count) for k, count in enumerate(counts)})
    pq.write_table(pa.Table.from_pylist(rows), folder / "tau2_marginals.parquet")
    return folder


def coupled(folder: Path, families: list[str], submissions: dict[str, str], coupling: Coupling) -> Stream:
    return read_coupled_stream(folder, families, ["big", "small"], AgentChoice.parse(None), submissions, coupling)


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_a_family_is_constructed_beside_measured_ones(tmp_path: Path, coupling: Coupling) -> None:
    """The measured family is as it was; the constructed one keeps the margins of those who stand for models."""
    runs = [row(task, model=model, success=float(model == "big")) for task in "ab" for model in ("big", "small")]
    write(leaderboard(tmp_path), runs)
    made = coupled(tmp_path, ["tau2", "swe"], {"big": "s", "small": "w"}, coupling)
    plain = read_stream(tmp_path, ["swe"], ["big", "small"], AgentChoice.parse(None))
    assert made.tasks[-2:] == plain.tasks and made.success[-2:].tolist() == plain.success.tolist()
    assert made.families == ("tau2", "swe") and set(made.domains[:-2]) == {"airline"}
    for k, counts in enumerate(COUNTS.values()):
        assert np.bincount((4 * made.success[:-2, k]).round().astype(int), minlength=5).tolist() == counts
    assert made.agents["tau2", "big"] == f"constructed-{coupling}" and made.agents["swe", "big"] == "a"


def test_what_cannot_be_constructed_is_refused(tmp_path: Path) -> None:
    """No such submission, a model that nobody stands for, a stream without the family, no file, no fine domain."""
    with pytest.raises(ConfigError, match=r"tau2_marginals\.parquet' does not exist; submissions are read"):
        coupled(tmp_path, ["tau2"], {"big": "s", "small": "w"}, "independent")
    leaderboard(tmp_path)
    assert shared_domains(tmp_path / "tau2_marginals.parquet", ["s", "w"]) == ["airline"]
    wrong: list[tuple[list[str], dict[str, str], str]] = [
        (["tau2"], {"big": "s", "small": "x"}, "no submission 'x'; known: s, w"),
        (["tau2"], {"big": "s"}, "model 'small' has no submission"),
        (["tau2"], {"big": "s", "small": "w", "other": "w"}, "submission of 'other'"),
        (["swe"], {"big": "s", "small": "w"}, "'tau2' is not in the stream swe"),
    ]
    for families, submissions, said in wrong:
        with pytest.raises(ConfigError, match=said):
            coupled(tmp_path, families, submissions, "independent")
    write_margin(tmp_path / "tau2_marginals.parquet", rounding_error=0.5)
    with pytest.raises(ConfigError, match="no domain in which s"):
        shared_domains(tmp_path / "tau2_marginals.parquet", ["s"])


def test_the_command_reports_every_coupling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All three by default, each labelled constructed with the map of names; one where one is asked for."""
    from loadwise.cli.main import main

    (tmp_path / "outcomes").mkdir()
    argv = ["lab", "replay", "--outcomes", str(leaderboard(tmp_path)), "--stream", "tau2", "--models", "big,small"]
    argv += ["--orders", "1", "--passes", "1", "--draws", "20", "--policies", "linucb", "--cost-weights", "0,1"]
    named = ["--submissions", "big=s,small=w"]
    assert main([*argv, *named, "--json", "--markdown", str(tmp_path / "t.md")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told["couplings"]) == list(COUPLINGS)
    assert told["values"] == told["couplings"]["independent"]["values"]
    for kind, one in told["couplings"].items():
        assert (one["config"]["constructed"], one["config"]["coupling"]) == (["tau2"], kind)
        assert one["config"]["submissions"] == {"big": "s", "small": "w"}
    assert told["couplings"]["comonotone"]["singles"] == told["singles"]
    assert (tmp_path / "t.md").read_text().count("**Constructed, not measured**: tau2") == 3
    assert main([*argv, *named, "--coupling", "comonotone"]) == 0
    assert "constructed, not measured: comonotone" in capsys.readouterr().out
    for wrong, said in (
        ([*named, "--coupling", "loose"], "'loose' is unknown"),
        ([*named, "--coupling", "comonotone,comonotone"], "each may be given once"),
        (["--coupling", "independent"], "--coup"),
    ):
        assert main([*argv, *wrong]) == 2
        assert said in capsys.readouterr().err
