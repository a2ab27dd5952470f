"""From a pool file to a stack: strict, explicit, and the same again from a journal's header."""

import math

import msgspec
import pytest
import yaml

from loadwise import settings
from loadwise.journal.entry import digest_config
from loadwise.kernel.errors import ConfigError
from loadwise.kernel.events import Event, TurnArrived
from loadwise.kernel.stack import Stack
from loadwise.router.machine import Router
from loadwise.settings import (
    config_from_builtins,
    load_config,
    open_stack,
    parse_config,
    parse_yaml,
    preset_names,
    with_embedder,
)

DESIGN_EXAMPLE = """
models:
  qwen3.6-27b: {usd_per_million: {input: 0.32, output: 3.20}}
  qwen3.5-9b:  {usd_per_million: {input: 0.10, output: 0.15}}
backends:
  - {name: a, model: qwen3.6-27b, url: "http://10.0.0.1:8000/v1", engine: vllm}
  - {name: b, model: qwen3.5-9b,  url: "http://10.0.0.2:8000/v1", engine: vllm}
  - {name: c, model: gpt-5-mini,  url: "https://…/v1", engine: api, key_env: SOME_KEY, requests_per_minute: 500}
router: {policy: linucb, exploration: 0.6, seconds_per_point: 6}
task_types:
  patch:   {examples: [five initial requests], verifier: {kind: command, run: "…"}}
  support: {examples: […], verifier: {kind: state}}
"""


def pool(**more):
    """A small pool as a mapping."""
    return {
        "models": {"small": {}, "large": {"usd_per_million": {"input": 1.0}}},
        "backends": [{"name": "a", "model": "small"}, {"name": "b", "model": "large"}],
        **more,
    }


def refusal(mapping):
    """What is said against a configuration."""
    with pytest.raises(ConfigError) as raised:
        parse_config(mapping, where="pool.yaml")
    text = str(raised.value)
    assert text.startswith("pool.yaml"), text
    assert text.count("pool.yaml") == 1, text
    return text


def test_the_designs_example_is_a_pool_file():
    """Except that its third backend serves a model which the example leaves out."""
    said = parse_yaml(DESIGN_EXAMPLE, where="example")
    assert "'gpt-5-mini', which is not in models: qwen3.6-27b, qwen3.5-9b" in refusal(said)
    said["models"]["gpt-5-mini"] = {}
    config = parse_config(said)
    assert [backend.capacity[1] for backend in config.backends] == [256, 256, 500]
    assert config.router.policy.options["alpha"] == 0.6
    assert config.router.context.task_types == ("patch", "support")
    assert config.task_types["patch"].verifier.kind == "command"


