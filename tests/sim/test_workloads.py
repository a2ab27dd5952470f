"""What agents bring: distributions, joint shapes, bursts, shipped presets and recorded traces."""

import json
import math
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.streams import Streams
from loadwise.sim.draw import Draw, scaled
from loadwise.sim.engine import EngineRequest
from loadwise.sim.programs import run_by_block
from loadwise.sim.scenario import parse_scenario, preset_names, preset_workload
from loadwise.sim.simulate import simulate
from loadwise.sim.traces import read_trace
from loadwise.sim.vllm_engine import VllmEngine, VllmEngineSpec
from loadwise.sim.workload import Workload, WorkloadSpec

from .engine_driver import drive

CLOSED = {"kind": "closed", "n_agents": 4}
BESIDE = Path(__file__).parents[3] / "shared" / "data" / "traces"
DATA = Path(os.environ.get("LOADWISE_TRACES", BESIDE))
"""A folder with public traces as parquet files; they are too large to lie here."""


def draw(**kind: object) -> Draw:
    return msgspec.convert(kind, Draw)


@pytest.mark.parametrize(
    ("one", "mean"),
    [
        (draw(gamma={"shape": 2.5, "mean": 150}), 150.0),
        (draw(pareto={"least": 20, "alpha": 3}), 30.0),
        (draw(mixture=[{"weight": 3, "draw": {"constant": 1}}, {"weight": 1, "draw": {"exponential": 9}}]), 3.0),
    ],
)
def test_new_distributions_have_their_means(one: Draw, mean: float) -> None:
    """Twenty thousand values, within four standard errors; scaling scales, and bounds hold after scaling."""
    rng = np.random.default_rng(0)
    values = [one.sample(rng) for _ in range(20_000)]
    error = float(np.std(values) / math.sqrt(len(values)))
    assert abs(float(np.mean(values)) - mean) < 4 * error
    assert float(np.mean([scaled(one, 2.0, rng) for _ in range(20_000)])) == pytest.approx(2 * mean, rel=0.1)
    bounded = msgspec.structs.replace(one, max=5.0)
    assert max(scaled(bounded, 100.0, rng) for _ in range(100)) == 5.0


@pytest.mark.parametrize(
    "bad",
    [
        {"gamma": {"shape": 0, "mean": 1}},
        {"gamma": {"shape": 1, "mean": math.nan}},
        {"pareto": {"least": 1, "alpha": -1}},
        {"mixture": [{"weight": 0, "draw": {"constant": 1}}]},
        {"mixture": [{"weight": -1, "draw": {"constant": 1}}, {"weight": 2, "draw": {"constant": 1}}]},
        {"mixture": []},
    ],
)
def test_distributions_out_of_range_are_refused(bad: dict[str, object]) -> None:
    """No shape of zero, no NaN, no weights that are none."""
    with pytest.raises(ConfigError):
        draw(**bad)


def test_joint_programs_keep_their_means_and_hang_together() -> None:
    """A shared factor leaves each mean where it was and makes long programs append and say more."""
    spec = {
        "arrivals": CLOSED,
        "turns": {"gamma": {"shape": 8, "mean": 20}},
        "growth_tokens": {"gamma": {"shape": 4, "mean": 200}},
        "output_tokens": {"gamma": {"shape": 4, "mean": 100}},
        "context_limit_tokens": 10_000_000,
    }
    joint = {"turns": 0.5, "growth_tokens": 0.4, "output_tokens": 0.4}
    tied = Workload(msgspec.convert(spec | {"joint": joint}, WorkloadSpec), Streams(1))
    free = Workload(msgspec.convert(spec, WorkloadSpec), Streams(1))
    shapes = {
        "tied": [tied.shape(i).turns for i in range(1, 2001)],
        "free": [free.shape(i).turns for i in range(1, 2001)],
    }
    found = {}
    for name, programs in shapes.items():
        turns = np.array([len(program) for program in programs], float)
        growth = np.array([np.mean([t.growth_tokens for t in program[1:]] or [200.0]) for program in programs])
        assert float(turns.mean()) == pytest.approx(20, rel=0.06)
        assert float(growth.mean()) == pytest.approx(200, rel=0.06)
        found[name] = float(np.corrcoef(turns, growth)[0, 1])
    assert abs(found["free"]) < 0.1
    assert found["tied"] > 0.4


