"""Worlds from files: of the same shape as those that come with the package, and refused by name where they are not."""

import json
from pathlib import Path
from typing import Any

import pytest

from loadwise.cli.main import main
from loadwise.kernel.errors import ConfigError
from loadwise.lab.disc import Cell, Settings, run_cell, scenario_of
from loadwise.lab.disc_world import read_world, world_names, world_text
from loadwise.sim.scenario import block_bytes_of
from loadwise.sim.vllm_engine import VllmEngineSpec


def own_world() -> dict[str, Any]:
    """Two replicas of the dear model, listed after the cheap one."""
    backend = {"engine": "emulator"}
    return {
        "gap": {"dear": "big", "cheap": "small", "middle": 0.5, "prefers": 0.9, "spread": 0.1},
        "caps": {"big": 2, "small": 3},
        "state_tokens": 0,
        "scenario": 1,
        "name": "own",
        "n_programs": 8,
        "pool": {
            "models": {"small": {"expected_tokens": 2000}, "big": {"expected_tokens": 2000}},
            "backends": [
                {"name": "s", "model": "small", **backend},
                {"name": "b1", "model": "big", **backend},
                {"name": "b2", "model": "big", **backend},
            ],
            "router": {"admission": {"overhead_tokens": 0}},
        },
        "engines": {name: {"kind": "vllm", "num_gpu_blocks": 2000} for name in ("s", "b1", "b2")},
        "workload": {"arrivals": {"kind": "closed", "n_agents": 4}, "turns": 3},
        "truth": {},
    }


def write(tmp_path: Path, document: dict[str, Any]) -> str:
    """As a file; JSON is YAML."""
    file = tmp_path / "own.yaml"
    file.write_text(json.dumps(document))
    return str(file)


@pytest.mark.parametrize("world", world_names())
def test_worlds_of_the_package_are_of_the_shape_that_is_asked_for(world: str, tmp_path: Path) -> None:
    """A copy in a file is the same world."""
    file = tmp_path / "copy.yaml"
    file.write_text(world_text(world))
    assert read_world(str(file)) == read_world(world)


@pytest.mark.parametrize("preset", ["static_cap", "thunderagent_state", "oracle", "fast", "loadwise"])
def test_a_world_from_a_file_runs(tmp_path: Path, preset: str) -> None:
    """Its dear model is the one that `gap` names, wherever it is listed, with all its replicas."""
    cell = Cell(world=write(tmp_path, own_world()), preset=preset, load=6, seed=1)
    scenario = scenario_of(cell)
    assert [backend.model for backend in scenario.config.backends] == ["big", "big", "small"]
    found = run_cell(cell)
    assert found.programs_per_h > 0.0 and found.dear_share > 0.5
    assert found.routed_dear_share > 0.5 and 0.0 < found.hit_ratio <= 1.0


def broken(**changes: Any) -> dict[str, Any]:
    """The world with keys changed, or left out where None."""
    return {key: value for key, value in {**own_world(), **changes}.items() if value is not None}


