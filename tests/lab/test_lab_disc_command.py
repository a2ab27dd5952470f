"""`loadwise lab disc`: worlds, cells and figures as the definitions have them, and one JSON object."""

import json
import math

import numpy as np
import pytest

from loadwise.cli.main import main
from loadwise.kernel.errors import ConfigError
from loadwise.lab import disc_report as source
from loadwise.lab.disc import (
    LOADS,
    N_BINS,
    PRESETS,
    Cell,
    CellResult,
    Settings,
    check_cell,
    read_world,
    run_cell,
    scenario_of,
    success_table,
    world_names,
)
from loadwise.lab.disc_report import Ran, cells, disc_json, paired_ratios
from loadwise.sim.vllm_engine import VllmEngineSpec

SMALL = Settings(n_programs=6)


@pytest.mark.parametrize("world", world_names())
@pytest.mark.parametrize("preset", PRESETS)
def test_every_world_runs_under_every_preset(world: str, preset: str) -> None:
    """108 programs in a closed loop, 900 s from admission, capacities as the engines say them, one selector for all."""
    scenario = scenario_of(Cell(world=world, preset=preset, load=48, seed=1))
    config = scenario.config
    assert (scenario.n_programs, scenario.workload.arrivals.n_agents) == (108, 48)  # type: ignore[union-attr]
    assert (config.router.budget_s, config.router.budget_starts) == (900.0, "admission")
    assert config.router.policy.name == "known"
    assert config.preset == preset
    for spec in config.backends:
        engine = scenario.engine_spec(spec.name)
        assert isinstance(engine, VllmEngineSpec)
        assert spec.kv_tokens == engine.n_blocks * engine.block_tokens


def test_the_success_gap_is_as_the_parameters_say() -> None:
    """A share of 86 % with a spread of .2 means 86 % of kinds do better on the dear model, and the spread is that."""
    for prefers, spread in ((0.99, 0.1), (0.86, 0.2)):
        table = success_table("d", "c", middle=0.5, prefers=prefers, spread=spread)
        gaps = [table["d"][kind] - table["c"][kind] for kind in table["d"]]
        mean = sum(gaps) / N_BINS
        assert sum(gap > 0 for gap in gaps) / N_BINS == pytest.approx(prefers, abs=1 / N_BINS)
        assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / N_BINS) == pytest.approx(spread, rel=0.1)


def test_settings_win_over_the_world() -> None:
    """Budget from arrival, another beta, keys of the router."""
    settings = Settings(budget_starts="arrival", beta=0.25, router={"admission": {"footprint_ratio": 0.5}})
    router = scenario_of(Cell(world="qwen-gh200", preset="fast", load=8, seed=1, settings=settings)).config.router
    assert (router.budget_starts, router.trade.wait_weight) == ("arrival", 0.25)
    assert (router.admission.footprint_ratio, router.admission.kind) == (0.5, "footprint")
    caps = scenario_of(Cell(world="qwen-gh200", preset="static_cap", load=8, seed=1)).config.router.admission
    assert caps.programs_max_by_model == read_world("qwen-gh200")["caps"]


def test_a_cell_is_the_same_again_and_conserves_programs() -> None:
    """Equal cells give equal results; nobody waits when there is room, and all programs end."""
    cell = Cell(world="qwen-gh200", preset="oracle", load=3, seed=5, settings=SMALL)
    first = run_cell(cell)
    assert run_cell(cell) == first
    assert first.wait_mean_s == 0.0 and first.diverts == 0.0
    assert 0.0 <= first.resolved <= 6.0 - first.killed
    assert 0.5 < first.hit_ratio <= 1.0


def test_both_models_on_one_gpu_share_what_the_router_promises() -> None:
    """One GH200 for both (ORACLE, E.2): each alone holds all of the cache, and the run keeps together within it."""
    both = Settings(n_programs=6, prefers=0.5, spread=0.3)
    cell = Cell(world="qwen-shared-gh200", preset="oracle", load=3, seed=5, settings=both)
    scenario = scenario_of(cell)
    assert scenario.gpus["gh200"].shares_kv
    assert {spec.kv_pool for spec in scenario.config.backends} == {"gh200"}
    apart = scenario_of(apart_cell(cell))
    for together, alone in zip(scenario.config.backends, apart.config.backends, strict=True):
        assert together.kv_tokens is not None and alone.kv_tokens is not None
        assert together.kv_tokens < alone.kv_tokens, "weights of both stand in its memory"
    shared, own = run_cell(cell), run_cell(apart_cell(cell))
    assert 0.5 < shared.hit_ratio <= 1.0 and 0.0 < shared.dear_share < 1.0
    assert shared.call_mean_s > own.call_mean_s, "and its time is one GPU's"


def apart_cell(cell: Cell) -> Cell:
    """The same with a GPU each."""
    return Cell(world="qwen-gh200", preset=cell.preset, load=cell.load, seed=cell.seed, settings=cell.settings)


