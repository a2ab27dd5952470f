"""The experiments on admission and divert: every arm can run, and a record says what it rests on."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import (
    disc_beta,
    disc_cells,
    disc_decay,
    disc_main,
    disc_overhead,
    disc_share,
    disc_stream,
    disc_tables,
    disc_trade,
)
from experiments.disc_cells import Arm, Grid, list_digest, plot, plot_bars, record, rounded, run_grids, smoked, table
from loadwise.lab.disc import LOADS, PRESETS, CellResult, Settings, scenario_of
from loadwise.lab.disc_cache import CellCache, cell_key
from loadwise.lab.disc_figures import Estimate, checked

RECORDED = argparse.Namespace(smoke=False, processes=1, minutes=1.0)


def result(**said: float) -> CellResult:
    """A result of zeros and what is said."""
    return CellResult(**{**dict.fromkeys(CellResult.__struct_fields__, 0.0), **said})


def results_of(*arms: str) -> dict[tuple[str, str, int], dict[int, CellResult]]:
    """Two loads on two seeds."""
    rng = np.random.default_rng(1)
    return {
        ("w", arm, load): {seed: result(resolved=float(rng.uniform(1, 9))) for seed in (1, 2)}
        for arm in arms
        for load in (8, 16)
    }


@pytest.mark.parametrize("experiment", [disc_beta, disc_decay, disc_overhead, disc_share, disc_trade])
def test_every_arm_can_run_and_is_another(experiment: Any) -> None:
    """Its keys are known to the router; no two arms of a table have one name or one description."""
    arms = experiment.arms()
    for arm in arms:
        assert scenario_of(arm.cell("qwen-gh200", 64, 1)).config.preset == arm.preset
    assert len({arm.name for arm in arms}) == len(arms)
    assert len({cell_key(arm.cell("qwen-gh200", 64, 1)) for arm in arms}) == len(arms)


def test_the_main_figure_has_every_preset_at_every_load() -> None:
    """On twenty seeds where two percent are claimed."""
    arms = disc_cells.arms_of(PRESETS)
    cells = Grid(disc_main.WORLDS, arms, LOADS, tuple(range(20))).cells()
    assert len({cell_key(cell) for _, cell in cells}) == len(cells) == 3 * 9 * 7 * 20
    assert [cell.seed for _, cell in cells] == sorted(cell.seed for _, cell in cells), "seed by seed"


def test_a_smoke_run_is_small(capsys: pytest.CaptureFixture[str]) -> None:
    """One seed of one world, two loads, twelve programs, and it writes nothing."""
    grid = Grid(("a", "b"), disc_cells.arms_of(PRESETS, Settings(arrivals="open", n_programs=2000)), LOADS, (1, 2, 3))
    cells = smoked(grid).cells()
    assert len(cells) == 2 * len(PRESETS)
    assert {(cell.world, cell.seed, cell.settings.n_programs) for _, cell in cells} == {("a", 1, 12)}
    record("nowhere", results_of("x"), argparse.Namespace(smoke=True), "text")
    assert not (disc_cells.RESULTS / "nowhere.json").exists()
    assert "text" in capsys.readouterr().out


def test_a_record_says_what_it_rests_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON that parses, with seeds, commit and the digest of its list; Markdown; pictures with equal bytes."""
    monkeypatch.setattr(disc_cells, "RESULTS", tmp_path)
    results = results_of("x", "y")
    checks = checked("key", Estimate(1.0, -np.inf, np.inf, 1), low=0.5)
    record("some", results, RECORDED, table(results, {"resolved": "resolved"}), checks, kv_gib=8.0)
    said = json.loads((tmp_path / "some.json").read_text())
    assert said["seeds"] == [1, 2] and said["kv_gib"] == 8.0 and said["n_cells"] == 8
    assert said["list_sha256"] == list_digest(results)
    assert said["checks"][0]["ci95"] == [None, None]
    first = said["cells"][0]
    assert (first["world"], first["arm"], first["load"], first["n_seeds"]) == ("w", "x", 8, 2)
    low, high = first["ci95"]["resolved"]
    assert low <= first["resolved"] <= high
    page = (tmp_path / "some.md").read_text()
    assert "8 cells, seeds 1 to 2" in page and "| key | 1.000 |" in page
    pytest.importorskip("matplotlib")
    for draw in (plot, plot_bars):
        draw("some", results, {"resolved": "resolved"}, RECORDED)
        picture = (tmp_path / "some.svg").read_bytes()
        draw("some", results, {"resolved": "resolved"}, RECORDED)
        assert (tmp_path / "some.svg").read_bytes() == picture


def test_the_list_is_that_of_what_ran() -> None:
    """In any order the same; another seed makes another."""
    results = results_of("x", "y")
    turned = dict(reversed(results.items()))
    assert list_digest(turned) == list_digest(results)
    turned["w", "x", 8] = {1: result(), 3: result()}
    assert list_digest(turned) != list_digest(results)


def test_cells_are_shared_between_experiments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one has run under whatever name the other takes."""
    monkeypatch.setattr(disc_cells, "CELLS", tmp_path)
    arm = Arm("some name", "oracle")
    CellCache(tmp_path).put(arm.cell("qwen-gh200", 8, 7), result(resolved=5.0))
    found = run_grids([Grid(("qwen-gh200",), (arm, Arm("another", "oracle")), (8,), (7,))], RECORDED)
    assert {key: by_seed[7].resolved for key, by_seed in found.items()} == {
        ("qwen-gh200", "some name", 8): 5.0,
        ("qwen-gh200", "another", 8): 5.0,
    }


def test_figures_of_the_experiments_are_read_off_their_own_arms() -> None:
    """Names of arms in checks are those of the cells: no line is lost to a typing error."""
    beta = {(world, arm.name, 64): {1: result()} for world in disc_beta.WORLDS for arm in disc_beta.arms()}
    assert len(disc_beta.checks_of(beta)) == 16
    decay = {("qwen-gh200", arm.name, 32): {1: result()} for arm in disc_decay.arms()}
    assert len(disc_decay.checks_of(decay)) == 2
    both = {
        (world, arm.name, load): {1: result()}
        for world in disc_share.WORLDS
        for arm in disc_share.arms()
        for load in (32, 64)
    }
    assert len(disc_share.checks_of(both)) == 16
    overhead = {("qwen-gh200", arm.name, 32): {1: result()} for arm in disc_overhead.arms()}
    assert len(disc_overhead.checks_of(overhead)) == 4
    swept = {(world, arm.name, load): {1: result()} for world, load in disc_trade.PLACES for arm in disc_trade.arms()}
    assert len(disc_trade.trend_checks(swept)) == 18
    five = {(world, preset, 96): {1: result()} for world in disc_tables.PAIRS for preset in disc_tables.FIVE}
    assert len(disc_tables.five_checks(five)) == 14
    stream = {("qwen-gh200", preset, load): {1: result()} for preset in PRESETS for load in (50, 70, 90, 110)}
    assert len(disc_stream.checks_of(stream, {"qwen-gh200": [50, 70, 90, 110]})) == 10


def test_numbers_are_rounded_as_deep_as_they_stand() -> None:
    """And nothing else changes."""
    assert rounded({"a": [1 / 3, {"b": 2.0}], "c": None}) == {"a": [0.33333, {"b": 2.0}], "c": None}
