"""What stands at the place in a document that a message of the decoder names, so that an error can show it.

The decoder says of what type a value is and where it stands (``at `$.router.admission.reserves` ``), not which it is.
"""

import re
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

SHOWN_MAX = 80
"""Characters of a value."""


def value_at(document: Any, message: str) -> str:
    """The value at the place that a message names, for its end; nothing where the place is not unique or is missing.

    >>> value_at({"a": [{"b": 3}]}, "Expected `bool`, got `int` - at `$.a[0].b`")
    '; it is 3'
    """
    if "missing required field" in message or "unknown field" in message:
        return ""
    values = [document] if "at `$" in message else []
    for part in _parts(message):
        values = [inner for value in values for inner in _inside(value, part)]
    if len(values) != 1:
        return ""
    text = repr(values[0])
    return f"; it is {text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 3] + '...'}"


def choices_at(kind: Any, message: str) -> str:
    """The valid values of a field of the struct `kind` where a message names one that is none, for its end."""
    if "Invalid enum value" not in message:
        return ""
    kinds = [kind]
    for part in _parts(message):
        kinds = [inner for owner in kinds for inner in _kinds_inside(owner, part)]
    names = sorted({str(value) for one in kinds for value in _choices(one)})
    return f"; it may be {', '.join(names)}" if names else ""


def _parts(message: str) -> list[str]:
    """Keys and indices of the place; `...` is every key of a mapping."""
    place = message.rsplit("at `$", 1)[-1].rstrip("`") if "at `$" in message else ""
    return [name or index for name, index in re.findall(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]", place)]


def _inside(value: Any, key: str) -> list[Any]:
    if isinstance(value, list | tuple):
        return [value[int(key)]] if key.isdigit() and int(key) < len(value) else []
    if isinstance(value, dict):
        return list(value.values()) if key == "..." else [value[key]] if key in value else []
    return []


def _kinds_inside(kind: Any, key: str) -> list[Any]:
    """Types of what lies at a key of a value of this type."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [field.type for field in msgspec.structs.fields(kind) if field.encode_name == key]
    if get_origin(kind) in (Union, UnionType):
        return [inner for one in get_args(kind) for inner in _kinds_inside(one, key)]
    return [inner for inner in get_args(kind)[-1:] or get_args(kind)[:1] if inner is not Ellipsis]


def _choices(kind: Any) -> list[Any]:
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if isinstance(kind, type) and hasattr(kind, "__members__"):
        return [member.value for member in kind.__members__.values()]
    return [choice for inner in get_args(kind) for choice in _choices(inner)]
