"""From a pool file to a stack: strict, with presets laid below what the user says.

An unknown key is an error that lists the valid ones. Presets are data (`presets/*.yaml`): each is a mapping of the same
shape as a pool file, and every explicit value wins over it.
"""

import importlib
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import msgspec
import numpy as np
import yaml

from loadwise.kernel.errors import ConfigError, Error
from loadwise.kernel.fact import Fact
from loadwise.kernel.places import choices_at, value_at
from loadwise.kernel.pool import BackendSpec, ModelSpec
from loadwise.kernel.stack import Stack
from loadwise.kernel.streams import Streams
from loadwise.policy.base import Candidate, Context, Policy
from loadwise.policy.registry import PolicySpec, Resolve, is_path, make_policy, named_candidates
from loadwise.router.config import RouterConfig
from loadwise.router.lifecycle import REPORTED
from loadwise.router.machine import Router
from loadwise.router.pool import BACKENDS_MAX, MODELS_MAX
from loadwise.verify.case import Case
from loadwise.verify.debias import ErrorRates
from loadwise.verify.registry import make_verifier
from loadwise.verify.spec import VERIFIER_KINDS as VERIFIER_KINDS
from loadwise.verify.spec import VerifierSpec as VerifierSpec

_T = TypeVar("_T")

DEFAULT_PRESET = "loadwise"

SEEDS = 1 << 64
"""Seeds are below it: a journal holds no longer integer, and more bits would change nothing."""

_LIFTED = {
    "seconds_per_point": "trade",
    "beta": "trade",
    "wait_reference_s": "trade",
    "backpressure": "trade",
    "multiplier": "trade",
    "cost_weight": "reward",
    "cost_scale_usd": "reward",
    "cost_clip": "reward",
}
"""Keys that a pool file writes flat under `router:`, and the struct that holds them."""
_PRICES = ("beta", "backpressure", "multiplier")
"""What `seconds_per_point` stands for; see `TradeConfig`."""
_RENAMED = {"cost_scale_usd": "scale_usd", "cost_clip": "clip"}
_NESTED = ("admission", "divert", "order")
"""Keys whose own keys are laid over the preset's one by one."""
_POLICY_SHORTHANDS = {"exploration": "alpha", "exploration_floor": "exploration_floor"}
"""Keys under `router:` that are options of the policy."""


class QuotaSpec(Fact, frozen=True, kw_only=True):
    """What the verifier of one task type may spend in any hour; null has no bound."""

    programs_per_hour: int | None = None
    """Programs judged."""
    usd_per_hour: float | None = None

    def __post_init__(self) -> None:
        if self.programs_per_hour is not None and not 0 <= self.programs_per_hour <= 10**9:
            raise ConfigError(f"quota.programs_per_hour is {self.programs_per_hour!r}; it must be in [0, 1e9]")
        if self.usd_per_hour is not None and not 0.0 <= self.usd_per_hour <= 1e9:
            raise ConfigError(f"quota.usd_per_hour is {self.usd_per_hour!r}; it must be in [0, 1e9]")


class TaskTypeSpec(Fact, frozen=True, kw_only=True):
    """One entry under `task_types:`."""

    examples: tuple[str, ...] = ()
    verifier: VerifierSpec = VerifierSpec()
    false_pass: float = 0.0
    """Of wrong programs, the share that this verifier passes (e0)."""
    false_fail: float = 0.0
    """Of right programs, the share that it fails (e1)."""
    quota: QuotaSpec = QuotaSpec()
    references: dict[str, str] = {}
    """What would be right, by name, for every program of this type; a program's own references go before it."""
    known_pass: Case | None = None
    """A case that the verifier must pass before its verdicts are credited; its own where it ships one."""
    known_fail: Case | None = None
    unchecked: bool = False
    """Credit a verifier that has no known cases; else nothing that it says counts."""

    def __post_init__(self) -> None:
        make_verifier(self.verifier)  # a wrong option is found when the file is read, not when the first program ends
        try:
            ErrorRates(false_pass_ratio=self.false_pass, false_fail_ratio=self.false_fail)
        except ConfigError as error:
            raise ConfigError(
                error.message.replace("false_pass_ratio", "false_pass").replace("false_fail_ratio", "false_fail")
            ) from error

    @property
    def error_rates(self) -> ErrorRates | None:
        """How often the verifier is known to be wrong; None where it is taken at its word."""
        if self.false_pass == self.false_fail == 0.0:
            return None
        return ErrorRates(false_pass_ratio=self.false_pass, false_fail_ratio=self.false_fail)


