"""Where in a document a value is refused by its own checks.

A type error names its place; a check of ours (`__post_init__`) knows its value, not the key under which it stands.
Parts are tried one by one: the innermost that is refused by itself is the place.
"""

from types import UnionType
from typing import Any, Union, get_args, get_origin

import msgspec

from loadwise.kernel.errors import ConfigError


def place_of(value: Any, kind: Any) -> str:
    """Keys to the innermost part of `value` that is refused, with dots between them; empty where only the whole is.

    >>> from loadwise.sim.workload import WorkloadSpec
    >>> place_of({"arrivals": {"kind": "closed", "n_agents": 1}, "tool_s": {"uniform": [2, 1]}}, WorkloadSpec)
    'tool_s'
    """
    for key, part, kind_of_part in _parts(value, kind):
        if _is_refused(part, kind_of_part):
            inner = place_of(part, kind_of_part)
            return f"{key}.{inner}" if inner else key
    return ""


def _is_refused(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except ConfigError:
        return True
    except msgspec.ValidationError:
        return False
    return False


def _parts(value: Any, kind: Any) -> list[tuple[str, Any, Any]]:
    """What a value consists of: (key, value, type)."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return next((_parts(value, one) for one in arguments if _is_refused(value, one)), [])
    if origin is dict and isinstance(value, dict):
        return [(str(key), part, arguments[1]) for key, part in value.items()]
    if origin is list and isinstance(value, list):
        return [(str(i), part, arguments[0]) for i, part in enumerate(value)]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, dict):
        fields = msgspec.structs.fields(kind)
        return [(f.encode_name, value[f.encode_name], f.type) for f in fields if f.encode_name in value]
    return []
