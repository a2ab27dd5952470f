"""Errors of the decoder show the value that they speak of, and what it may be."""

from enum import StrEnum
from typing import Any, Literal

import msgspec
import pytest

from loadwise.kernel.places import SHOWN_MAX, choices_at, value_at


class Colour(StrEnum):
    """One of two."""

    RED = "red"
    BLUE = "blue"


class Inner(msgspec.Struct):
    """What lies in lists and mappings."""

    kind: Literal["one", "two"] = "one"
    colour: Colour | None = None
    n: int = 0


class Outer(msgspec.Struct):
    """A document."""

    inner: Inner
    many: list[Inner] = []
    named: dict[str, Inner] = {}
    either: Inner | None = None


def message_of(document: dict[str, Any]) -> str:
    """What the decoder says of it."""
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(document, Outer)
    return str(caught.value)


@pytest.mark.parametrize(
    ("document", "value", "choices"),
    [
        ({"inner": {"n": "x"}}, "; it is 'x'", ""),
        ({"inner": {}, "many": [{}, {"n": 1.5}]}, "; it is 1.5", ""),
        ({"inner": {}, "named": {"a": {"n": "y"}}}, "; it is 'y'", ""),
        ({"inner": {"kind": "three"}}, "; it is 'three'", "; it may be one, two"),
        ({"inner": {}, "many": [{"kind": "three"}]}, "; it is 'three'", "; it may be one, two"),
        ({"inner": {}, "named": {"a": {"colour": "pink"}}}, "; it is 'pink'", "; it may be blue, red"),
        ({"inner": {}, "either": {"kind": "four"}}, "; it is 'four'", "; it may be one, two"),
        ({"many": []}, "", ""),
    ],
)
def test_the_value_and_what_it_may_be(document: dict[str, Any], value: str, choices: str) -> None:
    """At any depth; a key that is missing has none."""
    message = message_of(document)
    assert value_at(document, message) == value
    assert choices_at(Outer, message) == choices


def test_where_the_place_is_not_unique_nothing_is_guessed() -> None:
    """A mapping of two says `[...]`; a message without a place, nothing."""
    document = {"inner": {}, "named": {"a": {"n": "y"}, "b": {"n": 1}}}
    assert value_at(document, message_of(document)) == ""
    assert value_at({"a": 1}, "something else") == ""


def test_a_long_value_is_cut() -> None:
    """To so many characters."""
    document = {"inner": {"n": "z" * 500}}
    assert len(value_at(document, message_of(document))) == len("; it is ") + SHOWN_MAX