@pytest.mark.parametrize(
    ("change", "key", "valid"),
    [
        ({"backend": []}, "backend", "backends"),
        ({"models": {"m": {"price": 1}}}, "price", "context_tokens, expected_run_s, expected_tokens, usd_per_million"),
        ({"models": {"m": {"usd_per_million": {"in": 1}}}}, "in", "cached_input, input, output"),
        ({"backends": [{"name": "a", "model": "small", "kv": 1}]}, "kv", "kv_tokens"),
        ({"router": {"polcy": "linucb"}}, "polcy", "policy"),
        ({"router": {"hold_s": 3}}, "hold_s", "hold_max_s"),
        ({"router": {"trade": {}}}, "trade", "seconds_per_point"),
        ({"router": {"reward": {}}}, "reward", "cost_weight"),
        ({"router": {"feedback": {"arms": "delayed"}}}, "arms", "arm, size"),
        ({"router": {"selector": {"link": "http://x"}}}, "link", "timeout_s, url"),
        ({"router": {"context": {"domain": []}}}, "domain", "domains"),
        ({"task_types": {"patch": {"verify": {}}}}, "verify", "false_pass, known_fail"),
        ({"task_types": {"patch": {"verifier": {"typ": "x"}}}}, "typ", "kind"),
    ],
)
def test_unknown_key_lists_the_valid_ones(change, key, valid):
    """At any depth."""
    said = refusal(pool(**change))
    assert f"unknown key {key!r}; valid keys: " in said and valid in said.split("valid keys: ")[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"models": {}}, "models is empty"),
        ({"models": {"auto": {}}}, "'auto'"),
        ({"models": {"": {}}}, "1 to 128 characters"),
        ({"models": {"m": {"usd_per_million": {"input": -1}}}}, "input is -1"),
        ({"models": {"m": {"usd_per_million": {"output": math.nan}}}}, "output is nan"),
        ({"models": {"m": {"usd_per_million": {"cached_input": math.inf}}}}, "cached_input is inf"),
        ({"models": {"m": {"usd_per_million": {"input": 1e300}}}}, "<= 1e+09"),
        ({"models": {"m": None}}, "Expected `object`, got `null`"),
        ({"models": ["m"]}, "Expected `object`, got `array`"),
        ({"models": {1: {}}}, "Expected `str`, got `int`"),
        ({"models": {f"m{n}": {} for n in range(257)}}, "models has 257 entries; 256 is the limit"),
        ({"backends": [{"name": "a", "model": "small"}] * 2}, "two backends are named 'a'"),
        ({"backends": [{"name": "a", "model": "tiny"}]}, "'tiny', which is not in models: small, large"),
        ({"backends": [{"name": "a"}]}, "missing required field `model`"),
        ({"backends": [{"name": "a", "model": "small", "slots": "4"}]}, "Expected `int | null`, got `str`"),
        ({"backends": [{"name": "a", "model": "small", "slots": 10**30}]}, "<= 1e+12"),
        ({"backends": [{"name": "a", "model": "small", "slots": 1, "kv_tokens": 5}]}, "one capacity is the limit"),
        ({"backends": [{"name": "a", "model": "small", "engine": "tgv"}]}, "Invalid enum value 'tgv'"),
        ({"backends": {"a": {}}}, "Expected `array`, got `object`"),
        ({"preset": "oracel"}, "preset 'oracel' is unknown; known: "),
        ({"preset": ["loadwise"]}, "preset ['loadwise'] is unknown"),
        ({"router": "linucb"}, "router is 'linucb'; it must be a mapping"),
        ({"router": []}, "router is []; it must be a mapping"),
        ({"router": {"policy": 5}}, "router.policy is 5"),
        ({"router": {"policy": {"alpha": 1}}}, "must be a name, or a mapping with a name"),
        ({"router": {"policy": {"name": "linucb", "options": [1]}}}, "router.policy.options is [1]"),
        ({"router": {"policy": "linucbb"}}, "unknown policy 'linucbb'; known are "),
        ({"router": {"policy": {"name": "linucb", "alfa": 1}}}, "no option 'alfa'; it has alpha, "),
        ({"router": {"policy": {"name": "linucb", "alpha": -1}}}, "alpha is -1"),
        ({"router": {"policy": {"name": "linucb", "alpha": math.nan}}}, "alpha is nan"),
        ({"router": {"policy": {"name": "linucb", "alpha": "much"}}}, "Expected `float`, got `str`"),
        ({"router": {"policy": {"name": "mixing", "weights": {"small": 0}}}}, "at least one must be > 0"),
        ({"router": {"policy": {"name": "mixing", "weights": {"small": -1}}}}, "weights['small'] is -1"),
        ({"router": {"policy": {"name": "mixing", "weights": {"tiny": 1}}}}, "'tiny', which is not in models"),
        ({"router": {"policy": {"name": "fixed", "candidate": "tiny"}}}, "'tiny', which is not in models"),
        (
            {"router": {"admission": {"kind": "cap", "programs_max_by_model": {"tiny": 2}}}},
            "router.admission.programs_max_by_model names 'tiny', which is not in models: small, large",
        ),
        ({"router": {"policy": "no.such.module:Class"}}, "cannot be loaded"),
        ({"router": {"policy": "round_robin", "exploration": 0.6}}, "no option 'alpha'"),
        ({"router": {"replica_policy": "linucb"}}, "cannot choose without a context"),
        ({"router": {"replica_policy": "nearest"}}, "router.replica_policy: unknown policy 'nearest'"),
        ({"router": {"replica_policy": None}}, "router.replica_policy is null"),
        ({"router": {"feedback": "delaid"}}, "Invalid enum value 'delaid'"),
        ({"router": {"feedback": {"arm": "batch_sync", "size": 0}}}, "router.feedback.size is 0"),
        ({"router": {"selector": {"url": "x"}}}, "must start with http:// or https://"),
        ({"router": {"context": [1]}}, "router.context is [1]; it must be a mapping"),
        ({"router": {"context": {"n_components": 1000}}}, "n_components is 1000"),
        ({"router": {"beta": 2}}, "router.beta is 2"),
        ({"router": {"seconds_per_point": 0}}, "router.seconds_per_point is 0"),
        ({"router": {"cost_weight": 2}}, "cost_weight is 2"),
        ({"router": {"hold_max_s": "60"}}, "Expected `float`, got `str`"),
        ({"router": {"held_max": 10**30}}, "router.held_max is 1000000000000000000000000000000"),
        ({"router": {3: 4}}, "unknown key 3"),
        ({"task_types": []}, "Expected `object`, got `array`"),
        ({"task_types": {"": {}}}, "each must be non-empty"),
        (
            {"task_types": {"patch": {"verifier": {"kind": "magic"}}}},
            "kind 'magic' is unknown; known: external",
        ),
        ({"task_types": {"patch": {"verifier": {"timeout_s": math.nan}}}}, "verifier timeout_s is nan"),
    ],
)
def test_wrong_configuration_says_what_and_where(change, said):
    """Never a traceback of another kind, never a silent default."""
    assert said in refusal(pool(**change))