class Config(Fact, frozen=True, kw_only=True):
    """A whole pool file, presets applied."""

    models: dict[str, ModelSpec]
    backends: tuple[BackendSpec, ...]
    router: RouterConfig = RouterConfig()
    task_types: dict[str, TaskTypeSpec] = {}
    preset: str = DEFAULT_PRESET
    gateway: dict[str, Any] = {}
    """Checked by the gateway, which alone knows its keys."""
    verification: dict[str, Any] = {}
    """How verifiers are run; checked by the runner, which alone knows its keys."""

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("models is empty; a pool needs at least one model")
        for what, n, limit in (
            ("models", len(self.models), MODELS_MAX),
            ("backends", len(self.backends), BACKENDS_MAX),
        ):
            if n > limit:
                raise ConfigError(f"{what} has {n} entries; {limit} is the limit")
        for name in self.models:
            if not name or len(name) > 128 or name in ("auto", "team", "mesh"):
                raise ConfigError(f"a model is named {name!r}; names have 1 to 128 characters, not auto, team or mesh")
        seen: set[str] = set()
        for backend in self.backends:
            if backend.name in seen:
                raise ConfigError(f"two backends are named {backend.name!r}; names must differ")
            seen.add(backend.name)
            if backend.model not in self.models:
                known = ", ".join(self.models)
                raise ConfigError(f"backend {backend.name!r} serves {backend.model!r}, which is not in models: {known}")
        named = [("policy", candidate) for candidate in named_candidates(self.router.policy)]
        named += [("admission.programs_max_by_model", name) for name in self.router.admission.programs_max_by_model]
        for what, name in named:
            if name not in self.models:
                raise ConfigError(f"router.{what} names {name!r}, which is not in models: {', '.join(self.models)}")

    @property
    def run_task_types(self) -> dict[str, TaskTypeSpec]:
        """Task types whose verifiers are run here; of the others somebody reports verdicts."""
        return {name: spec for name, spec in self.task_types.items() if spec.verifier.kind not in REPORTED}


def load_config(path: str | Path) -> Config:
    """Read a pool file.

    Raises:
        ConfigError: it cannot be read, is not YAML, or says something that is not allowed.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # not UTF-8, or a path that no file can have
        raise ConfigError(f"pool file {str(path)!r} cannot be read: {error}") from error
    return parse_config(parse_yaml(text, where=str(path)), where=str(path))


def parse_yaml(text: str, *, where: str) -> dict[str, Any]:
    """Parse a YAML mapping; a key that is written twice is an error."""
    loaded = parse_yaml_value(text, where=where)
    if not isinstance(loaded, dict):
        raise ConfigError(f"{where} holds {type(loaded).__name__}; it must be a mapping")
    return loaded


def parse_yaml_value(text: str, *, where: str) -> Any:
    """Parse any YAML.

    >>> parse_yaml_value("1e-05", where="--set")
    1e-05
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date like 2024-13-45 is a ValueError
        raise ConfigError(f"{where} is not valid YAML: {error}") from error


