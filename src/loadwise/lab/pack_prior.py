"""An experience pack made ready for one pool: `policy.prior.Prior` for a context, its models and a reward.

A model that the pack knows gets its own strength and price. One that is new to it gets those of its siblings: the
models whose names share most words with its own, words of size counting double ("claude-sonnet-4" stands for
"claude-sonnet-4.5" before "claude-haiku-4.5" does), or the one that `siblings` names. Where nobody is alike it gets
the mean of all. Strength is said per family, so a model can be a sibling in one family and known in another.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loadwise.kernel.errors import ConfigError
from loadwise.policy.context import ContextSpec
from loadwise.policy.prior import COUNT_MAX, N_ADDED, WEIGHT_MAX, Primed, Prior
from loadwise.runner.packed import N_TOLD

from .pack import Baseline, Pack

Array = npt.NDArray[np.float64]

NOISE = 0.2
"""Variance of a reward around its mean: a success of 0 or 1 has at most a quarter."""
SPREADS = {"bias": 0.15, "task_type": 0.12, "domain": 0.08, "component": 0.08, "told": 0.03, "hardness": 0.3}
"""How far a model may be from what the pack says of it, as standard deviations of coefficients."""
UNKNOWN_COUNT = 1.0
"""Pseudo-counts of a kind of task that the pack has not seen: a learner without a pack starts with as many (its ridge),
and so a pack that says nothing of a kind takes nothing from what would be learned of it."""
SPREAD_COST = 0.6
"""The same for its price, as a share of the mean price."""
SHARPNESS = 8.0
"""How much more the nearest sibling counts than a farther one."""
FAR = 0.25
"""Likeness at which a sibling counts as much as the mean of all models."""

_SMALL = ("nano", "micro", "mini", "tiny", "small", "lite", "flash", "fast", "turbo", "haiku")
_SIZES = frozenset((*_SMALL, "medium", "air", "sonnet", "opus", "large", "pro", "max", "ultra", "plus"))


class PackPrior(NamedTuple):
    """A pack for one pool, before the price of money is known: rewards are success less cost times a price."""

    base: Prior
    """Without means."""
    success_means: dict[str, Array]
    """By model, shape (d + 2,)."""
    cost_means: dict[str, Array]
    """In dollars."""
    others_success: Array
    others_cost: Array
    mean_usd: float
    """What a middling task costs the models of the pool on average."""

    def at(self, success_weight: float, weight_per_usd: float) -> Prior:
        """The prior for rewards `success_weight`·success - `weight_per_usd`·dollars."""
        counts = np.array(self.base.counts)
        spread = max(SPREAD_COST * weight_per_usd * self.mean_usd, 1e-3)
        if self.mean_usd <= 0.0:  # no price is known: the learner finds out
            spread = 1.0
        counts[-1] = NOISE / spread**2
        counts = np.clip(counts, 1e-3, COUNT_MAX)

        def mean(success: Array, cost: Array) -> tuple[float, ...]:
            return _bounded(success_weight * success - weight_per_usd * cost)

        return Prior(
            **{
                **{field: getattr(self.base, field) for field in self.base.__struct_fields__},
                "counts": tuple(counts.tolist()),
                "noise": NOISE + (weight_per_usd * self.mean_usd) ** 2,
                "doubt": SPREADS["bias"] ** 2 + SPREADS["task_type"] ** 2 + 2.0 * spread**2,
                "means": {name: mean(self.success_means[name], self.cost_means[name]) for name in self.success_means},
                "mean_of_others": mean(self.others_success, self.others_cost),
            }
        )


def _bounded(values: Array) -> tuple[float, ...]:
    return tuple(np.clip(values, -WEIGHT_MAX, WEIGHT_MAX).tolist())


def make_prior(
    pack: Pack, spec: ContextSpec, models: Sequence[str], siblings: Mapping[str, str] | None = None
) -> PackPrior:
    """The prior of `models` for contexts of `spec`, whose last three components are what the pack says of a text.

    Args:
        siblings: by model the model of the pack that stands for it.

    Raises:
        ConfigError: a sibling is not in the pack or not in the pool, or the context has no room for the pack's word.
    """
    siblings = dict(siblings or {})
    for model, sibling in siblings.items():
        if sibling not in pack.models:
            raise ConfigError(
                f"siblings: {sibling!r}, named for {model!r}, is not in the pack; it has {', '.join(pack.models)}"
            )
        if model not in models:
            raise ConfigError(f"siblings: {model!r} is no model of the pool; it has {', '.join(models)}")
    if spec.n_components < N_TOLD:
        raise ConfigError(f"a context of {spec.n_components} components has no room for a pack's {N_TOLD}")
    means = {model: _means(pack, spec, model, siblings.get(model, model)) for model in models}
    others = _means(pack, spec, None, None)
    prices = [cost[-1] for _, cost in means.values()]
    return PackPrior(
        base=_base(pack, spec),
        success_means={model: success for model, (success, _) in means.items()},
        cost_means={model: cost for model, (_, cost) in means.items()},
        others_success=others[0],
        others_cost=others[1],
        mean_usd=float(np.mean(prices)),
    )


def _base(pack: Pack, spec: ContextSpec) -> Prior:
    d = spec.n_features
    weights = {field: np.zeros(d) for field in ("success", "success_blind", "cost", "cost_blind")}
    n = len(pack.families)
    for field, w in weights.items():
        # A kind of task that the pack does not know is taken for the mean of those it knows.
        middle = sum(getattr(one, field) for one in pack.families.values()) / n
        if spec.bias:
            w[0] = middle
        for place, name in enumerate(spec.task_types):
            family = pack.families.get(name)
            if family is not None:
                w[int(spec.bias) + place] = getattr(family, field) - (middle if spec.bias else 0.0)
        for place, name in enumerate(spec.domains):
            w[int(spec.bias) + len(spec.task_types) + place] = getattr(_domain(pack, name), field, 0.0)
    weights["success"][d - 2] = weights["cost"][d - 1] = 1.0
    counts = _counts(pack, spec)
    return Prior(
        pack=pack.digest[:12],
        at_text=d - N_TOLD,
        success=_bounded(weights["success"]),
        success_blind=_bounded(weights["success_blind"]),
        cost=_bounded(weights["cost"]),
        cost_blind=_bounded(weights["cost_blind"]),
        counts=tuple(counts.tolist()),
        mean_of_others=(0.0,) * (d + N_ADDED),
    )


def _domain(pack: Pack, name: str) -> Baseline | None:
    """A domain by its full name, or by the last part where only one family has it."""
    found = pack.domains.get(name)
    if found is not None:
        return found
    alike = [baseline for full, baseline in pack.domains.items() if full.partition("/")[2] == name]
    return alike[0] if len(alike) == 1 else None


def _counts(pack: Pack, spec: ContextSpec) -> Array:
    """Pseudo-counts of each coefficient; the price's depends on the reward and is set later."""
    kinds = ["bias"] * int(spec.bias)
    kinds += ["task_type" if name in pack.families else "" for name in spec.task_types]
    kinds += ["domain" if _domain(pack, name) is not None else "" for name in spec.domains]
    kinds += ["component"] * (spec.n_components - N_TOLD) + ["told"] * N_TOLD + ["hardness"]
    return np.array([NOISE / SPREADS[kind] ** 2 if kind else UNKNOWN_COUNT for kind in kinds] + [1.0])


