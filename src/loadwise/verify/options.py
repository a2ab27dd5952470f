"""Strict options of verifiers: errors name the kind, the key, the value and the limit."""

import json
import math
from typing import Any, TypeVar

import msgspec

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact

from .spec import VerifierSpec

JSON_MAX_CHARACTERS = 4_000_000

_Options = TypeVar("_Options", bound=Fact)


def read_options(spec: VerifierSpec, kind: type[_Options]) -> _Options:
    """The options of a verifier as its own fact.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, or one that the fact refuses.
    """
    valid = kind.__struct_fields__
    for key in spec.options:
        if key not in valid:
            has = ", ".join(sorted(valid)) or "none"
            raise ConfigError(f"verifier {spec.kind!r} has no option {key!r}; it has {has}")
    try:
        return msgspec.convert(spec.options, kind, strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"verifier {spec.kind!r}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"verifier {spec.kind!r}: {error.message}") from error


def require_range(name: str, value: float, low: float, high: float) -> None:
    """Refuse a number outside [low, high].

    Raises:
        ConfigError: it is outside, or not a number.
    """
    if not (math.isfinite(value) and low <= value <= high):
        raise ConfigError(f"{name} is {value!r}; it must be in [{low:g}, {high:g}]")


def require_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """Refuse a word that is not known.

    Raises:
        ConfigError: it is none of them.
    """
    if value not in known:
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(known)}")


def strict_json(text: str, depth_limit: int = 64) -> Any:
    """Parse JSON from a hostile source: bounded length and depth, no doubled key, no NaN, no number beyond the floats.

    Raises:
        ValueError: it is not such JSON; the message says why.
    """
    if len(text) > JSON_MAX_CHARACTERS:
        raise ValueError(f"JSON has {len(text)} characters; at most {JSON_MAX_CHARACTERS} are read")
    require_depth(text, depth_limit)
    try:
        return _decoder.decode(text)
    except RecursionError as error:
        raise ValueError(f"JSON is nested deeper than {depth_limit} levels") from error


def require_depth(text: str, limit: int) -> None:
    """Refuse JSON that nests too deep, before a parser tries it.

    Raises:
        ValueError: brackets outside of strings nest deeper than `limit`.
    """
    depth = 0
    is_string = is_escaped = False
    for char in text:
        if is_string:
            if is_escaped:
                is_escaped = False
            elif char == "\\":
                is_escaped = True
            elif char == '"':
                is_string = False
        elif char == '"':
            is_string = True
        elif char in "[{":
            depth += 1
            if depth > limit:
                raise ValueError(f"JSON is nested deeper than {limit} levels")
        elif char in "]}":
            depth -= 1


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("JSON has the same key twice in one object")
    return made


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"JSON holds {text[:20]}, which is beyond the floats")
    return number


def _constant(text: str) -> float:
    raise ValueError(f"JSON holds {text}, which is no JSON")


_decoder = json.JSONDecoder(object_pairs_hook=_mapping, parse_float=_finite, parse_constant=_constant)
