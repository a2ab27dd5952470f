"""Bad scenarios and traces: one clean error that names file, field and value; and no world that goes on without end."""

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadwise.kernel.commands import Command, EndTurn
from loadwise.kernel.errors import ConfigError, LawBroken
from loadwise.kernel.events import Event, TurnArrived
from loadwise.kernel.work import TurnOutcome
from loadwise.sim.scenario import Scenario, convert_scenario, load_scenario, most_tokens_of, parse_scenario
from loadwise.sim.simulate import simulate
from loadwise.sim.vllm_engine import VllmEngineSpec

from .direct_machine import DirectMachine

Path_ = tuple[str | int, ...]

WHOLE: dict[str, Any] = yaml.safe_load("""
scenario: 1
name: whole
n_programs: 3
until_s: 1000
max_events: 100000
stall_limit_s: 100
pool:
  models: {m: {usd_per_million: {input: 1, output: 2}}, n: {}}
  backends:
    - {name: a, model: m, slots: 2}
    - {name: b, model: n, kv_tokens: 10000}
    - {name: c, model: n}
    - {name: d, model: n}
  router: {policy: {name: linucb, alpha: 0.5}, hold_max_s: 10}
  task_types: {t: {examples: [a]}}
engines:
  a: {kind: simple, slots: 2}
  b: {kind: vllm, hardware: {gpu: h100, model: qwen3-8b, n_gpus: 1}, step: {fixed_s: 0.1}, num_gpu_blocks: 500}
  c: {kind: api, requests_per_minute: 3}
  d: {kind: servers, n_servers: 2, mean_service_s: 1}
workload:
  arrivals: {kind: closed, n_agents: 2, think_s: {exponential: 1}}
  task_types: {t: 1}
  domains: {d: 1}
  turns: {geometric: 2, max: 4}
  first_prompt_tokens: {lognormal: {median: 100, sigma: 0.2}}
  output_tokens: {mixture: [{weight: 1, draw: {constant: 4}}, {weight: 2, draw: {uniform: [1, 5]}}]}
  tool_s: {pareto: {least: 1, alpha: 2}, max: 10}
  joint: {turns: 0.3}
truth: {success: {m: {"*": 0.5}}, output_ratio: {n: 2}}
verdicts: {source: agent, delay_s: {gamma: {shape: 2, mean: 3}}, loss_ratio: 0.1}
signals: {every_s: 1, delay_s: 0.1}
selector: {answers: uniform}
failures: [{at_s: 1, backend: a, kind: crash, for_s: 2}]
""")


@pytest.mark.parametrize(
    "engine",
    [
        {"kind": "simple", "prefill_chunk_tokens": 1, "prefill_tokens_per_s": 1e7, "decode_steps_per_s": 1e7},
        {"kind": "vllm", "step": {"fixed_s": 1e-8, "weights_s": 0, "request_s": 0, "gemm_s_per_token": 1e-9}},
        {"kind": "servers", "mean_service_s": 1e-8},
        {"kind": "api", "tokens_per_s": 1e9, "first_token_s": 1e-9},
    ],
)
def test_steps_shorter_than_the_clocks_last_bit_end(engine: dict[str, Any]) -> None:
    """Months into a run a step is less than what the clock can tell apart; each moves it all the same."""
    document: dict[str, Any] = {
        "scenario": 1,
        "name": "late",
        "n_programs": 3,
        "pool": {"models": {"m": {}}, "backends": [{"name": "a", "model": "m"}], "router": {"policy": "round_robin"}},
        "engines": {"a": engine},
        "workload": {"arrivals": {"kind": "closed", "n_agents": 1, "stagger_s": 9e8}, "turns": 4, "tool_s": 0},
        "signals": {"every_s": 0},
    }
    report = simulate(convert_scenario(document), 1)
    assert report.programs == {"finished": 3, "open": 0}


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (
            {"workload": {"output_tokens": {"lognormal": {"median": -1, "sigma": 1}}}},
            "workload.output_tokens: lognormal",
        ),
        (
            {"workload": {"tool_s": {"mixture": [{"weight": 1, "draw": {"uniform": [2, 1]}}]}}},
            "tool_s.mixture.0.draw: ",
        ),
        ({"engines": {"a": {"kind": "vllm", "max_num_seqs": 0}}}, "engines.a: engine max_num_seqs is 0"),
        (
            {"engines": {"a": {"kind": "vllm", "hardware": {"gpu": "x", "model": "qwen3-8b"}}}},
            "engines.a.hardware: gpu",
        ),
        ({"failures": [{"at_s": -1, "backend": "a", "kind": "hang"}]}, "failures.0: failure at_s is -1"),
        ({"verdicts": {"delay_s": {}}}, "verdicts.delay_s: a distribution names exactly one"),
        ({"n_programs": -1}, "x.yaml: n_programs is -1"),
    ],
)
def test_a_refused_value_is_named_with_its_place(change: dict[str, Any], place: str) -> None:
    """Not only what is wrong with a distribution or an engine, but which of them it is."""
    document: dict[str, Any] = {
        "scenario": 1,
        "name": "x",
        "n_programs": 1,
        "pool": {"models": {"m": {}}, "backends": [{"name": "a", "model": "m"}]},
        "workload": {"arrivals": {"kind": "closed", "n_agents": 1}},
    }
    for key, value in change.items():
        document[key] = document[key] | value if key == "workload" else value
    with pytest.raises(ConfigError) as error:
        convert_scenario(document, "x.yaml")
    assert place in error.value.message


