"""Scenario files: strict reading, clear refusals, and the draws in them."""

import contextlib
import math
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.streams import Streams
from loadwise.sim.api_engine import ApiEngineSpec
from loadwise.sim.draw import Draw, Pareto, sample, sample_count, sample_seconds
from loadwise.sim.hardware import HardwareSpec
from loadwise.sim.report import percentile
from loadwise.sim.scenario import Scenario, load_scenario, parse_scenario
from loadwise.sim.servers_engine import ServersEngineSpec
from loadwise.sim.simple_engine import SimpleEngineSpec
from loadwise.sim.step_time import StepCost
from loadwise.sim.truth import Truth, TruthSpec
from loadwise.sim.vllm_engine import VllmEngineSpec
from loadwise.sim.workload import MAX_TURNS, Bursty, Closed, Joint, Poisson, Trace, Workload, WorkloadSpec, pick

ROOT = Path(__file__).parents[2]
GOOD = """
scenario: 1
name: x
n_programs: 3
pool:
  models: {m: {}}
  backends: [{name: a, model: m}]
engines:
  a: {kind: servers, n_servers: 3}
workload:
  arrivals: {kind: poisson, programs_per_s: 1}
"""


def test_good_file_is_read_with_defaults() -> None:
    """The smallest file: engines by kind, defaults elsewhere."""
    world = parse_scenario(GOOD)
    assert world.engines["a"] == ServersEngineSpec(n_servers=3)
    assert world.backends[0].name == "a"
    assert world.workload.arrivals == Poisson(programs_per_s=1.0)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("scenario: 1", "scenario: 2", "scenario is 2"),
        ("scenario: 1\n", "\n", "scenario is None"),
        ("scenario: 1", "scenario: true", "scenario is True"),
        ("n_programs: 3", "n_program: 3", "valid keys:.*n_programs"),
        ("n_servers: 3", "server: 3", "valid keys:.*n_servers"),
        ("programs_per_s: 1", "rate: 1", "valid keys:.*programs_per_s"),
        ("n_programs: 3\n", "", "n_programs or until_s"),
        ("n_programs: 3", "n_programs: 0", "n_programs is 0"),
        ("models: {m: {}}", "models: {m: {}}\n  polcy: 3", "unknown key .polcy."),
        ("n_programs: 3", "n_programs: three", "n_programs"),
        ("n_programs: 3", "until_s: .nan", "until_s is nan"),
        ("n_programs: 3", "until_s: -1", "until_s is -1"),
        ("programs_per_s: 1", "programs_per_s: 0", "programs_per_s is 0"),
        ("programs_per_s: 1", "programs_per_s: .inf", "programs_per_s is inf"),
        ("kind: poisson", "kind: weibull", "weibull"),
        ("a: {kind: servers", "zz: {kind: servers", "'zz' is not in the pool"),
        ("n_servers: 3", "n_servers: 0", "n_servers is 0"),
        ("models: {m: {}}", "models: {}", "models is empty"),
        ("{name: a, model: m}", "{name: a, model: m, speed: 3}", "pool.*unknown key .speed.; valid keys"),
        ("backends: [{name: a, model: m}]", "backends: []", "backends is empty"),
        ("name: x", "name: x\nname: y", "written twice"),
        ("name: x", "name: [x", "not valid YAML"),
        ("name: x", "name: x\ntruth: {success: {q: {'*': 1}}}", "truth knows 'q'"),
        ("name: x", "name: x\ntruth: {success: {m: {'*': 1.5}}}", "1.5.*in \\[0, 1\\]"),
        ("name: x", "name: x\nverdicts: {loss_ratio: 2}", "loss_ratio is 2"),
        ("name: x", "name: x\nverdicts: {delay_s: {normal: 2}}", "valid keys:.*lognormal"),
        ("name: x", "name: x\nverdicts: {delay_s: {uniform: [3, 1]}}", "must not exceed"),
        ("name: x", "name: x\nfailures: [{at_s: 1, backend: q, kind: crash}]", "'q' is not in the pool"),
        (
            "name: x",
            "name: x\nfailures: [{at_s: 1, backend: a, kind: crash}, {at_s: 9, backend: a, kind: slow}]",
            "overlap",
        ),
    ],
)
def test_bad_files_are_refused_by_name(old: str, new: str, says: str) -> None:
    """Each mistake is a ConfigError that names the thing, the value and the limit or the valid keys."""
    assert old in GOOD
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        parse_scenario(GOOD.replace(old, new, 1))


