"""`loadwise lab sweep`: which cells, the same results in any number of processes, and one JSON object."""

import json

import pytest

from loadwise.cli.main import main
from loadwise.kernel.errors import ConfigError
from loadwise.lab import sweep as source
from loadwise.lab.sweep import LOADS, N_PROGRAMS, PRESETS, Cell, Outcome, cells, run_sweep, scenario_of, sweep_json
from loadwise.sim.hardware import HardwareSpec
from loadwise.sim.vllm_engine import VllmEngineSpec


def test_a_cell_is_the_pair_whole() -> None:
    """108 programs on two hybrid-attention engines behind the router, read every second, with late verdicts."""
    scenario = scenario_of(Cell("oracle", 64, 0))
    assert scenario.n_programs == N_PROGRAMS == 108
    assert scenario.signals.every_s == 1.0
    specs = list(scenario.engines.values())
    assert all(isinstance(spec, VllmEngineSpec) and spec.state_groups == 3 for spec in specs)
    hardware = [spec.hardware for spec in specs if isinstance(spec, VllmEngineSpec)]
    assert [h.model for h in hardware if isinstance(h, HardwareSpec)] == ["qwen3.6-27b", "qwen3.5-9b"]
    assert scenario.config.preset == "oracle"
    declared = {backend.name: backend.kv_tokens for backend in scenario.config.backends}
    held = {name: e.n_blocks * e.block_tokens for name, e in scenario.engines.items() if isinstance(e, VllmEngineSpec)}
    assert declared == held, "or slots would be counted, and no gate asked"


def test_cells_go_seed_by_seed() -> None:
    """Every preset at every load before the next seed, so that any number of cells is balanced."""
    each = len(PRESETS) * len(LOADS)
    some = cells(2 * each + 1)
    assert len(set(some)) == len(some) == 2 * each + 1
    assert {cell.seed for cell in some[:each]} == {0}
    assert some[-1] == Cell(PRESETS[0], LOADS[0], 2)


def small(cell: Cell) -> Outcome:
    """A cell that took no time."""
    return Outcome(cell, 100.0 + cell.seed, 0.5, 0.9, 5000, 0.5)


def test_the_object_has_figures_and_cells(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Seconds per cell, the extrapolation, and means over seeds with their errors."""
    monkeypatch.setattr(source, "run_cell", small)
    argv = ["lab", "sweep", "--cells", "4", "--presets", "oracle", "--loads", "8,64", "--processes", "1", "--json"]
    assert main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["name"] == "lab.sweep"
    assert found["seeds"] == [0, 1]
    values = found["values"]
    assert values["n_cells"] == 4
    assert values["core_s_per_cell"] == pytest.approx(0.5)
    assert values["core_s_per_1000_cells_and_process"] == pytest.approx(500.0)
    assert values["wall_s_per_1000_cells"] == pytest.approx(250 * values["wall_s"])
    assert found["config"]["is_extrapolated"]
    assert found["checks"][0]["holds"]
    assert [(cell["n_programs"], cell["n_seeds"]) for cell in found["cells"]] == [(8, 2), (64, 2)]
    assert found["cells"][0]["programs_per_h"] == pytest.approx(100.5)
    assert found["cells"][0]["two_standard_errors"]["programs_per_h"] == pytest.approx(1.0)


def test_processes_change_nothing() -> None:
    """Cells run here and in processes of their own give the same figures."""
    todo = [Cell("least_loaded", 3, 0), Cell("round_robin", 3, 1)]
    plain = [outcome[:5] for outcome in run_sweep(todo, 1).outcomes]
    assert [outcome[:5] for outcome in run_sweep(todo, 2).outcomes] == plain


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--cells", "0"], "--cells is 0"),
        (["--presets", "nobody"], "preset 'nobody'"),
        (["--loads", "8,x"], "--loads"),
        (["--loads", "0"], "load is 0"),
        (["--processes", "0"], "--processes is 0"),
    ],
)
def test_bad_flags_are_named(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing runs."""
    assert main(["lab", "sweep", *flags]) == 2
    assert named in capsys.readouterr().err


def test_an_empty_sweep_is_refused() -> None:
    """No cells, no figures."""
    with pytest.raises(ConfigError, match="at least one cell"):
        run_sweep([], 1)


def test_the_table_has_a_line_per_setting(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Preset, load, and figures; how long it took is said beside it."""
    monkeypatch.setattr(source, "run_cell", small)
    assert main(["lab", "sweep", "--cells", "2", "--loads", "8", "--presets", "oracle,deals", "--processes", "1"]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[:3] for line in out.splitlines()[1:]] == [["deals", "8", "1"], ["oracle", "8", "1"]]
    assert "0.50 core seconds each" in err
    assert sweep_json(run_sweep([Cell("oracle", 8, 0)], 1))["cells"][0]["n_seeds"] == 1