def changed(path: Path_, value: Any) -> dict[str, Any]:
    """The whole scenario with one value put in."""
    document = copy.deepcopy(WHOLE)
    place: Any = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return document


def test_the_whole_scenario_is_good() -> None:
    """What the changes below start from runs."""
    assert simulate(convert_scenario(WHOLE), 0).programs["open"] == 0


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        # An unknown key.
        (("unknown",), 1, "unknown"),
        (("workload", "tools_s"), 1, "tools_s"),
        (("engines", "b", "blocks"), 1, "blocks"),
        (("pool", "router", "polcy"), "x", "polcy"),
        # Zero capacity.
        (("engines", "a", "slots"), 0, "slots"),
        (("engines", "b", "num_gpu_blocks"), 0, "num_gpu_blocks"),
        (("engines", "b", "max_num_seqs"), 0, "max_num_seqs"),
        (("engines", "c", "requests_per_minute"), 0, "requests_per_minute"),
        (("engines", "d", "n_servers"), 0, "n_servers"),
        (("pool", "backends", 0, "slots"), 0, "slots"),
        (("pool", "backends", 1, "kv_tokens"), 0, "kv_tokens"),
        (("workload", "arrivals", "n_agents"), 0, "n_agents"),
        # Negative times, and times that are no numbers.
        (("until_s",), -1.0, "until_s"),
        (("until_s",), NAN, "until_s"),
        (("stall_limit_s",), INF, "stall_limit_s"),
        (("failures", 0, "at_s"), -1.0, "at_s"),
        (("failures", 0, "for_s"), NAN, "for_s"),
        (("signals", "every_s"), -1.0, "every_s"),
        (("signals", "delay_s"), NAN, "delay_s"),
        (("engines", "b", "step", "fixed_s"), -0.5, "fixed_s"),
        (("engines", "b", "step", "fixed_s"), NAN, "fixed_s"),
        (("engines", "d", "mean_service_s"), -2.0, "mean_service_s"),
        (("pool", "router", "hold_max_s"), NAN, "hold_max_s"),
        (("workload", "tool_s"), NAN, "tool_s"),
        (("workload", "arrivals"), {"kind": "poisson", "programs_per_s": NAN}, "programs_per_s"),
        # A wrong type, at any depth.
        (("n_programs",), "many", "n_programs"),
        (("workload", "arrivals", "n_agents"), 2.5, "n_agents"),
        (("failures", 0, "at_s"), "soon", "at_s"),
        (("engines", "b", "step", "fixed_s"), "slow", "fixed_s"),
        # A request that can never fit.
        (("workload", "first_prompt_tokens"), 300_000, "first_prompt_tokens"),
    ],
)
def test_file_field_and_value_are_named(path: Path_, value: Any, field: str, tmp_path: Path) -> None:
    """The error says which file, which key, and what stands there."""
    document = changed(path, value)
    if field == "first_prompt_tokens":
        document["engines"]["d"] = {"kind": "simple"}
        document["workload"]["context_limit_tokens"] = 1_000_000
    file = tmp_path / "scenario.yaml"
    file.write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigError) as error:
        load_scenario(file)
    message = error.value.message
    assert str(file) in message
    assert field in message
    if "unknown field" not in message and "unknown key" not in message:
        shown = value if not isinstance(value, dict) else list(value.values())[-1]
        assert f"{shown:g}" in message if isinstance(shown, float) else str(shown) in message