@pytest.mark.parametrize("text", ["", "- 1\n", "3", "\0", "a: *b", "[" * 3000])
def test_what_is_no_mapping_is_refused(text: str) -> None:
    """Empty, list, scalar, binary, dangling alias, absurd nesting: a ConfigError, never another exception."""
    with pytest.raises(ConfigError):
        parse_scenario(text)


@given(st.text(max_size=200))
def test_no_text_breaks_the_reader(text: str) -> None:
    """Any text is either a scenario or a ConfigError."""
    with contextlib.suppress(ConfigError):
        parse_scenario(text)


def test_missing_file_is_a_config_error(tmp_path: Path) -> None:
    """A path that is not there, and one that is no text."""
    with pytest.raises(ConfigError, match="cannot be read"):
        load_scenario(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_scenario(tmp_path / "binary.yaml")


def test_format_document_names_every_field() -> None:
    """docs/formats/scenario.md mentions every key of every part of the format."""
    text = (ROOT / "docs" / "formats" / "scenario.md").read_text(encoding="utf-8")
    parts = [
        Scenario,
        WorkloadSpec,
        Poisson,
        Bursty,
        Closed,
        Trace,
        Joint,
        TruthSpec,
        SimpleEngineSpec,
        ServersEngineSpec,
    ]
    parts += [VllmEngineSpec, ApiEngineSpec, HardwareSpec, StepCost, Draw]
    parts += [type(getattr(parse_scenario(GOOD), name)) for name in ("verdicts", "signals", "selector")]
    from loadwise.sim.scenario import Failure

    for part in [*parts, Failure]:
        for name in part.__struct_fields__:
            assert f"`{name}`" in text, f"{part.__name__}.{name} is not described"


def test_format_document_sample_is_valid() -> None:
    """The document's own sample parses."""
    text = (ROOT / "docs" / "formats" / "scenario.md").read_text(encoding="utf-8")
    sample_text = text.split("```yaml\n", 1)[1].split("```", 1)[0]
    assert isinstance(parse_scenario(sample_text), Scenario)


@pytest.mark.parametrize(
    ("draw", "mean"),
    [
        ({"constant": 3.0}, 3.0),
        ({"uniform": [1.0, 5.0]}, 3.0),
        ({"exponential": 2.0}, 2.0),
        ({"geometric": 4.0}, 4.0),
        ({"choice": [1.0, 2.0, 6.0]}, 3.0),
        ({"lognormal": {"median": 10.0, "sigma": 0.5}}, 10.0 * math.exp(0.125)),
        ({"uniform": [0.0, 10.0], "min": 5.0}, 6.25),
        ({"uniform": [0.0, 10.0], "max": 5.0}, 3.75),
    ],
)
def test_draws_have_their_means(draw: dict[str, object], mean: float) -> None:
    """Each distribution's sample mean lies near its stated one, clipped where told."""
    one, rng = msgspec.convert(draw, Draw), Streams(1).at("x", 0)
    assert sum(one.sample(rng) for _ in range(20_000)) / 20_000 == pytest.approx(mean, rel=0.04)


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"constant": 1.0, "exponential": 1.0},
        {"constant": math.nan},
        {"exponential": -1.0},
        {"geometric": 0.5},
        {"choice": []},
        {"lognormal": {"median": 0.0, "sigma": 1.0}},
        {"constant": 1.0, "min": 2.0, "max": 1.0},
        {"constant": 1.0, "max": math.inf},
    ],
)
def test_draws_out_of_range_are_refused(bad: dict[str, object]) -> None:
    """No, two or impossible distributions are errors when the file is read, not when it runs."""
    with pytest.raises(ConfigError):
        msgspec.convert(bad, Draw)