@pytest.mark.parametrize("text", ["1e-05", "1E5", "-1.5e3", "2.e+3", ".5e-3", "1.0", "6.02e+23"])
def test_numbers_as_python_and_json_write_them(text):
    """An exponent needs neither a dot nor a sign; what is no number stays text, and digits stay whole."""
    assert parse_yaml(f"a: {text}", where="text") == {"a": float(text)}
    said = parse_yaml(f"a: {text}x\nb: 17\nc: 1e\nd: e5", where="text")
    assert said == {"a": f"{text}x", "b": 17, "c": "1e", "d": "e5"}
    assert isinstance(said["b"], int)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds NoneType; it must be a mapping"),
        ("- a\n- b\n", "holds list; it must be a mapping"),
        ("models: {\n", "not valid YAML"),
        ("models: 2024-13-45\n", "not valid YAML"),
        ("a: 1\nb: 2\na: 3\n", "the key 'a' is written twice"),
        ("models: {m: {context_tokens: 1, context_tokens: 2}}\n", "the key 'context_tokens' is written twice"),
        ("{[1]: 2}\n", "not valid YAML"),
        ("a: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
        ("models: &m {x: *m}\nbackends: []\n", "pool.yaml"),
        ("models: {m: {}}\ngateway: &g {x: *g}\n", "pool.yaml"),
        ("[" * 5000, "not valid YAML"),
    ],
)
def test_file_that_is_no_pool_file(tmp_path, text, said):
    """Each is a ConfigError that names the file."""
    path = tmp_path / "pool.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    assert said in str(raised.value) and "pool.yaml" in str(raised.value)


def test_file_that_cannot_be_read(tmp_path):
    """Missing, a directory, not UTF-8."""
    (tmp_path / "latin.yaml").write_bytes(b"models: {\xe4: {}}\n")
    for name in ("none.yaml", ".", "latin.yaml"):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_config(tmp_path / name)


def test_anchors_and_merges_work():
    """A merged key may be overruled without being written twice."""
    said = parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n", where="text")
    assert said["b"] == {"x": 1, "y": 3}