@pytest.mark.parametrize(
    ("quantity", "fits"),
    [
        (9000, False),
        ({"uniform": [8002, 9000]}, False),
        ({"choice": [8002, 9000]}, False),
        ({"pareto": {"least": 8002, "alpha": 2}}, False),
        ({"lognormal": {"median": 10, "sigma": 1}, "min": 8002}, False),
        ({"mixture": [{"weight": 1, "draw": {"constant": 9000}}, {"weight": 1, "draw": {"constant": 8500}}]}, False),
        ({"uniform": [8, 9000]}, True),
        ({"lognormal": {"median": 9000, "sigma": 1}}, True),
        ({"mixture": [{"weight": 1, "draw": {"constant": 9000}}, {"weight": 1, "draw": {"constant": 85}}]}, True),
    ],
)
def test_prompts_that_never_fit_are_told_from_those_that_may(quantity: Any, fits: bool) -> None:
    """A quantity is refused if its least value fits no engine; what fits sometimes is a workload like any other."""
    document = changed(("workload", "first_prompt_tokens"), quantity)
    document["pool"]["backends"] = [{"name": "b", "model": "n"}]
    document |= {"engines": {"b": WHOLE["engines"]["b"]}, "failures": []}
    if fits:
        convert_scenario(document)
    else:
        with pytest.raises(ConfigError, match="the largest engine takes 8001"):
            convert_scenario(document)


def test_the_largest_request_of_an_engine_is_taken() -> None:
    """The bound that scenarios are checked by is the engine's own: one token less runs, one more is refused."""
    spec = VllmEngineSpec(num_gpu_blocks=20, block_size=8, n_state_groups=3)
    assert most_tokens_of(spec) == 14 * 8 + 1
    document = changed(("workload", "first_prompt_tokens"), 112)
    document["workload"] |= {"output_tokens": 1, "turns": 1, "joint": {}}
    document["truth"] = {}
    document["pool"]["backends"] = [{"name": "b", "model": "n"}]
    document |= {"failures": [], "engines": {"b": {"kind": "vllm", "num_gpu_blocks": 20, "block_size": 8}}}
    document["engines"]["b"]["n_state_groups"] = 3
    assert simulate(convert_scenario(document), 0).programs["finished"] == 3
    document["workload"]["first_prompt_tokens"] = 113
    with pytest.raises(ConfigError, match="113"):
        convert_scenario(document)