GAP, POOL = own_world()["gap"], own_world()["pool"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gap": None, "caps": None}, "gap, caps missing"),
        ({"gap": {**GAP, "prefers": 1.5}}, r"gap.prefers is 1.5; it must be in \(0, 1\)"),
        ({"gap": {**GAP, "spread": 0}}, "gap.spread is 0"),
        ({"gap": {**GAP, "cheap": "big"}}, "must differ"),
        ({"gap": {**GAP, "dear": "other"}}, "backends serve big, small; gap names other and small"),
        ({"gap": {**GAP, "wide": 1}}, "unknown field `wide`"),
        ({"caps": {"big": 2}}, "caps of 'small' is None; it must be a whole number >= 1"),
        ({"caps": {"big": 0, "small": 1}}, "caps of 'big' is 0"),
        ({"state_tokens": -1}, "state_tokens is -1"),
        ({"pool": {"models": {}}}, "pool.backends is None"),
        ({"workload": {"arrivals": {"kind": "trace", "path": "x"}}}, "no trace"),
        ({"workload": {"turns": 3}}, "workload.arrivals is None"),
        ({"engines": []}, r"engines is \[\]; it must be a mapping"),
        ({"pool": {**POOL, "router": None}}, "pool.router is None; it must be a mapping"),
        ({"pool": {**POOL, "router": {"admission": None}}}, "pool.router.admission is None; it must be a mapping"),
        ({"pool": {**POOL, "backends": [{"name": "a", "model": []}]}}, r"backends serve \[\]; gap names"),
        ({"engines": {}}, "engine of 'b1' is no vllm"),
    ],
)
def test_a_file_of_another_shape_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    """The message names file, key and value."""
    world = write(tmp_path, broken(**changes))
    with pytest.raises(ConfigError, match=said) as caught:
        scenario_of(Cell(world=world, preset="oracle", load=2, seed=1))
    assert "own.yaml" in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Absent, or no text."""
    with pytest.raises(ConfigError, match=r"world '.*nowhere.yaml' cannot be read"):
        read_world(str(tmp_path / "nowhere.yaml"))
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_world(str(tmp_path / "bytes.yaml"))


def test_kv_memory_of_the_dear_model_can_be_limited() -> None:
    """8 GiB are so many blocks of its size; the cheap model keeps what it has."""
    whole = scenario_of(Cell(world="qwen-gh200", preset="oracle", load=8, seed=1))
    small = scenario_of(Cell(world="qwen-gh200", preset="oracle", load=8, seed=1, settings=Settings(kv_gib=8.0)))
    spec = small.engine_spec("dear")
    assert isinstance(spec, VllmEngineSpec)
    assert 0 <= 8 * 2**30 - spec.n_blocks * block_bytes_of(spec) < block_bytes_of(spec)
    assert small.config.backends[0].kv_tokens == spec.n_blocks * spec.block_tokens
    assert small.config.backends[1] == whole.config.backends[1]
    with pytest.raises(ConfigError, match="its GPUs are shared"):
        scenario_of(Cell(world="qwen-shared-gh200", preset="oracle", load=8, seed=1, settings=Settings(kv_gib=8.0)))


def test_an_open_stream_brings_programs_at_its_rate(tmp_path: Path) -> None:
    """Whatever becomes of them: at a low rate nobody waits, and the stream lasts as long as it takes them to come."""
    settings = Settings(arrivals="open", n_programs=12)
    cell = Cell(world=write(tmp_path, own_world()), preset="oracle", load=360, seed=1, settings=settings)
    found = run_cell(cell)
    assert found.wait_p95_s == 0.0
    assert 60.0 < found.elapsed_s < 300.0, "twelve programs, one every ten seconds"
    assert found.programs_per_h == pytest.approx(12 * 3600 / found.elapsed_s)


def test_the_price_can_be_said_in_seconds() -> None:
    """It replaces the preset's beta, and both together are refused."""
    settings = Settings(seconds_per_point=2.0)
    scenario = scenario_of(Cell(world="qwen-gh200", preset="fast", load=8, seed=1, settings=settings))
    trade = scenario.config.router.trade
    assert trade.wait_weight == pytest.approx(trade.wait_reference_s / (trade.wait_reference_s + 100.0 * 2.0))
    with pytest.raises(ConfigError, match="two words for one price"):
        scenario_of(Cell(world="w", preset="fast", load=8, seed=1, settings=Settings(beta=0.1, seconds_per_point=2.0)))


@pytest.mark.parametrize("load", [3, 20])
def test_an_allowance_that_nobody_learns_is_what_it_began_with(tmp_path: Path, load: int) -> None:
    """On average over a loop, and over a run whose programs all come at once."""
    settings = Settings(router={"admission": {"overhead_tokens": 70, "learns_overhead": False}})
    found = run_cell(Cell(world=write(tmp_path, own_world()), preset="oracle", load=load, seed=1, settings=settings))
    assert (found.overhead_tokens, found.overhead_mean_tokens) == (70.0, pytest.approx(70.0))


def test_a_learning_selector_takes_the_known_ones_place() -> None:
    """With options of its own; it sees kinds of tasks."""
    settings = Settings(selector={"name": "linucb", "gram": "landed"})
    router = scenario_of(Cell(world="qwen-gh200", preset="oracle", load=8, seed=1, settings=settings)).config.router
    assert router.policy.name == "linucb"
    assert (router.policy.options["gram"], router.policy.options["alpha"]) == ("landed", 0.6)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--arrivals", "open"], "--arrivals open needs --rate"),
        (["--arrivals", "open", "--loads", "8", "--rate", "9"], "--loads is '8', but arrivals are open"),
        (["--rate", "9"], "--rate is '9', but arrivals are closed"),
        (["--arrivals", "open", "--rate", "fast"], "--rate is 'fast'; it must be whole numbers"),
        (["--scenario", "a.yaml", "--pool", "b.yaml"], "--pool and --scenario both name worlds"),
        (["--scenario", "/nowhere/a.yaml"], "world '/nowhere/a.yaml' cannot be read"),
        (["--pool", ""], "pool '' is unknown"),
        (["--seconds-per-point", "0"], "--seconds-per-point is 0.0"),
        (["--selector", "nobody"], "unknown policy 'nobody'"),
    ],
)
def test_what_contradicts_itself_is_refused(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By flag and value, before anything runs."""
    assert main(["lab", "disc", *argv]) != 0
    assert said in capsys.readouterr().err


def test_the_command_takes_a_file_and_an_open_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rates stand where loads stood, and cells are kept for the next run."""
    options = ["--scenario", write(tmp_path, own_world()), "--preset", "oracle", "--seeds", "1", "--programs", "5"]
    more = ["--arrivals", "open", "--rate", "600,900", "--cache", str(tmp_path / "cells"), "--json"]
    assert main(["lab", "disc", *options, *more]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [(cell["arrivals_per_h"], cell["n_programs"]) for cell in said["cells"]] == [(600, None), (900, None)]
    assert said["checks"] == []
    assert len((next((tmp_path / "cells").iterdir())).read_text().split()) > 0
    assert main(["lab", "disc", *options, *more]) == 0
    assert json.loads(capsys.readouterr().out)["cells"] == said["cells"]
