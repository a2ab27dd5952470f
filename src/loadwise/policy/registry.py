"""Policies by name: what a configuration may say, and how a user's own class joins.

To add a policy: write its class beside the others, add one line to `_ENTRIES`, and `tests/policy` runs the contract
suite of `policy.checks` over it. A user's class joins by `register`, or by its dotted path in the configuration:

    router: {policy: {name: "my_package.my_module:MyPolicy", options: {alpha: 2}}}

This room imports nothing for anybody: whoever may import hands `make_policy` a resolver (`loadwise.settings`). A path
in a journal that somebody sent must not run his code.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact

from .balance import LeastLoaded, PowerOfTwo, Resident
from .base import Policy
from .context import ContextSpec
from .drift import Drift, DriftOptions
from .fixed import Fixed, FixedOptions, Mixing, MixingOptions, Random, RoundRobin
from .greedy import EpsilonGreedy, EpsilonGreedyOptions
from .known import Known, KnownOptions
from .labelled import ACRouter, ACRouterOptions, Table, TableOptions
from .linear import LinTS, LinTSOptions, LinUCB, LinUCBOptions
from .nearest import Nearest, NearestOptions
from .pacer import Pacer, PacerOptions

_ATTRIBUTES = ("name", "reads", "is_deterministic")
_METHODS = ("choose", "propensities", "observe", "learn", "undo", "dump", "load")


Resolve = Callable[[str], Any]
"""From `package.module:Class` to what is there; raises ConfigError where it is not, or may not be imported."""


class PolicySpec(Fact, frozen=True, kw_only=True):
    """A policy as a configuration names it."""

    name: str
    """A registered name, or `package.module:Class`."""
    options: dict[str, Any] = {}
    """Its own options; an unknown one is refused with the valid ones listed."""


class NoOptions(Fact, frozen=True, kw_only=True):
    """The configuration of a policy that has none."""


class Entry(NamedTuple):
    """How a policy is made: `factory(options)` with a fact, or `factory(**options)` where `options` is None."""

    factory: Callable[..., Policy]
    options: type[Fact] | None


_ENTRIES: dict[str, Entry] = {
    "acrouter": Entry(ACRouter, ACRouterOptions),
    "drift": Entry(Drift, DriftOptions),
    "epsilon_greedy": Entry(EpsilonGreedy, EpsilonGreedyOptions),
    "fixed": Entry(Fixed, FixedOptions),
    "knn": Entry(Nearest, NearestOptions),
    "least_loaded": Entry(LeastLoaded, NoOptions),
    "known": Entry(Known, KnownOptions),
    "lints": Entry(LinTS, LinTSOptions),
    "linucb": Entry(LinUCB, LinUCBOptions),
    "mixing": Entry(Mixing, MixingOptions),
    "pacer": Entry(Pacer, PacerOptions),
    "power_of_two": Entry(PowerOfTwo, NoOptions),
    "random": Entry(Random, NoOptions),
    "resident": Entry(Resident, NoOptions),
    "round_robin": Entry(RoundRobin, NoOptions),
    "table": Entry(Table, TableOptions),
}


def policy_names() -> tuple[str, ...]:
    """Every registered name, sorted."""
    return tuple(sorted(_ENTRIES))


def register(name: str, factory: Callable[..., Policy], options: type[Fact] | None = None) -> None:
    """Make a policy known under `name`.

    Args:
        factory: a class or function; called with one `options` fact where its type is given, else with the configured
            options as keyword arguments.

    Raises:
        ConfigError: the name is empty, looks like a path, or belongs to another factory.
    """
    if not name or ":" in name:
        raise ConfigError(f"policy name {name!r} must be non-empty and without ':'")
    entry = Entry(factory, options)
    if _ENTRIES.setdefault(name, entry) != entry:
        raise ConfigError(f"policy name {name!r} is taken by {_ENTRIES[name].factory!r}")


def unregister(name: str) -> None:
    """Forget a registered policy; unknown names are ignored."""
    _ENTRIES.pop(name, None)


def make_policy(spec: PolicySpec, context: ContextSpec | None = None, resolve: Resolve | None = None) -> Policy:
    """A fresh policy of the configuration.

    >>> make_policy(PolicySpec(name="linucb", options={"alpha": 0.3})).is_deterministic
    True
    >>> make_policy(PolicySpec(name="linucb", options={"alfa": 0.3}))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    loadwise.kernel.errors.ConfigError: policy 'linucb' has no option 'alfa'; it has alpha, component_ridge, ...

    Args:
        context: where given, policies that learn on contexts are bound to its length and version.
        resolve: loads users' classes; without it a dotted path is refused.

    Raises:
        ConfigError: unknown name, unknown or wrong option, or a user's class that cannot be loaded or lacks a method.
    """
    entry = _entry(spec.name, resolve)
    options = dict(spec.options)
    if entry.options is None:
        policy = _call(spec.name, entry.factory, options)
    else:
        if context is not None and "context_version" in entry.options.__struct_fields__:
            if "n_labels" in entry.options.__struct_fields__:
                options.setdefault("n_labels", context.n_features - context.n_components)
            else:
                options.setdefault("n_features", context.n_features)
            if "n_components" in entry.options.__struct_fields__:
                options.setdefault("n_components", context.n_components)
            options.setdefault("context_version", context.version)
        checked = _options(spec.name, entry.options, options)
        policy = entry.factory() if entry.options is NoOptions else entry.factory(checked)
    _require_contract(spec.name, policy)
    return policy


def named_candidates(spec: PolicySpec) -> tuple[str, ...]:
    """Candidates that the options speak of, so that a configuration can be checked against its pool.

    >>> named_candidates(PolicySpec(name="mixing", options={"weights": {"small": 0.5, "large": 0.5}}))
    ('large', 'small')
    """
    if spec.name == "fixed":
        return tuple(name for name in (spec.options.get("candidate"),) if isinstance(name, str))
    weights = spec.options.get("weights") if spec.name == "mixing" else None
    return tuple(sorted(weights)) if isinstance(weights, Mapping) else ()


def is_path(name: str) -> bool:
    """Whether a policy's name is the dotted path of a user's class."""
    return ":" in name


def _entry(name: str, resolve: Resolve | None) -> Entry:
    entry = _ENTRIES.get(name)
    if entry is not None:
        return entry
    if is_path(name):
        return Entry(_load(name, resolve), None)
    raise ConfigError(
        f"unknown policy {name!r}; known are {', '.join(policy_names())}, or a class of yours as 'package.module:Class'"
    )


def _load(path: str, resolve: Resolve | None) -> Callable[..., Policy]:
    """The class at a path, and no other thing: it is looked at before it is called, for a call may do anything."""
    if resolve is None:
        raise ConfigError(f"policy {path!r} is a class outside loadwise, and importing one is not allowed here")
    found = resolve(path)
    if not isinstance(found, type):
        raise ConfigError(f"policy {path!r} is {type(found).__name__!r}, not a class")
    missing = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if missing:
        raise ConfigError(f"policy {path!r} lacks {', '.join(missing)}; the contract is loadwise.policy.base.Policy")
    return found


def _options(name: str, kind: type[Fact], options: Mapping[str, Any]) -> Fact:
    valid = sorted(kind.__struct_fields__)
    for option in options:
        if option not in valid:
            raise ConfigError(f"policy {name!r} has no option {option!r}; it has {', '.join(valid) or 'none'}")
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"policy {name!r}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"policy {name!r}: {error.message}") from error


def _call(name: str, factory: Callable[..., Policy], options: Mapping[str, Any]) -> Policy:
    try:
        signature = inspect.signature(factory)
    except ValueError:
        signature = None  # a class written in C: calling it will say what is wrong
    try:
        if signature is not None:
            signature.bind(**options)
        return factory(**options)
    except Exception as error:  # a user's class may raise anything
        shown = f"; it is called as {name}{signature}" if signature is not None else ""
        raise ConfigError(f"policy {name!r} refuses options {dict(options)!r}: {error}{shown}") from error


def _require_contract(name: str, policy: Any) -> None:
    missing = [attribute for attribute in _ATTRIBUTES if not hasattr(policy, attribute)]
    missing += [method for method in _METHODS if not callable(getattr(policy, method, None))]
    if missing:
        raise ConfigError(f"policy {name!r} lacks {', '.join(missing)}; the contract is loadwise.policy.base.Policy")