ROW = {"arrival_s": 1.0, "input_tokens": 10, "output_tokens": 5}


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([ROW, {**ROW, "arrival_s": 0.5}], ("row 1", "arrival_s", "0.5")),
        ([ROW, {**ROW, "arrival_s": -1.0}], ("row 1", "arrival_s", "-1.0")),
        ([ROW, {**ROW, "arrival_s": None}], ("row 1", "arrival_s", "missing")),
        ([ROW, {"arrival_s": 2.0, "input_tokens": 10}], ("row 1", "output_tokens", "missing")),
        ([ROW, {**ROW, "input_tokens": 0}], ("row 1", "input_tokens", "0")),
        ([ROW, {**ROW, "input_tokens": "ten"}], ("row 1", "input_tokens", "'ten'")),
        ([ROW, {**ROW, "input_tokens": 10.5}], ("row 1", "input_tokens", "10.5")),
        ([ROW, {**ROW, "service_s": -1.0}], ("row 1", "service_s", "-1.0")),
        ([ROW, {**ROW, "service_s": "long"}], ("row 1", "service_s", "'long'")),
        ([ROW, {**ROW, "hash_ids": [-1]}], ("row 1", "hash_ids", "-1")),
        ([ROW, {**ROW, "arrival_s": math.nan}], ("row 1", "arrival_s", "is nan")),
        ([ROW, {**ROW, "arrival_s": math.inf}], ("row 1", "arrival_s", "is inf")),
        ([ROW, {**ROW, "input_tokens": 10**8}], ("row 1", "input_tokens is 100000000", "[1, 10000000]")),
        ([ROW, {**ROW, "session": [1]}], ("row 1", "session", "[1]")),
        ([ROW, [1, 2]], ("row 1", "[1, 2]", "an object")),
        ([ROW, {**ROW, "hash_ids": [1] * 9}], ("row 1", "hash_ids has 9 names", "blocks of 512")),
        ([ROW, {**ROW, "hash_ids": 5}], ("row 1", "hash_ids", "5")),
        ([{**ROW, "session": "s"}, ROW], ("row 1", "session", "missing")),
        ([{**ROW, "session": "s"}, {**ROW, "session": "s", "arrival_s": 0.1}], ("row 1", "arrival_s", "0.1")),
        ([ROW, {**ROW, "input_tokens": 300_000}], ("row 1", "input_tokens", "300000")),
        ([], ("trace", "no rows", "")),
    ],
)
def test_holes_and_disorder_of_a_trace_are_named(rows: list[Any], named: tuple[str, ...], tmp_path: Path) -> None:
    """File, row, column and value; nothing is repaired."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    document = {key: WHOLE[key] for key in ("scenario", "name", "pool")}
    document["workload"] = {"arrivals": {"kind": "trace", "path": str(trace)}}
    with pytest.raises(ConfigError) as error:
        simulate(convert_scenario(document), 0)
    assert str(trace) in error.value.message
    for part in named:
        assert part in error.value.message


class Refusing(DirectMachine):
    """Rejects every turn on the spot."""

    def handle(self, event: Event) -> list[Command]:
        if isinstance(event, TurnArrived):
            return [EndTurn(turn_id=event.turn_id, outcome=TurnOutcome.REJECTED, status=503, code="x", message="no")]
        return []


def test_work_that_ends_as_it_begins_does_not_go_on_for_ever() -> None:
    """A closed loop whose programs are all rejected at once never moves the clock: the run ends with the story."""
    document = {key: WHOLE[key] for key in ("scenario", "name", "pool", "until_s")}
    document["workload"] = {"arrivals": {"kind": "closed", "n_agents": 2}}
    scenario = convert_scenario(document)
    with pytest.raises(LawBroken, match=r"clock stands still at 0.0 s; programs: \d+ rejected"):
        simulate(scenario, 0, machine=Refusing(scenario.backends))


def test_many_programs_at_one_instant_are_no_livelock() -> None:
    """Programs that are counted may all be refused at once."""
    document = {key: WHOLE[key] for key in ("scenario", "name", "pool")}
    document |= {"workload": {"arrivals": {"kind": "closed", "n_agents": 2}}, "n_programs": 5000}
    scenario = convert_scenario(document)
    report = simulate(scenario, 0, machine=Refusing(scenario.backends))
    assert report.programs["rejected"] == 5000


def paths(value: Any, at: Path_ = ()) -> Iterator[Path_]:
    """Every place of a document."""
    if at:
        yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths(inner, (*at, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from paths(inner, (*at, i))


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from([-1, 0, 10**30, 1e300, 1e-300, "nan", "poisson"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(path=st.sampled_from(list(paths(WHOLE))), value=junk)
def test_any_value_anywhere_is_taken_or_refused_cleanly(path: Path_, value: Any) -> None:
    """Junk in any place of a scenario gives a scenario or a `ConfigError` that begins with the file, never another."""
    try:
        convert_scenario(changed(path, value), "some.yaml")
    except ConfigError as error:
        assert error.message.startswith("some.yaml")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    path=st.sampled_from([p for p in paths(WHOLE) if not isinstance(WHOLE.get(str(p[0])), str)]),
    value=st.sampled_from([0, 1, 2, 7, 1000, 0.5, 1e-6, 1e6, -1, {"exponential": 5}, {"constant": 0}, None]),
)
def test_what_is_taken_runs_to_an_end(path: Path_, value: Any) -> None:
    """Any number anywhere: what the reader accepts runs within its bounds, or ends by a law; no traceback."""
    try:
        scenario = convert_scenario(changed(path, value))
    except ConfigError:
        return
    bounded = msgspec.structs.replace(
        scenario,
        n_programs=min(scenario.n_programs or 3, 5),
        until_s=min(scenario.until_s or 1e4, 1e4),
        max_events=min(scenario.max_events, 20_000),
    )
    try:
        report = simulate(bounded, 0)
    except LawBroken as broken:
        assert broken.law in ("L15", "L9")
    else:
        assert sum(report.programs.values()) <= 5


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda data: data.decode("latin1")))
def test_any_text_is_refused_cleanly(text: str) -> None:
    """No text but a scenario is one."""
    for prefix in ("", "scenario: 1\n", "scenario: 1\nname: x\nworkload: "):
        with pytest.raises(ConfigError):
            parse_scenario(prefix + text)


def test_the_found_value_is_shown_once_and_short() -> None:
    """Of a long value only the beginning is shown; where a place is not unique nothing is guessed."""
    with pytest.raises(ConfigError) as error:
        convert_scenario(changed(("n_programs",), "x" * 500))
    assert len(error.value.message) < 300
    with pytest.raises(ConfigError, match="truth"):
        convert_scenario(changed(("truth", "success", "m", "*"), "often"))
    assert isinstance(convert_scenario(WHOLE), Scenario)