# --- presets and explicit values ---


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_loads_opens_and_says_what_it_is(preset):
    """One data file each; the description is for `loadwise presets`."""
    config = parse_config(pool(preset=preset))
    stack = open_stack(config, seed=1)
    assert isinstance(stack, Stack)
    stack.check()
    assert len(settings.read_preset(preset)["description"]) > 20 and config.preset == preset


def test_presets_of_the_papers_and_ours():
    """What the issue promises of them."""
    assert {"oracle", "inframind", "deals", "loadwise", "random", "round_robin", "least_loaded", "power_of_two"} <= set(
        preset_names()
    )
    oracle, ours = (parse_config(pool(preset=name)).router for name in ("oracle", "loadwise"))
    assert oracle.policy.options["exploration_floor"] == 0.0 and oracle.budget_credit == "fail"
    assert ours.policy.options["exploration_floor"] == 0.02 and ours.budget_credit == "censor"
    assert oracle.trade.wait_weight == ours.trade.wait_weight == 0.5
    assert parse_config(pool()).preset == "loadwise"


def test_presets_of_ours_learn_alike():
    """Whoever moves along the trade keeps what was learned: other options would be another learner."""
    ours = [parse_config(pool(preset=name)).router for name in ("loadwise", "fast", "quality")]
    assert ours[0].policy == ours[1].policy == ours[2].policy


@pytest.mark.parametrize("kind", ["ledger", "cap", "pause", "none"])
def test_another_gate_needs_one_key_whatever_the_preset_says_of_its_own(kind):
    """`quality` sets keys of its gate, which others do not read."""
    assert parse_config(pool(preset="quality", router={"admission": {"kind": kind}})).router.admission.kind == kind


def test_seconds_per_point_prices_all_three_papers():
    """6 s: beta .5 at w0 = 600 s; V = 80 with 4 slots of 30 s; lambda0 = budget / 600."""
    trade = parse_config(pool(router={"seconds_per_point": 6})).router.trade
    assert trade.wait_weight == 0.5
    assert trade.backpressure_weight(slots=4, service_s=30.0) == 80.0
    assert trade.start_multiplier(budget_s=120.0) == pytest.approx(0.2)
    other = parse_config(pool(router={"seconds_per_point": 12})).router.trade
    assert other.wait_weight == pytest.approx(1 / 3)
    assert other.backpressure_weight(slots=4, service_s=30.0) == pytest.approx(160.0)


def test_explicit_prices_win():
    """Over what seconds_per_point says."""
    said = {"seconds_per_point": 12, "beta": 0.9, "backpressure": 7, "multiplier": 0.3}
    trade = parse_config(pool(router=said)).router.trade
    assert trade.wait_weight == 0.9
    assert trade.backpressure_weight(slots=4, service_s=30.0) == 7
    assert trade.start_multiplier(budget_s=120.0) == 0.3


def test_beta_of_zero_prices_no_wait():
    """Then nothing in a queue is worth any success."""
    assert parse_config(pool(router={"beta": 0})).router.trade.backpressure_weight(slots=1, service_s=1.0) == math.inf


@pytest.mark.parametrize("preset", ["oracle", "deals", "inframind"])
def test_users_seconds_per_point_wins_over_a_presets_price(preset):
    """What the preset wrote down for 6 s is derived anew for the user's value."""
    trade = parse_config(pool(preset=preset, router={"seconds_per_point": 12})).router.trade
    assert (trade.beta, trade.backpressure, trade.multiplier) == (None, None, None)
    kept = parse_config(pool(preset="oracle", router={"seconds_per_point": 12, "beta": 0.25})).router.trade
    assert kept.wait_weight == 0.25