def _means(pack: Pack, spec: ContextSpec, model: str | None, stands_for: str | None) -> tuple[Array, Array]:
    """Means of success and of dollars over [x | h | g] for one model; for any other where `model` is None."""
    d = spec.n_features
    success, cost = np.zeros(d + N_ADDED), np.zeros(d + N_ADDED)
    beyond, usd = {}, {}
    for family in pack.families:
        beyond[family], usd[family] = _expected(pack, family, stands_for)
    middle, price = float(np.mean(list(beyond.values()))), _geometric(list(usd.values()))
    success[-2], cost[-1] = 1.0, price
    if spec.bias:
        success[0] = middle
    for place, name in enumerate(spec.task_types):
        if name in pack.families:
            at = int(spec.bias) + place
            success[at] = beyond[name] - (middle if spec.bias else 0.0)
            cost[at] = (usd[name] - price) * float(np.exp(min(pack.families[name].cost_blind, 5.0)))
    return success, cost


def _geometric(prices: Sequence[float]) -> float:
    """Geometric mean; zero where any is zero, which is what an unknown price is."""
    return 0.0 if min(prices) <= 0.0 else float(np.exp(np.mean(np.log(prices))))


def _expected(pack: Pack, family: str, model: str | None) -> tuple[float, float]:
    """What a model reaches beyond a middling one in a family, and its dollars per unit of g."""
    known = {name: abilities[family] for name, abilities in pack.models.items() if family in abilities}
    own = known.get(model) if model is not None else None
    likeness = {name: 0.0 if model is None else alike(model, name) for name in known}
    success = own.success if own is not None else _weighed(likeness, {n: a.success for n, a in known.items()}, 0.0)
    prices = {name: float(np.log(max(usd, 1e-9))) for name, usd in _prices(pack, family).items()}
    if own is not None and own.cost_usd is not None:
        return success, own.cost_usd
    if not prices:
        return success, 0.0 if not _prices(pack, None) else float(np.mean(list(_prices(pack, None).values())))
    likeness = {name: 0.0 if model is None else alike(model, name) for name in prices}
    return success, float(np.exp(_weighed(likeness, prices, float(np.mean(list(prices.values()))))))


