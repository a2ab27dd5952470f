"""Numbers say their unit: the last part of a field's name, or a short list of exceptions."""

import inspect
import types
import typing

import msgspec
import pytest

from loadwise import settings
from loadwise.kernel import commands, events, pool, work
from loadwise.policy import context, linear, reward
from loadwise.router import config

UNITS = ("_s", "_at_s", "_tokens", "_usd", "_bytes", "_ratio", "_per_s", "_per_minute", "_per_hour", "_per_h", "_max")
COUNTS = ("n_",)
ALLOWED = {
    # ids and ordinals
    "turn_id",
    "decision_id",
    "attempt",
    "slot",
    "priority",
    # dimensionless by nature
    "score",
    "success",
    "reward",
    "replaced_reward",
    "false_pass",
    "false_fail",
    "mean",
    "width",
    "propensity",
    "propensities",
    "value",
    "values",
    "context",
    "components",
    "status",
    "size",
    "slots",
    "alpha",
    "beta",
    "ridge",
    "component_ridge",
    "prior_strength",
    "optimism",
    "expected_success",
    "weights",
    "acting_weight",
    "scale",
    "multiplier",
    "backpressure",
    "cost_weight",
    "exploration_floor",
    # the unit stands elsewhere in the name, or in the parent's name
    "seconds_per_point",
    "input",
    "output",
    "cached_input",
}
"""`usd_per_million.input` and its like; a new entry needs a reason of one of these kinds."""


def structs():
    """Every struct that these modules define."""
    for module in (commands, events, pool, work, config, context, linear, reward, settings):
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__:
                yield kind


def is_number(annotation):
    """Whether an annotation holds ints or floats, at any depth."""
    if isinstance(annotation, type):
        return issubclass(annotation, int | float) and annotation is not bool
    if isinstance(annotation, typing.NewType):
        return is_number(annotation.__supertype__)
    args = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return False
    return any(is_number(arg) for arg in args if not isinstance(arg, types.EllipsisType))


def numbers(kind):
    """Names of the number fields of a struct."""
    return [name for name, annotation in typing.get_type_hints(kind).items() if is_number(annotation)]


def has_unit(name):
    """Whether a name tells its unit."""
    return name.removesuffix("_by_model").endswith(UNITS) or name.startswith(COUNTS) or name in ALLOWED


FIELDS = [(kind, name) for kind in structs() for name in numbers(kind)]


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=lambda value: getattr(value, "__name__", value))
def test_number_fields_name_their_unit(kind, name):
    """Seconds, tokens, dollars, bytes, ratios: never a bare number."""
    assert has_unit(name), f"{kind.__name__}.{name} holds a number and names no unit"


def test_the_walk_finds_numbers_at_any_depth():
    """So that the test above cannot pass by seeing nothing."""
    assert {"at_s", "turn_id", "prompt_tokens", "components", "budget_s"} <= set(numbers(events.TurnArrived))
    assert "values" in numbers(events.SignalsObserved) and "score" in numbers(commands.CandidateView)
    assert "is_final" not in numbers(events.TurnArrived) and "name" not in numbers(pool.BackendSpec)
    assert len(FIELDS) > 80 and not has_unit("timeout") and not has_unit("latency_ms")


def test_no_exception_is_idle():
    """An entry that no field needs any more goes."""
    assert {name for _, name in FIELDS} >= ALLOWED