@pytest.mark.parametrize(
    ("router", "options"),
    [
        ({"policy": "linucb"}, {"alpha": 0.6, "component_ridge": 25.0, "exploration_floor": 0.02}),
        ({"exploration": 0.3}, {"alpha": 0.3, "component_ridge": 25.0, "exploration_floor": 0.02}),
        (
            {"policy": {"name": "linucb", "alpha": 0.3}},
            {"alpha": 0.3, "component_ridge": 25.0, "exploration_floor": 0.02},
        ),
        (
            {"policy": {"name": "linucb", "options": {"alpha": 0.3, "component_ridge": 4}}},
            {"alpha": 0.3, "component_ridge": 4, "exploration_floor": 0.02},
        ),
        (
            {"policy": "linucb", "exploration_floor": 0},
            {"alpha": 0.6, "component_ridge": 25.0, "exploration_floor": 0},
        ),
        ({"policy": "lints", "exploration_floor": 0.1}, {"exploration_floor": 0.1}),
    ],
)
def test_policy_options_of_user_and_preset(router, options):
    """The preset's options stay where the user keeps its policy, and the user's win, however they are written."""
    assert parse_config(pool(router=router)).router.policy.options == options


def test_feedback_may_be_a_word():
    """`feedback: sequential` is short for its arm."""
    assert parse_config(pool(router={"feedback": "sequential"})).router.feedback.arm == "sequential"
    assert parse_config(pool(router={"feedback": {"arm": "per_slot", "size": 3}})).router.feedback.size == 3


def test_users_mapping_is_left_as_it_was():
    """Parsing has no side effects."""
    said = pool(router={"seconds_per_point": 6, "policy": {"name": "linucb", "alpha": 1.0}, "context": {"domains": []}})
    before = msgspec.json.encode(said)
    parse_config(said)
    assert msgspec.json.encode(said) == before


# --- the same again ---


def configs():
    """A configuration per preset, and one that says everything."""
    for preset in preset_names():
        yield parse_config(pool(preset=preset))
    said = parse_yaml(DESIGN_EXAMPLE, where="example")
    said["models"]["gpt-5-mini"] = {"context_tokens": 1000}
    said["gateway"] = {"port": 8080, "nested": {"a": [1, 2.5, None, True]}}
    said["router"] |= {
        "selector": {"url": "http://x"},
        "feedback": {"arm": "per_slot", "size": 4},
        "budget_s": 900,
        "cost_weight": 0.5,
        "cost_scale_usd": 2,
        "replica_policy": "round_robin",
        "context": {"domains": ["retail"]},
    }
    yield parse_config(said)


@pytest.mark.parametrize("config", list(configs()), ids=lambda config: config.preset)
def test_config_comes_back_from_a_journals_header(config):
    """Exactly, with the presets already applied, also through JSON text."""
    plain = msgspec.to_builtins(config)
    assert config_from_builtins(plain) == config
    again = config_from_builtins(msgspec.json.decode(msgspec.json.encode(plain)))
    assert again == config and msgspec.to_builtins(again) == plain


def test_digest_changes_with_what_is_said_and_not_with_its_order():
    """Sixteen digits; the same under any hash seed, since nothing in it iterates a set."""
    one, same, other = (
        digest_config(msgspec.to_builtins(parse_config(mapping)))
        for mapping in (
            pool(router={"exploration": 0.5, "hold_max_s": 10}),
            dict(reversed(pool(router={"hold_max_s": 10, "exploration": 0.5}).items())),
            pool(router={"exploration": 0.5, "hold_max_s": 11}),
        )
    )
    assert one == same != other and len(one) == 16 and int(one, 16) >= 0


@pytest.mark.parametrize("seed", [2**64, 10**30, -(2**63) - 1])
def test_seed_that_no_journal_can_hold_is_a_config_error(seed):
    """Rather than an entry that cannot be written later."""
    with pytest.raises(ConfigError, match=r"seed is .* it must be >= -2\*\*63 and < 2\*\*64"):
        open_stack(pool(), seed)
    assert open_stack(pool(), 2**64 - 1) and open_stack(pool(), -(2**63))


def test_embedder_is_part_of_the_contexts_version():
    """Another embedder, another learner; nothing else of the configuration changes."""
    config = parse_config(pool())
    with_one = with_embedder(config, "minilm-1")
    assert with_one.router.context.embedder == "minilm-1" and with_embedder(with_one, "") == config
    assert with_one.router.context.version != config.router.context.version
    learned = open_stack(with_one).machine_by_name["router"].credit.version
    assert learned != open_stack(config).machine_by_name["router"].credit.version