def parse_config(mapping: Mapping[str, Any], *, where: str = "config") -> Config:
    """Lay the preset below what is said, and check every key and value.

    >>> config = parse_config({"models": {"m": {}}, "backends": [{"name": "a", "model": "m"}]})
    >>> config.router.policy.name, config.router.trade.wait_weight
    ('linucb', 0.5)
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{where} is {mapping!r}; it must be a mapping")
    require_unicode(mapping, where)
    said = dict(mapping)
    preset = said.get("preset", DEFAULT_PRESET)
    if preset not in preset_names():
        raise ConfigError(f"{where}: preset {preset!r} is unknown; known: {', '.join(preset_names())}")
    laid = {key: value for key, value in read_preset(preset).items() if key != "description"}
    merged: dict[str, Any] = {**laid, **said}
    router = _merge_router(laid.get("router"), said.get("router"), where)
    merged["router"] = _shape_router(router, said.get("task_types"), where)
    merged.setdefault("backends", [])
    merged.setdefault("models", {})
    return convert(merged, Config, where=where)


def open_stack(
    config: Config | Mapping[str, Any] | str | Path,
    seed: int = 0,
    *,
    resolve: Resolve | None = None,
) -> Stack:
    """Build the stack of machines for a configuration, ready for its first event.

    Args:
        config: a `Config`, a mapping of the pool file's shape, or a path to one.
        seed: fixes all chance; equal seeds and equal events give equal commands. In [-2**63, 2**64).
        resolve: what a dotted path of the configuration leads to; None imports it (`import_class`). A configuration
            that its user wrote may name any; one that came in a journal is somebody else's word.

    Raises:
        ConfigError: what the configuration says is not allowed, or the seed is out of its range.
    """
    require_seed(seed)
    if isinstance(config, str | Path):
        config = load_config(config)
    elif isinstance(config, Config):
        require_unicode(config, "config")
    else:
        config = parse_config(config)
    verifiers = {name: spec.verifier.kind for name, spec in config.task_types.items()}
    rates = {name: found for name, spec in config.task_types.items() if (found := spec.error_rates) is not None}
    router = Router(
        config.models,
        config.backends,
        config.router,
        verifiers,
        seed,
        resolve=resolve or import_class,
        error_rates=rates,
    )
    return Stack({"router": router}, dict.fromkeys(router.heard_events, "router"))


def require_seed(seed: int) -> None:
    """Refuse what is no seed.

    Raises:
        ConfigError: it is not a whole number in [-2**63, 2**64).
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or not -SEEDS // 2 <= seed < SEEDS:
        raise ConfigError(f"seed is {seed!r}; it must be >= -2**63 and < 2**64, and whole")


def require_unicode(said: Any, where: str) -> None:
    """Refuse text that no journal could hold: YAML and JSON can write half of a surrogate pair, UTF-8 cannot.

    Raises:
        ConfigError: some key or value holds a lone surrogate; the message names its place.
    """
    seen: dict[int, Any] = {}  # a YAML alias can hold itself; what is kept here keeps its identity
    left: list[tuple[Any, str]] = [(said, where)]
    while left:
        value, place = left.pop()
        if isinstance(value, msgspec.Struct):
            value = msgspec.structs.asdict(value)
        if isinstance(value, str):
            if any("\ud800" <= char <= "\udfff" for char in value):
                raise ConfigError(f"{place} is {value!r}; it holds half of a surrogate pair, which is no character")
        elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
            seen[id(value)] = value
            if isinstance(value, Mapping):
                left += [(key, f"{place}: a key") for key in value]
                left += [(item, f"{place}: {ascii(key)[1:-1]}") for key, item in value.items()]
            else:
                left += [(item, f"{place}[{index}]") for index, item in enumerate(value)]


def with_embedder(config: Config, version: str) -> Config:
    """The configuration with the version of the embedder that its host runs.

    Components of another embedder mean something else: its version is part of the context's, so learners begin anew.
    """
    context = msgspec.structs.replace(config.router.context, embedder=version)
    return msgspec.structs.replace(config, router=msgspec.structs.replace(config.router, context=context))