@pytest.mark.parametrize("burstiness", [0.25, 1.0])
def test_bursts_keep_the_rate(burstiness: float) -> None:
    """Gaps of a bursty stream have the mean 1/rate and the coefficient of variation 1/sqrt(burstiness)."""
    arrivals = {"kind": "bursty", "programs_per_s": 2.0, "burstiness": burstiness}
    workload = Workload(msgspec.convert({"arrivals": arrivals}, WorkloadSpec), Streams(3))
    gaps = np.array([workload.until_next_s(i) for i in range(1, 20_001)])
    assert float(gaps.mean()) == pytest.approx(0.5, rel=0.06)
    assert float(gaps.std() / gaps.mean()) == pytest.approx(burstiness**-0.5, rel=0.06)


@pytest.mark.parametrize("name", preset_names())
def test_presets_make_programs_that_run(name: str) -> None:
    """Each shipped workload yields arrays that an engine runs whole, the same for one seed."""
    spec = preset_workload(name, CLOSED)
    programs = Workload(spec, Streams(0)).programs(6)
    again = Workload(spec, Streams(0)).programs(6)
    assert np.array_equal(programs.growth_tokens, again.growth_tokens)
    assert programs.shared_tokens == spec.shared_tokens
    log = run_by_block([VllmEngine(VllmEngineSpec())], programs, 3, max_calls=40)
    assert len(log) >= min(40, programs.n_calls)


def test_presets_are_as_their_comments_say() -> None:
    """Turns, appended tokens and answers of mini-SWE-agent in the mean; single-shot has one turn."""
    programs = Workload(preset_workload("mini-swe-agent", CLOSED), Streams(5)).programs(400)
    assert programs.n_calls / 400 == pytest.approx(50, rel=0.06)
    later = np.delete(programs.growth_tokens, programs.offsets[:-1])
    assert float(later.mean()) == pytest.approx(220, rel=0.06)
    assert float(programs.output_tokens.mean()) == pytest.approx(150, rel=0.06)
    assert Workload(preset_workload("single-shot", CLOSED), Streams(5)).programs(9).n_calls == 9


def test_presets_lie_below_what_is_said() -> None:
    """A scenario's own keys win over its preset's; an unknown preset lists the known ones."""
    text = """
scenario: 1
name: preset
n_programs: 4
pool: {models: {m: {}}, backends: [{name: a, model: m, engine: emulator, slots: 8}], router: {policy: least_loaded}}
engines: {a: {kind: vllm, hardware: {gpu: h100, model: qwen3-8b}}}
workload: {preset: mini-swe-agent, arrivals: {kind: poisson, programs_per_s: 1}, turns: 3}
"""
    scenario = parse_scenario(text)
    assert scenario.workload.turns == 3
    assert scenario.workload.shared_tokens == 4000
    report = simulate(scenario, 0)
    assert report.programs["finished"] == 4
    assert report.hit_ratio is not None
    assert report.hit_ratio > 0.7
    with pytest.raises(ConfigError, match=r"'swe' is unknown; known: mini-swe-agent, single-shot"):
        parse_scenario(text.replace("preset: mini-swe-agent", "preset: swe"))