def _prices(pack: Pack, family: str | None) -> dict[str, float]:
    """Dollars per unit of g of the models that have them, in a family; in any where it is None."""
    found: dict[str, list[float]] = {}
    for name, abilities in pack.models.items():
        for of_family, ability in abilities.items():
            if family in (None, of_family) and ability.cost_usd is not None:
                found.setdefault(name, []).append(ability.cost_usd)
    return {name: float(np.mean(values)) for name, values in found.items()}


def _weighed(likeness: Mapping[str, float], values: Mapping[str, float], of_all: float) -> float:
    """Mean of values by likeness, with the mean of all models as one that is `FAR`."""
    weights = {name: float(np.exp(SHARPNESS * like)) for name, like in likeness.items() if like > FAR}
    far = float(np.exp(SHARPNESS * FAR))
    total = sum(weights.values()) + far
    return (sum(weight * values[name] for name, weight in weights.items()) + far * of_all) / total


def alike(one: str, other: str) -> float:
    """Likeness of two models' names, in [0, 1]: shared words over all words, those of size counting double.

    >>> alike("claude-sonnet-4.5", "claude-sonnet-4") > alike("claude-sonnet-4.5", "claude-haiku-4.5")
    True
    >>> alike("gpt-5-mini", "gpt-5-mini"), alike("gpt-5-mini", "qwen3-8b")
    (1.0, 0.0)
    """
    left, right = _words(one), _words(other)
    union = sum(_weight(word) for word in left | right)
    return sum(_weight(word) for word in left & right) / union if union else 0.0


def _words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z]+(?=\d|\b|[^a-z])|\d+b?", name.lower()))


def _weight(word: str) -> float:
    return 2.0 if word in _SIZES or re.fullmatch(r"\d+b", word) else 1.0


def on_tasks(prior: Prior, strength: float, x: Array, models: Sequence[str]) -> tuple[Array, Array]:
    """The learner's variables of every context, shape (n, d + 2), and the prior means, shape (n, K)."""
    primed = Primed(prior, strength)
    seen = [primed.seen(row, list(models)) for row in x]
    return np.stack([z for z, _ in seen]), np.array([means for _, means in seen])
