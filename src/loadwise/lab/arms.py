"""The policies of a comparison: names of the registry, presets of the router, and one fixed policy per model."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from loadwise.kernel.errors import ConfigError
from loadwise.policy.base import Policy
from loadwise.policy.context import ContextSpec
from loadwise.policy.fixed import RoundRobin
from loadwise.policy.prior import Prior
from loadwise.policy.registry import PolicySpec, make_policy, policy_names
from loadwise.policy.stateless import Stateless
from loadwise.settings import import_class, parse_config, preset_names

from .offline import OFFLINE

LINEAR = ("linucb", "lints", "pacer")
"""Policies that take the prior of a pack."""
DEFAULT_PRESETS = ("loadwise",)
"""Presets that join the registered policies where none are named: what a user runs."""


class Arm(NamedTuple):
    """One policy under the name it is reported by."""

    label: str
    spec: PolicySpec | None
    """None for a selector of `lab.offline`, which is no policy."""

    def make(self, context: ContextSpec, price_by_model: Mapping[str, float], prior: Prior | None = None) -> Policy:
        """A fresh policy for contexts of that specification.

        Args:
            price_by_model: mean costs, which a pacer is told.
            prior: what a linear learner is told; others have no use for it.
        """
        spec = self.spec
        assert spec is not None
        options = dict(spec.options)
        if spec.name == "pacer":
            options.setdefault("prices_usd", dict(price_by_model))
        if spec.name in LINEAR:
            if prior is not None:
                options.setdefault("prior", prior)
            elif "prior_strength" in options:
                raise ConfigError(f"policy {self.label!r}: prior_strength says nothing without a pack")
        return make_policy(PolicySpec(name=spec.name, options=options), context, import_class)


def is_static(policy: Policy) -> bool:
    """Whether rewards cannot change what it chooses: it is then replayed once, for one cost weight."""
    return isinstance(policy, Stateless | RoundRobin)


def make_arms(names: Sequence[str] | None, models: Sequence[str]) -> list[Arm]:
    """The arms for names as a user gives them; all policies and the default preset where there are none.

    A name is a registered policy, a preset of the router, a selector of `lab.offline`, `fixed:MODEL`, or
    `package.module:Class`. `fixed` alone stands for every model in turn, `mixing` for equal weights. Options follow as
    in `linucb?alpha=0.3&ridge=2`.

    Raises:
        ConfigError: a name is unknown, given twice, or its policy cannot be made.
    """
    wanted = [*policy_names(), *DEFAULT_PRESETS, *OFFLINE] if names is None else list(names)
    arms: list[Arm] = []
    for name in wanted:
        arms.extend(_arms_of(name, models))
    labels = [arm.label for arm in arms]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"policy {label!r} is asked for twice")
    for spec in (arm.spec for arm in arms if arm.spec is not None):
        make_policy(spec, resolve=import_class)  # so that a wrong name ends the run before its first replay
    return arms


def _arms_of(said: str, models: Sequence[str]) -> list[Arm]:
    name, mark, text = said.partition("?")
    if not mark:
        return _plain_arms_of(name, models)
    arms = []
    for arm in _plain_arms_of(name, models):
        if arm.spec is None:
            raise ConfigError(f"policy {said!r}: selector {name!r} has no options")
        options = {**arm.spec.options, **_options(said, text)}
        arms.append(Arm(f"{arm.label}?{text}", PolicySpec(name=arm.spec.name, options=options)))
    return arms


def _options(said: str, text: str) -> dict[str, Any]:
    """`key=value` parts as options.

    >>> _options("linucb?alpha=0.3&gram=landed", "alpha=0.3&gram=landed")
    {'alpha': 0.3, 'gram': 'landed'}
    """
    options: dict[str, Any] = {}
    for part in text.split("&"):
        key, equals, value = part.partition("=")
        if not key or not equals or key in options:
            raise ConfigError(f"policy {said!r}: {part!r} is not, once each, KEY=VALUE")
        try:
            options[key] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            options[key] = value  # a bare word
    return options


def _plain_arms_of(name: str, models: Sequence[str]) -> list[Arm]:
    kind, colon, model = name.partition(":")
    if kind == "fixed":
        if colon and model not in models:
            raise ConfigError(f"policy {name!r}: model {model!r} is not among {', '.join(models)}")
        chosen = [model] if colon else models
        return [Arm(f"fixed:{one}", PolicySpec(name="fixed", options={"candidate": one})) for one in chosen]
    if name == "mixing":
        share = 1.0 / len(models)
        return [Arm(name, PolicySpec(name=name, options={"weights": dict.fromkeys(models, share)}))]
    if name in OFFLINE:
        return [Arm(name, None)]
    if name in policy_names() or colon:
        return [Arm(name, PolicySpec(name=name))]
    if name in preset_names():
        return [Arm(name, preset_policy(name))]
    raise ConfigError(
        f"policy {name!r} is unknown; known: {', '.join([*policy_names(), *OFFLINE])}, fixed:MODEL, the presets"
        f" {', '.join(preset_names())}, or a class of yours as 'package.module:Class'"
    )


def preset_policy(name: str) -> PolicySpec:
    """The policy that a preset of the router runs."""
    # A configuration needs some pool; the policy does not depend on which.
    pool = {"models": {"any": {}}, "backends": [{"name": "any", "model": "any"}]}
    return parse_config({"preset": name, **pool}, where=f"preset {name}").router.policy
