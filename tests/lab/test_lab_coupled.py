"""Constructed joint outcomes keep the margins that they are made of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from loadwise.kernel.errors import ConfigError
from loadwise.lab.coupled import COUPLINGS, Coupling, Margin, join, read_margins, write_outcomes
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