def test_presets_meet_the_same_luck() -> None:
    """Where nobody waits and nobody is diverted, every preset resolves the same programs."""
    found = {
        preset: run_cell(Cell(world="qwen-gh200", preset=preset, load=2, seed=3, settings=SMALL))
        for preset in ("vllm_alone", "thunderagent", "oracle", "quality")
    }
    assert len({(one.resolved, one.programs_per_h, one.hit_ratio) for one in found.values()}) == 1


def result(programs_per_h: float) -> CellResult:
    """A result that took no time."""
    zeros = dict.fromkeys(CellResult.__struct_fields__, 0.0)
    return CellResult(**{**zeros, "programs_per_h": programs_per_h})


def test_ratios_are_paired_by_seed() -> None:
    """Twice as fast on every seed is twice as fast, without any width."""
    ran = [
        Ran(Cell(world="w", preset=preset, load=64, seed=seed), result(factor * (100.0 + 50.0 * seed)))
        for seed in range(5)
        for preset, factor in (("oracle", 2.0), ("thunderagent", 1.0))
    ]
    values, bounds = paired_ratios(ran, np.random.default_rng(0))
    assert values == {"w.64.oracle_over_thunderagent": 2.0}
    assert bounds["w.64.oracle_over_thunderagent"] == pytest.approx([2.0, 2.0])


def test_the_object_has_the_promised_keys() -> None:
    """What outside checks read of every cell."""
    ran = [Ran(Cell(world="w", preset="oracle", load=8, seed=seed), result(100.0 + seed)) for seed in (1, 2)]
    said = disc_json(ran, Settings(beta=0.2))
    (cell,) = said["cells"]
    promised = "pool preset n_programs programs_per_h resolved hit_ratio call_mean_s call_p95_s wait_mean_s diverts"
    assert {*promised.split(), "preemptions", "ci95"} <= set(cell)
    assert cell["ci95"]["programs_per_h"] == [101.0, 102.0]
    assert said["config"]["beta"] == 0.2
    assert said["seeds"] == [1, 2]


def test_the_command_prints_one_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Options reach the cells; the default is every preset at every load."""
    seen: list[Cell] = []

    def fake(cell: Cell) -> CellResult:
        seen.append(cell)
        return result(1.0)

    monkeypatch.setattr(source, "run_cell", fake)
    options = ["--preset", "oracle,fast", "--loads", "8,16", "--seeds", "2", "--beta", "0.3", "--json"]
    assert main(["lab", "disc", *options]) == 0
    said = json.loads(capsys.readouterr().out)
    assert len(said["cells"]) == 4 and len(seen) == 8
    assert {cell.settings.beta for cell in seen} == {0.3}
    seen.clear()
    assert main(["lab", "disc", "--seeds", "1"]) == 0
    assert len(seen) == len(PRESETS) * len(LOADS)


@pytest.mark.parametrize(("options", "verdict"), [(["--quick"], "one seed"), (["--seeds", "2"], "MISSED")])
def test_a_quick_look_misses_nothing(
    options: list[str], verdict: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One seed judges nobody, and the table says so; two that agree do. `fast` is at half of every peer here."""
    monkeypatch.setattr(source, "run_cell", lambda cell: result(0.5 if cell.preset == "fast" else 1.0))
    assert main(["lab", "disc", *options]) == 0
    _, legend, table = capsys.readouterr().out.partition("\nFigures to reach")
    heading, *lines = table[table.index("\nfigure ") + 1 :].splitlines()
    behind = [line for line in lines if " fast/" in line and "programs/h" in line]
    assert legend and heading.split()[-1] == "verdict"
    assert behind and all(line.endswith(verdict) for line in behind)
    assert ("MISSED" in "\n".join(lines)) == (verdict == "MISSED")


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        (Cell(world="qwen-gh200", preset="nobody", load=8, seed=1), "preset 'nobody' is unknown"),
        (Cell(world="qwen-gh200", preset="oracle", load=0, seed=1), "load is 0"),
        (Cell(world="w", preset="oracle", load=1, seed=1, settings=Settings(prefers=1.0)), "prefers is 1.0"),
        (Cell(world="w", preset="oracle", load=1, seed=1, settings=Settings(spread=0.0)), "spread is 0.0"),
        (Cell(world="w", preset="oracle", load=1, seed=1, settings=Settings(n_programs=0)), "programs is 0"),
    ],
)
def test_what_cannot_run_is_refused(cell: Cell, said: str) -> None:
    """By name, value and limit."""
    with pytest.raises(ConfigError, match=said):
        check_cell(cell)
    with pytest.raises(ConfigError, match="pool 'nowhere' is unknown; known: "):
        read_world("nowhere")


def test_cells_go_seed_by_seed() -> None:
    """An interrupted run is balanced."""
    some = cells(["qwen-gh200"], ["oracle", "fast"], [8, 16], range(2), Settings())
    assert [cell.seed for cell in some] == [0] * 4 + [1] * 4