def policy_classes(config: Config) -> frozenset[str]:
    """Dotted paths of users' classes that a configuration names."""
    return frozenset(spec.name for spec in (config.router.policy, config.router.replica_policy) if is_path(spec.name))


def import_class(path: str) -> Any:
    """What a dotted path names.

    Raises:
        ConfigError: it is not of the form 'package.module:Class', or there is no such thing.
    """
    module_name, _, class_name = path.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *class_name.split("."))):
        raise ConfigError(f"policy {path!r} is not of the form 'package.module:Class'")
    try:
        found: Any = importlib.import_module(module_name)
        for part in class_name.split("."):
            found = getattr(found, part)
    except Exception as error:  # importing a user's module may raise anything
        raise ConfigError(f"policy {path!r} cannot be loaded: {error}") from error
    return found


def config_from_builtins(plain: Any) -> Config:
    """Rebuild a configuration from a journal's header, presets already applied."""
    return convert(plain, Config, where="journal header")


def preset_names() -> tuple[str, ...]:
    """Every preset, sorted."""
    files = resources.files("loadwise").joinpath("presets").iterdir()
    return tuple(sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml")))


def read_preset(name: str) -> dict[str, Any]:
    """A preset's data; it has a `description` besides the keys of a pool file."""
    text = resources.files("loadwise").joinpath("presets", f"{name}.yaml").read_text(encoding="utf-8")
    return parse_yaml(text, where=f"preset {name}")


def convert(value: Any, kind: type[_T], *, where: str) -> _T:
    """Convert plain data to a strict struct; errors name the place, the value's trouble and the valid keys."""
    try:
        _check_keys(value, kind, where)
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        text = str(error)
        raise ConfigError(f"{where}: {text}{value_at(value, text)}{choices_at(kind, text)}") from error
    except RecursionError as error:  # a YAML alias can hold itself
        raise ConfigError(f"{where}: {error}") from error
    except ConfigError as error:
        raise ConfigError(error.message if error.message.startswith(where) else f"{where}: {error.message}") from error


def _merge_router(laid: Any, said: Any, where: str) -> dict[str, Any]:
    """The preset's keys below the user's; what the preset derives from a key that the user gives is derived anew."""
    laid, said = _mapping(laid, f"{where}: router"), _mapping(said, f"{where}: router")
    if "seconds_per_point" in said:
        laid = {key: value for key, value in laid.items() if key not in _PRICES}
    merged = {**laid, **said}
    for key in _NESTED:
        if key in laid:
            merged[key] = _laid_over(laid[key], said.get(key, {}))
    below = _policy(laid.get("policy"), f"{where}: router.policy")
    above = _policy(said.get("policy"), f"{where}: router.policy")
    if below and above and below["name"] == above["name"]:
        merged["policy"] = {"name": above["name"], "options": {**below["options"], **above["options"]}}
    return merged


def _laid_over(below: Any, above: Any) -> Any:
    """Mappings key by key, anything else whole."""
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    return {**below, **{key: _laid_over(below.get(key), value) for key, value in above.items()}}


def _mapping(said: Any, where: str) -> dict[Any, Any]:
    """A mapping, or nothing said at all."""
    if said is None:
        return {}
    if not isinstance(said, Mapping):
        raise ConfigError(f"{where} is {said!r}; it must be a mapping")
    return dict(said)


def _policy(said: Any, where: str) -> dict[str, Any]:
    """A policy as name and options, however it was written; empty where nothing was."""
    if said is None:
        return {}
    if isinstance(said, str):
        return {"name": said, "options": {}}
    if not isinstance(said, Mapping) or not isinstance(said.get("name"), str):
        raise ConfigError(f"{where} is {said!r}; it must be a name, or a mapping with a name and options")
    options = _mapping(said.get("options"), f"{where}.options")
    flat = {key: value for key, value in said.items() if key not in ("name", "options")}
    return {"name": said["name"], "options": {**options, **flat}}


def _shape_router(flat: dict[Any, Any], task_types: Any, where: str) -> dict[str, Any]:
    """Turn the flat mapping of a pool file into the router's own structs."""
    router: dict[Any, Any] = {}
    policy = _policy(flat.get("policy"), f"{where}: router.policy") or {"name": "linucb", "options": {}}
    for key, value in flat.items():
        if key in _LIFTED.values():
            raise _unknown_key(key, RouterConfig, f"{where}: router")
        if key in _LIFTED:
            router.setdefault(_LIFTED[key], {})[_RENAMED.get(key, key)] = value
        elif key in _POLICY_SHORTHANDS:
            policy["options"][_POLICY_SHORTHANDS[key]] = value
        elif key == "replica_policy":
            router[key] = _policy(value, f"{where}: router.replica_policy")
            _require_replica_policy(router[key], where)
        elif key == "feedback" and isinstance(value, str):
            router[key] = {"arm": value}
        elif key != "policy":
            router[key] = value
    router["policy"] = policy
    _made(policy, f"{where}: router.policy")
    context = _mapping(router.get("context"), f"{where}: router.context")
    if isinstance(task_types, Mapping):
        context.setdefault("task_types", list(task_types))
    router["context"] = context
    return router


def _made(policy: dict[str, Any], where: str) -> Policy:
    try:
        return make_policy(PolicySpec(name=policy["name"], options=policy["options"]), resolve=import_class)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}") from error