def test_numbers_are_quantities_and_counts_are_bounded() -> None:
    """A bare number is itself; seconds are never negative; counts keep within their limits."""
    rng = Streams(1).at("x", 0)
    assert sample(2.5, rng) == 2.5
    assert sample_seconds(-3.0, rng) == 0.0
    assert sample_count(-3.0, rng, least=1) == 1
    assert sample_count(1e12, rng, least=1, most=7) == 7


def test_contexts_stay_below_their_limit() -> None:
    """A program says its last turn before its context would pass the limit."""
    spec = WorkloadSpec(
        arrivals=Poisson(programs_per_s=1.0),
        turns=1e9,
        first_prompt_tokens=Draw(choice=[10.0, 99_999.0]),
        output_tokens=500.0,
        context_limit_tokens=20_000,
    )
    workload = Workload(spec, Streams(4))
    for number in range(1, 20):
        turns = workload.shape(number).turns
        assert 1 <= len(turns) <= MAX_TURNS
        assert sum(t.growth_tokens + t.output_tokens for t in turns) <= 20_000


def test_weights_are_kept() -> None:
    """Names come in the shares of their weights; a weight of zero never comes."""
    rng = Streams(1).at("x", 0)
    names = [pick({"a": 3.0, "b": 0.0, "c": 1.0}, rng) for _ in range(4000)]
    assert names.count("a") / 4000 == pytest.approx(0.75, abs=0.03)
    assert "b" not in names
    assert pick({}, rng) is None


@pytest.mark.parametrize("weights", [{"a": -1.0}, {"a": 0.0}, {"a": math.nan}])
def test_bad_weights_are_refused(weights: dict[str, float]) -> None:
    """Negative, all-zero and non-finite weights are errors."""
    with pytest.raises(ConfigError, match="weight"):
        WorkloadSpec(arrivals=Poisson(programs_per_s=1.0), task_types=weights)


def test_truth_knows_its_table() -> None:
    """An entry, the star, an unknown task type without a star, an unknown model; verbosity with its limit."""
    spec = TruthSpec(success={"m": {"x": 0.25, "*": 0.5}, "n": {"x": 1.0}}, output_ratio={"m": 2.0})
    truth = Truth(spec, Streams(1))
    workload = Workload(WorkloadSpec(arrivals=Poisson(programs_per_s=1.0), task_types={"x": 1.0}), Streams(1))
    x = workload.shape(1)
    y = type(x)(2, "y", None, x.turns)
    assert [truth.success_probability(m, p) for m, p in (("m", x), ("m", y), ("n", y), ("q", x))] == [
        0.25,
        0.5,
        0.0,
        1.0,
    ]
    assert truth.output_tokens("m", 100, None) == 200
    assert truth.output_tokens("m", 100, 150) == 150
    assert truth.output_tokens("n", 100, None) == 100
    solved = sum(truth.is_solved("m", type(x)(n, "x", None, x.turns)) for n in range(4000))
    assert solved / 4000 == pytest.approx(0.25, abs=0.03)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_percentile_is_nearest_rank(values: list[float], ratio: float) -> None:
    """At least `ratio` of the values do not exceed it, and fewer would not do."""
    found = percentile(values, ratio)
    n = len(values)
    assert found in values
    assert sum(v <= found for v in values) >= ratio * n - 1e-9
    assert sum(v < found for v in values) < ratio * n + 1e-9