@pytest.mark.parametrize(
    ("preset", "chosen"), [("fixed", {"cheap"}), ("mixing", {"cheap", "dear"}), ("epsilon_greedy", None)]
)
def test_baselines_need_no_options(preset, chosen):
    """fixed means the cheapest model, mixing all of them alike."""
    said = {
        "models": {"dear": {"usd_per_million": {"input": 9}}, "cheap": {}},
        "backends": [{"name": "a", "model": "dear"}, {"name": "b", "model": "cheap"}],
        "preset": preset,
    }
    stack = open_stack(said)
    for n in range(30):
        stack.handle(TurnArrived(at_s=0.0, turn_id=n, program_id=f"p{n}"))
    models = {program.model for program in stack.machine_by_name["router"].table.by_id.values()}
    assert chosen is None or models == chosen
    named = {"fixed": {"candidate": "dear"}, "mixing": {"weights": {"dear": 1}}}.get(preset, {})
    assert open_stack({**said, "router": {"policy": {"name": preset, **named}}})


def test_open_stack_takes_a_config_a_mapping_or_a_path(tmp_path):
    """The same stack whichever way."""
    path = tmp_path / "pool.yaml"
    path.write_text(yaml.safe_dump(pool(), sort_keys=False))
    dumps = {open_stack(source, seed=3).dump() for source in (parse_config(pool()), pool(), path, str(path))}
    assert len(dumps) == 1
    router = open_stack(pool()).machine_by_name["router"]
    assert isinstance(router, Router) and set(router.heard_events) == set(Event.__args__)


@pytest.mark.parametrize("config", [None, 5, 1.5, True, [], [1], b"x", (), "no\0file", {}])
def test_what_is_no_configuration_is_a_config_error(config):
    """A stack is opened from a configuration, a mapping or a path, and nothing else becomes another error."""
    with pytest.raises(ConfigError):
        open_stack(config)


@pytest.mark.parametrize("seed", ["x", None, 1.5, True])
def test_what_is_no_whole_number_is_no_seed(seed):
    """A seed of another type is refused by name, not found out by arithmetic."""
    with pytest.raises(ConfigError, match="seed is"):
        open_stack(pool(), seed)


HALF = "\ud800"


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"models": {HALF: {}}}, "models: a key"),
        ({"models": {"m": {"usd_per_million": HALF}}}, "models: m: usd_per_million"),
        ({"backends": [{"name": "a", "model": "m", "key_env": HALF}]}, r"backends\[0\]: key_env"),
        ({"backends": [{"name": "a", "model": "m", "served_model": "x" + HALF}]}, "served_model"),
        ({"router": {"exploration": HALF}}, "router: exploration"),
        ({"router": {"policy": {"name": "mixing", "weights": {HALF: 1}}}}, "weights: a key"),
        ({"gateway": {"x": [{HALF: 1}]}}, r"gateway: x\[0\]: a key"),
        ({"zz": HALF}, "zz"),
    ],
)
def test_half_a_surrogate_pair_is_a_config_error_that_names_its_place(change, place):
    """No journal could hold it; it is found before anything tries to encode it."""
    with pytest.raises(ConfigError, match=place) as refused:
        open_stack(pool(**change))
    str(refused.value).encode()


def test_a_config_built_by_hand_is_searched_too():
    """A struct that never was YAML is held to the same."""
    config = msgspec.structs.replace(parse_config(pool()), task_types={HALF: settings.TaskTypeSpec()})
    with pytest.raises(ConfigError, match="task_types: a key"):
        open_stack(config)


def test_a_gateways_alias_that_holds_itself_is_searched_once():
    """YAML can write a list that holds itself; the search ends."""
    loop = []
    loop.append(loop)
    assert open_stack(parse_config(pool(gateway={"x": loop}))).n_events == 0