def write(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return str(path)


ROW = {"arrival_s": 0.0, "input_tokens": 100, "output_tokens": 10}


def test_a_trace_of_calls_is_replayed(tmp_path: Path) -> None:
    """Arrivals, lengths and common prefixes are those of the file, stretched if asked; the run ends with the trace."""
    rows = [
        ROW | {"input_tokens": 1100, "hash_ids": [0, 1, 2]},
        ROW | {"arrival_s": 2.0, "input_tokens": 1100, "hash_ids": [0, 1, 7]},
        ROW | {"arrival_s": 4.0, "input_tokens": 600, "hash_ids": [9, 1]},
    ]
    path = write(tmp_path / "calls.jsonl", rows)
    text = f"""
scenario: 1
name: trace
pool:
  models: {{m: {{}}}}
  backends: [{{name: a, model: m, engine: emulator, slots: 8}}]
  router: {{policy: least_loaded}}
engines: {{a: {{kind: vllm}}}}
workload: {{arrivals: {{kind: trace, path: "{path}", time_ratio: 3}}}}
"""
    report = simulate(parse_scenario(text), 0)
    assert report.programs == {"finished": 3, "open": 0}
    assert report.prompt_tokens == 2800
    assert report.hit_ratio == pytest.approx(1024 / 2800)
    assert 12.0 < report.elapsed_s < 13.0


def test_names_of_blocks_decide_hits_not_positions() -> None:
    """A block name stands for all before it: other names at the same places hit nothing, at 784 tokens a block too."""
    engine = VllmEngine(VllmEngineSpec(block_size=784, n_state_groups=0))
    ids = [(0, 1, 2, 3), (0, 1, 2, 4), (5, 6, 7, 8)]
    asked = [
        (
            float(i),
            EngineRequest(request_id=i, program_id=f"p{i}", prompt_tokens=2048, output_tokens=1, prefix_ids=names),
        )
        for i, names in enumerate(ids)
    ]
    seen = drive(engine, asked)
    # 1,536 common tokens hold one whole block of 784.
    assert [seen[i].cached_tokens for i in range(3)] == [0, 784, 0]


def test_sessions_become_programs(tmp_path: Path) -> None:
    """Growth, gaps after service, and what an edited context still repeats, call by call."""
    calls = [
        ROW | {"session": "a", "service_s": 1.5},
        ROW | {"session": "b", "arrival_s": 0.5, "service_s": 0.1},
        ROW | {"session": "a", "arrival_s": 3.0, "input_tokens": 150, "service_s": 1.0},
        ROW | {"session": "a", "arrival_s": 3.5, "input_tokens": 155},
    ]
    programs = read_trace(write(tmp_path / "sessions.jsonl", calls))
    assert [program.arrives_at_s for program in programs] == [0.0, 0.5]
    assert programs[0].turns == (
        (100, 10, 0.0, None, ()),
        (40, 10, 1.5, None, ()),
        (-5, 10, 0.0, 150, ()),
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"input_tokens": None}, "row 1: input_tokens is missing"),
        ({"input_tokens": 0}, "row 1: input_tokens is 0"),
        ({"output_tokens": -3}, "row 1: output_tokens is -3"),
        ({"arrival_s": -1.0}, "row 1: arrival_s is -1.0"),
        ({"arrival_s": "soon"}, "row 1: arrival_s is 'soon'"),
        ({"input_tokens": True}, "row 1: input_tokens is True"),
        ({"arrival_s": 1.0}, "row 2: arrival_s is 0.5, before the last row's 1.0"),
        ({"session": "a"}, "row 0: session is missing"),
        ({"service_s": -1.0}, "row 1: service_s is -1.0"),
        ({"hash_ids": [-1]}, "row 1: hash_ids has -1"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, change: dict[str, object], named: str) -> None:
    """Holes, numbers out of range and arrivals out of order: file, row, column and value."""
    path = write(tmp_path / "bad.jsonl", [ROW, ROW | {"arrival_s": 0.2} | change, ROW | {"arrival_s": 0.5}])
    with pytest.raises(ConfigError, match=r"bad\.jsonl") as caught:
        read_trace(path)
    assert named in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"not json", b"\xff\xfe", b"[1]"])
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    """Empty, no JSON, no text, no rows."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="trace"):
        read_trace(str(path))
    with pytest.raises(ConfigError, match="trace"):
        read_trace(str(tmp_path / "absent.parquet"))


@pytest.mark.parametrize(
    ("name", "n_programs", "n_calls"),
    [("azure_conv_2023", 19_366, 19_366), ("mooncake_conversation", 12_031, 12_031), ("tau2_agent_steps", 80, 700)],
)
def test_public_traces_are_read_whole(name: str, n_programs: int, n_calls: int) -> None:
    """Every row of a trace is a turn."""
    path = DATA / f"{name}.parquet"
    if not path.exists():
        pytest.skip(f"{path} is not there; LOADWISE_TRACES names a folder of traces")
    pytest.importorskip("pyarrow")
    programs = read_trace(str(path))
    assert len(programs) == n_programs
    assert sum(len(program.turns) for program in programs) == n_calls
