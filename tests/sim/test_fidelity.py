"""The figures of papers and public measurements, within the bands that were agreed beforehand."""

import math

import numpy as np
import pytest

from loadwise.sim import fidelity as source
from loadwise.sim.fidelity import (
    Row,
    capacity_rows,
    collapse_minute,
    fidelity,
    finite_run_rows,
    oracle_rows,
    throughput_rows,
    thunder_rows,
)
from loadwise.sim.programs import CallLog


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    """Of papers and measurements; laws have a module of their own."""
    seeds = (0, 1, 2)
    parts = (capacity_rows(), throughput_rows(), thunder_rows(seeds), oracle_rows(seeds), finite_run_rows(seeds))
    return {row.key: row for part in parts for row in part}


def test_every_figure_lies_in_its_band(rows: dict[str, Row]) -> None:
    """KV capacity, throughput, ThunderAgent's Fig. 1, ORACLE's Fig. 2c and InfraMind's finite-run law."""
    missed = [row for row in rows.values() if not row.holds]
    assert not missed
    assert len(rows) == 18


def test_the_cache_collapses_between_24_and_72_programs(rows: dict[str, Row]) -> None:
    """More programs, fewer steps: the order of the loads is the paper's, not only each point's band."""
    hits = [rows[f"thunderagent.fig1.{n}.hit_ratio"].ours for n in (24, 48, 72, 96)]
    assert hits == sorted(hits, reverse=True)
    rates = [rows[f"thunderagent.fig1.{n}.steps_per_min"].ours for n in (24, 72, 96)]
    assert rates == sorted(rates, reverse=True)


def test_fits_are_called_fits(rows: dict[str, Row]) -> None:
    """What was chosen to be met is no evidence, and says so; means over seeds carry an interval around them."""
    fits = {key for key, row in rows.items() if row.basis == "fit"}
    assert fits == {
        "thunderagent.fig1.24.steps_per_min",
        "thunderagent.fig1.72.hit_ratio",
        "thunderagent.fig1.96.hit_ratio",
        "oracle.fig2c.27b.collapse_minute",
    }
    assert {key for key, row in rows.items() if row.basis == "own band"} == {
        "inframind.table2.overload_4",
        "inframind.table2.overload_8",
    }
    for row in rows.values():
        assert (row.ci95 is None) == (row.basis == "measurement")
        if row.ci95 is not None:
            assert row.ci95[0] <= row.ours <= row.ci95[1]


def test_an_interval_is_students() -> None:
    """Three samples 1, 2, 3: 2 ± 4.303/√3; one sample, or one without a figure, has none."""

    def row(*samples: float) -> Row:
        return Row(key="k", published=None, ours=2.0, low=0.0, high=1.0, basis="law", samples=samples)

    assert row(1.0, 2.0, 3.0).ci95 == pytest.approx((2 - 4.303 / math.sqrt(3), 2 + 4.303 / math.sqrt(3)))
    assert row(1.0).ci95 is None
    assert row(1.0, math.inf).ci95 is None
    assert not row().holds


def test_all_rows_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fidelity` joins laws, measurements and papers, under keys of their own."""
    for name in ("law_rows", "capacity_rows", "throughput_rows"):
        row = Row(key=name, published=None, ours=1.0, low=0.0, high=1.0, basis="law")
        monkeypatch.setattr(source, name, lambda row=row: [row])
    for name in ("thunder_rows", "oracle_rows", "finite_run_rows"):
        row = Row(key=name, published=None, ours=1.0, low=0.0, high=1.0, basis="law")
        monkeypatch.setattr(source, name, lambda seeds, row=row: [row] * len(seeds))
    assert len(fidelity((4, 5))) == 3 + 3 * 2


def test_other_seeds_agree() -> None:
    """ThunderAgent's curve does not hang on the seeds that were looked at when its shapes were chosen."""
    assert [row.key for row in thunder_rows((17, 18, 19)) if not row.holds] == []


def test_a_collapse_is_found_in_its_minute() -> None:
    """The first minute with less than half of its prompt tokens found; none if there is none."""
    times = np.array([10.0, 70.0, 130.0, 190.0])
    zeros = np.zeros(4, dtype=np.int64)

    def log(hits: list[int]) -> CallLog:
        return CallLog(
            call=zeros,
            engine=zeros,
            arrived_at_s=times,
            first_at_s=times,
            finished_at_s=times,
            prompt_tokens=np.full(4, 100),
            hit_tokens=np.array(hits),
            output_tokens=zeros,
            n_preemptions=0,
            end_s=190.0,
        )

    assert collapse_minute(log([90, 90, 40, 90])) == 3.0
    assert collapse_minute(log([90, 90, 90, 90])) == math.inf