def _require_replica_policy(policy: dict[str, Any], where: str) -> None:
    """A replica is chosen by load, without a context and without verdicts: a policy that needs them is of no use."""
    where = f"{where}: router.replica_policy"
    if not policy:
        raise ConfigError(f"{where} is null; it must name a policy")
    candidates = [Candidate(name="a"), Candidate(name="b")]
    made = _made(policy, where)
    try:
        made.choose(Context(decision_id=1, x=np.zeros(0)), candidates, Streams(0).at("replica", 1))
    except Exception as error:  # a user's class may raise anything
        what = error.message if isinstance(error, Error) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{where}: {policy['name']!r} cannot choose without a context: {what}") from error


def _check_keys(value: Any, kind: Any, where: str) -> None:
    """Find unknown keys before msgspec does, to list the valid ones."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        for arg in args:
            if isinstance(arg, type) and issubclass(arg, msgspec.Struct):
                _check_keys(value, arg, where)
    elif origin is dict and isinstance(value, Mapping):
        for key, item in value.items():
            _check_keys(item, args[1], f"{where}: {key}")
    elif origin in (tuple, list) and isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_keys(item, args[0], f"{where}[{index}]")
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, Mapping):
        _check_struct_keys(value, kind, where)


def _check_struct_keys(value: Mapping[Any, Any], kind: type[msgspec.Struct], where: str) -> None:
    field_by_name = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for key, item in value.items():
        if key not in field_by_name:
            raise _unknown_key(key, kind, where)
        _check_keys(item, field_by_name[key].type, f"{where}: {key}")


def _unknown_key(key: Any, kind: type[msgspec.Struct], where: str) -> ConfigError:
    valid = {field.encode_name for field in msgspec.structs.fields(kind)}
    if kind is RouterConfig:
        valid = (valid | _LIFTED.keys() | _POLICY_SHORTHANDS.keys()) - set(_LIFTED.values())
    return ConfigError(f"{where}: unknown key {key!r}; valid keys: {', '.join(sorted(valid))}")


class _StrictLoader(yaml.SafeLoader):
    """YAML without silent overwriting."""


def _mapping_without_duplicates(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue  # `<<: *anchor`, which the mapping's own keys overrule
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, str | int | float | bool) and key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} is written twice", key_node.start_mark
            )
        if isinstance(key, str | int | float | bool):
            seen.add(key)
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_duplicates)
# YAML 1.1 reads `1e-05`, as Python and JSON write it, as text: it wants a dot and a signed exponent. YAML 1.2 does not.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)