def test_examples_are_valid_yaml_with_pools() -> None:
    """Every example loads and its pool is a plain mapping."""
    for path in (ROOT / "examples" / "scenarios").glob("*.yaml"):
        assert load_scenario(path).pool == yaml.safe_load(path.read_text(encoding="utf-8"))["pool"]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("n_programs: 3", f"n_programs: {10**30}", "n_programs"),
        ("n_programs: 3", "n_programs: 10000001", "n_programs"),
        ("n_programs: 3", "until_s: 1.0e+30", "until_s"),
        ("n_programs: 3", "n_programs: 3\nmax_events: 1000000001", "max_events"),
        ("n_programs: 3", "n_programs: 3\nstall_limit_s: 1.0e+10", "stall_limit_s"),
        ("n_programs: 3", "n_programs: 3\nsignals: {every_s: 1.0e-300}", "every_s"),
        ("n_programs: 3", "n_programs: 3\nsignals: {delay_s: 1.0e+300}", "delay_s"),
        ("n_programs: 3", "n_programs: 3\nverdicts: {delay_s: .inf}", "delay_s"),
        ("n_programs: 3", "n_programs: 3\nverdicts: {delay_s: {exponential: 1.0e+308}}", "exponential"),
        ("n_programs: 3", "n_programs: 3\nselector: {delay_s: .nan}", "delay_s"),
        ("programs_per_s: 1", "programs_per_s: 1.0e-300", "programs_per_s"),
        ("programs_per_s: 1", "programs_per_s: 1.0e+300", "programs_per_s"),
        ("kind: poisson, programs_per_s: 1", "kind: closed, n_agents: 1000001", "n_agents"),
        ("kind: poisson, programs_per_s: 1", "kind: closed, n_agents: 1, think_s: .nan", "think_s"),
        ("programs_per_s: 1}", "programs_per_s: 1}\n  growth_tokens: .inf", "growth_tokens"),
        ("programs_per_s: 1}", "programs_per_s: 1}\n  growth_tokens: .nan", "growth_tokens"),
        ("programs_per_s: 1}", "programs_per_s: 1}\n  first_prompt_tokens: .nan", "first_prompt_tokens"),
        (
            "programs_per_s: 1}",
            "programs_per_s: 1}\n  tool_s: {lognormal: {median: 1, sigma: 1.0e+30}}",
            "sigma|lognormal",
        ),
        ("programs_per_s: 1}", "programs_per_s: 1}\n  tool_s: {lognormal: {median: 1, sigma: 21}}", "lognormal sigma"),
        ("programs_per_s: 1}", "programs_per_s: 1}\n  tool_s: {pareto: {least: 1, alpha: 1.0e-9}}", "pareto alpha"),
        ("programs_per_s: 1}", "programs_per_s: 1}\n  shared_tokens: 10000001", "shared_tokens"),
        ("kind: servers, n_servers: 3", "kind: simple, prefill_tokens_per_s: 1.0e-300", "prefill_tokens_per_s"),
        ("kind: servers, n_servers: 3", "kind: simple, decode_steps_per_s: 1.0e+300", "decode_steps_per_s"),
        ("kind: servers, n_servers: 3", "kind: api, tokens_per_s: 1.0e-300", "tokens_per_s"),
        ("kind: servers, n_servers: 3", "kind: servers, mean_service_s: 1.0e+300", "mean_service_s"),
        ("kind: servers, n_servers: 3", "kind: vllm, num_gpu_blocks: 10000001", "num_gpu_blocks"),
        ("kind: servers, n_servers: 3", "kind: vllm, step: {kv_s_per_token: 1.0e+300}", "kv_s_per_token"),
        ("name: x", 'name: "\\ud800"', "surrogate"),
    ],
)
def test_numbers_with_which_a_run_would_not_end_are_refused_by_name(old: str, new: str, says: str) -> None:
    """Every number of a scenario has bounds on both sides, so that time passes and products stay finite (law L15)."""
    assert GOOD.count(old) == 1
    with pytest.raises(ConfigError, match=says):
        parse_scenario(GOOD.replace(old, new))


def test_a_duration_is_never_longer_than_its_bound() -> None:
    """The tail of a permitted distribution is cut, so that no instant becomes infinite."""
    rng = Streams(1).at("x", 1)
    wild = Draw(pareto=Pareto(least=1e9, alpha=0.1))
    assert {sample_seconds(wild, rng) for _ in range(20)} == {1e9}
